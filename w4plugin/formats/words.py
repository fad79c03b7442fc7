"""Packed words in whatever dtype a file holds them -> int32 words of eight nibbles.

Packers write int32. GPTQModel can pack into int8, int16 or int64 words (``pack_dtype``), low nibble first in each; odd
exporters store 32-bit words in int64, uint32 or even float tensors. On every one of them nibble i of a word is
``(word >> 4 * i) & 15``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.packing import NIBBLES

WORD_BITS = {"I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "F32": 32, "F64": 32}
"""Bits of a packed word by header dtype; a float can only carry 32-bit words."""

_NARROW = {torch.int8: 8, torch.uint8: 8, torch.int16: 16, torch.uint16: 16}


def to_int32(words: Tensor, dim: int, bits: int, where: str) -> Tensor:
    """Words of ``bits`` bits as int32 words, along the packed axis.

    Args:
        words: integer or float ``[..., R, ...]``.
        dim: the packed axis (negative).
        bits: 8, 16, 32 or 64: how much of the tensor's dtype is a word. An int64 tensor of 32-bit words is legal.
        where: for messages.

    Returns:
        int32; along ``dim`` ``R * bits / 32`` words.

    Raises:
        CorruptError: a value does not fit a word of ``bits`` bits.
        UnsupportedError: R narrow words do not fill whole int32 words.
    """
    if words.dtype == torch.int32 and bits == 32:
        return words
    if words.dtype == torch.uint32 and bits == 32:
        return words.view(torch.int32)
    if words.dtype in (torch.int64, torch.uint64) and bits == 64:
        return _halves(words.view(torch.int64), dim)
    if _NARROW.get(words.dtype) == bits:
        return _joined(words, dim, bits, where)
    if bits != 32 or words.dtype not in (torch.int64, torch.float32, torch.float64):
        raise CorruptError(where, got=f"{words.dtype} for words of {bits} bits", wanted="torch.int32")
    wide = words.to(torch.int64)
    if words.is_floating_point() and not bool((wide == words).all()):
        raise CorruptError(where, got=f"{words.dtype} with values that are no whole numbers", wanted="packed words")
    if not bool(((wide >= -(2**31)) & (wide < 2**32)).all()):
        raise CorruptError(where, got=f"{words.dtype} with values beyond 32 bits", wanted="packed 32-bit words")
    return torch.where(wide >= 2**31, wide - 2**32, wide).to(torch.int32)


def _halves(words: Tensor, dim: int) -> Tensor:
    """int64 words as pairs of int32 words, the low one first."""
    # unsigned halves do not fit int32 as numbers; subtracting 2**32 from the upper range keeps their bits
    low, high = words & 0xFFFFFFFF, words >> 32
    low = torch.where(low >= 2**31, low - 2**32, low)
    return torch.stack([low, high], dim).to(torch.int32).flatten(dim - 1, dim)


def _joined(words: Tensor, dim: int, bits: int, where: str) -> Tensor:
    """Narrow words, the first one lowest, in one int32 word."""
    count = 32 // bits
    if words.shape[dim] % count:
        raise UnsupportedError(
            where,
            got=f"{words.shape[dim]} words of {bits} bits",
            wanted=f"a multiple of {count} (8 codes share a word)",
        )
    grouped = (words.to(torch.int32) & ((1 << bits) - 1)).unflatten(dim, (-1, count))
    out = torch.zeros_like(grouped.select(dim, 0))
    for i in range(count):
        out |= grouped.select(dim, i) << (bits * i)
    return out


def lanes(bits: int) -> int:
    """4-bit codes in a word of ``bits`` bits."""
    return bits * NIBBLES // 32
