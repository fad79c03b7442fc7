"""Eight 4-bit codes in one int32 word: the only nibble shifts outside kernels.

The rule of the sequential layout: nibble ``j`` (bits ``4j .. 4j+3``) of word ``r`` along the packed axis holds element
``8r + j``. Words are signed on disk, so a shift right drags the sign in; the mask after it removes it again.

Shapes below name the packed axis; every function takes any leading axes and any device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError

NIBBLES = 8
"""Codes in one word."""

SEQUENTIAL = (0, 1, 2, 3, 4, 5, 6, 7)
"""Element j sits in nibble j: GPTQ, compressed-tensors, AWQ GEMV and our own layout."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Element j sits in nibble AWQ_ORDER[j]: AWQ GEMM."""


def unpack(words: Tensor, dim: int, order: tuple[int, ...] = SEQUENTIAL) -> Tensor:
    """Codes of packed words.

    Args:
        words: int32 ``[..., R, ...]``, R words along ``dim``.
        dim: the packed axis.
        order: nibble that holds element j of each word.

    Returns:
        uint8 ``[..., 8R, ...]``, values 0..15.
    """
    if words.dtype != torch.int32:
        raise CorruptError("packed words", got=str(words.dtype), wanted="torch.int32")
    dim = dim % words.ndim
    shape = list(words.shape)
    shape[dim] *= NIBBLES
    shape.insert(dim + 1, NIBBLES)
    shape[dim] //= NIBBLES
    out = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for j, nibble in enumerate(order):
        out.select(dim + 1, j).copy_((words >> (4 * nibble)) & 15)
    return out.flatten(dim, dim + 1)


def pack(codes: Tensor, dim: int, order: tuple[int, ...] = SEQUENTIAL) -> Tensor:
    """Words of codes; the inverse of :func:`unpack`.

    Args:
        codes: uint8 (or any integer) ``[..., 8R, ...]``, values 0..15; the axis ``dim`` must be a multiple of 8.

    Returns:
        int32 ``[..., R, ...]``, contiguous.
    """
    dim = dim % codes.ndim
    if codes.shape[dim] % NIBBLES:
        raise UnsupportedError("packing", got=f"{codes.shape[dim]} codes along axis {dim}", wanted="a multiple of 8")
    grouped = codes.unflatten(dim, (-1, NIBBLES))
    out = torch.zeros(grouped.select(dim + 1, 0).shape, dtype=torch.int32, device=codes.device)
    for j, nibble in enumerate(order):
        # int32 has no unsigned twin that shifts on every device: bit 31 is set through wrap-around, which torch defines
        out |= grouped.select(dim + 1, j).to(torch.int32) << (4 * nibble)
    return out


def pack_padded(codes: Tensor, dim: int, order: tuple[int, ...] = SEQUENTIAL) -> Tensor:
    """:func:`pack` for any length: the unused nibbles of the last word are 0."""
    dim = dim % codes.ndim
    missing = -codes.shape[dim] % NIBBLES
    if missing:
        shape = list(codes.shape)
        shape[dim] = missing
        codes = torch.cat([codes, codes.new_zeros(shape)], dim)
    return pack(codes, dim, order)


def columns_to_rows(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """Words packed along columns as words packed along rows, without unpacking: AWQ GEMM to the sequential layout.

    Eight rows of one word are an 8 x 8 matrix of nibbles; transposing it is three exchanges (of 16, 8 and 4 bits
    between rows 4, 2 and 1 apart), each six word operations on half of the data. A piece of about a megabyte stays in
    the cache through all of them, so memory is read and written once.

    Args:
        words: int32 ``[..., K, C]``, K a multiple of 8; element ``8c + j`` of a row is nibble ``order[j]`` of word c.
        order: nibble that holds element j of each word.

    Returns:
        int32 ``[..., K/8, 8C]``, contiguous; nibble j of word r is row ``8r + j``.
    """
    _check_words(words, words.shape[-2], "rows")
    *lead, rows, columns = words.shape
    blocks = words.reshape(-1, NIBBLES, columns)
    out = torch.empty(blocks.shape[0], columns, NIBBLES, dtype=torch.int32, device=words.device)
    for start, turned in _transposed(blocks):
        for j, nibble in enumerate(order):
            out[start : start + turned.shape[0], :, j].copy_(turned[:, nibble])
    return out.reshape(*lead, rows // NIBBLES, columns * NIBBLES)


def rows_to_columns(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """The inverse of :func:`columns_to_rows`.

    Args:
        words: int32 ``[..., K/8, N]``, packed along rows; N is a multiple of 8.

    Returns:
        int32 ``[..., K, N/8]``, contiguous; element ``8c + j`` of a row is nibble ``order[j]`` of word c.
    """
    _check_words(words, words.shape[-1], "columns")
    *lead, blocks, columns = words.shape
    grouped = words.reshape(-1, columns // NIBBLES, NIBBLES)
    out = torch.empty(grouped.shape[0], NIBBLES, columns // NIBBLES, dtype=torch.int32, device=words.device)
    step = _blocks_at_once(out)
    for start in range(0, out.shape[0], step):
        piece = out[start : start + step]
        for j, nibble in enumerate(order):
            piece[:, nibble].copy_(grouped[start : start + step, :, j])
        for _, turned in _transposed(piece):  # a transposition undoes itself
            piece.copy_(turned)
    return out.reshape(*lead, blocks * NIBBLES, columns // NIBBLES)


_PIECE_BYTES = {"cpu": 1 << 20}
"""Working set of one transposition; elsewhere pieces only bound the memory."""

_EXCHANGES = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))
"""(rows apart, nibbles that change places, as a mask): the mask also removes what a signed shift drags in."""


def _blocks_at_once(blocks: Tensor) -> int:
    size = max(1, blocks[0].numel() * blocks.element_size())
    return max(1, _PIECE_BYTES.get(blocks.device.type, 64 << 20) // size)


def _transposed(blocks: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Pieces of int32 ``[B, 8, C]`` with nibble i of row j moved to nibble j of row i, and each piece's first block.

    The piece is a view of a buffer that the next one overwrites.
    """
    step = _blocks_at_once(blocks)
    # two neighbouring words in one int64 take half as many operations; the masks keep them apart
    wide = blocks.shape[-1] % 2 == 0 and blocks.is_contiguous()
    source = blocks.view(torch.int64) if wide else blocks
    width = source.shape[-1]
    buffer = source.new_empty(min(step, source.shape[0]), NIBBLES, width)
    scratch = source.new_empty(buffer.numel() // 2)
    for start in range(0, source.shape[0], step):
        piece = source[start : start + step]
        count = piece.shape[0]
        result = buffer[:count]
        for apart, mask in _EXCHANGES:
            shape = (count, NIBBLES // (2 * apart), 2, apart, width)
            upper, lower = piece.reshape(shape).unbind(2)
            new_upper, new_lower = result.view(shape).unbind(2)
            change = scratch[: upper.numel()].view(upper.shape)
            torch.bitwise_right_shift(upper, 4 * apart, out=change)
            change.bitwise_xor_(lower).bitwise_and_(mask | mask << 32 if wide else mask)
            torch.bitwise_xor(lower, change, out=new_lower)
            change.bitwise_left_shift_(4 * apart)
            torch.bitwise_xor(upper, change, out=new_upper)
            piece = result
        yield start, result.view(torch.int32) if wide else result


def _check_words(words: Tensor, size: int, axis: str) -> None:
    if words.dtype != torch.int32:
        raise CorruptError("packed words", got=str(words.dtype), wanted="torch.int32")
    if size % NIBBLES or size == 0:
        raise UnsupportedError("packing", got=f"{size} {axis}", wanted="a multiple of 8")
