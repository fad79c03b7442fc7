"""Fragment order: the words of a weight in the order in which a tensor core's registers want them.

    word[b, j, 4r + t, 2c + h], nibble i + 4l   holds   row k = 64b + 32c + 8i + 2t + l   of column n = 16j + 8h + r
    b, j: block of 64 rows, of 16 columns;  r 0..7, t 0..3: lane = 4r + t;  c, h, l 0..1;  i 0..3

One lane's four words are 16 neighbouring bytes, one warp's 512; a lane holds exactly the weights that lane ``4r + t``
of ``mma.sync.m16n8k16`` (or of one warp of ``wgmma``) multiplies, so unpacking needs no exchange between threads, and
the nibbles ``i`` and ``i + 4`` that ``lop3`` extracts together are one register of the fragment. K stays in its natural
order, hence so do the activations.

The order is a bijection of nibbles. Rows are padded to a multiple of 64 with codes equal to the zero point of their
column (weights of exactly 0), columns to a multiple of 16 with code 0 (never stored).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, COLUMNS, WORDS = 64, 16, 128
"""Rows and columns of one tile, and its words."""


def blocks(size: int, block: int) -> int:
    """How many blocks cover ``size``."""
    return -(-size // block)


def to_fragments(qweight: Tensor, pad_codes: Tensor | None) -> Tensor:
    """Sequential words to fragment order.

    Args:
        qweight: int32 ``[K/8, N]``, sequential.
        pad_codes: uint8 ``[N]``, the code of padded rows of each column; None means 8.

    Returns:
        int32 ``[ceil(K/64), ceil(N/16), 128]``.
    """
    words, n = qweight.shape
    kb, nb = blocks(words, ROWS // 8), blocks(n, COLUMNS)
    padded = qweight.contiguous()
    if (kb * 8, nb * COLUMNS) != (words, n):
        padded = torch.zeros(kb * 8, nb * COLUMNS, dtype=torch.int32, device=qweight.device)
        padded[:words, :n] = qweight
        if kb * 8 > words:
            padded[words:, :n] = _word_of(pad_codes, n, qweight.device)
    # Byte t of word i of half a block holds rows 8i + 2t and 8i + 2t + 1: bytes move, then nibbles inside a word.
    source = padded.view(torch.uint8).view(kb, 2, 4, nb, 2, 8, 4)  # b c i j h r t
    moved = source.permute(0, 3, 5, 6, 1, 4, 2).contiguous()  # b j r t c h i
    words_moved = moved.view(torch.int32).view(kb, nb, WORDS)
    _swap(words_moved, 4, 0x00F000F0)
    _swap(words_moved, 8, 0x0000FF00)
    return words_moved


def from_fragments(fragments: Tensor, k: int, n: int) -> Tensor:
    """The inverse of :func:`to_fragments`: int32 ``[k/8, n]``, contiguous."""
    kb, nb, _ = fragments.shape
    mixed = fragments.clone(memory_format=torch.contiguous_format)
    _swap(mixed, 8, 0x0000FF00)
    _swap(mixed, 4, 0x00F000F0)
    moved = mixed.view(torch.uint8).view(kb, nb, 8, 4, 2, 2, 4)  # b j r t c h i
    source = moved.permute(0, 4, 6, 1, 5, 2, 3).contiguous()  # b c i j h r t
    return source.view(torch.int32).view(kb * 8, nb * COLUMNS)[: k // 8, :n].contiguous()


def _swap(words: Tensor, shift: int, mask: int) -> None:
    """Exchange, in place, the bits of ``mask`` with those ``shift`` above them: its own inverse."""
    changed = words >> shift
    changed ^= words
    changed &= mask
    words ^= changed
    changed <<= shift
    words ^= changed


def _word_of(codes: Tensor | None, n: int, device: torch.device) -> Tensor:
    """int32 ``[n]``: a code in all eight nibbles."""
    if codes is None:
        codes = torch.full((n,), 8, dtype=torch.uint8, device=device)
    wide = codes.to(torch.int32)
    word = torch.zeros_like(wide)
    for nibble in range(8):
        word |= wide << (4 * nibble)
    return word
