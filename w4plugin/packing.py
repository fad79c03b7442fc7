"""Eight 4-bit codes in one int32 word: the only nibble shifts outside kernels.

The rule of the sequential layout: nibble ``j`` (bits ``4j .. 4j+3``) of word ``r`` along the packed axis holds element
``8r + j``. Words are signed on disk, so a shift right drags the sign in; the mask after it removes it again.

Shapes below name the packed axis; every function takes any leading axes and any device.
"""

from __future__ import annotations

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
