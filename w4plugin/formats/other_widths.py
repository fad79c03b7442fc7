"""GPTQ modules of another width inside a 4-bit checkpoint -> plain weights.

GPTQModel writes an 8-bit head for ``lm_head=True``, and ``dynamic`` rules set any width. Codes are one stream of bits
along K, low bits first (a 3-bit code may begin in one word and end in the next), and zero points one along N:

    W[k, n] = (q[k, n] - zero[g, n]) * scale[g, n]        q in 0 .. 2**bits - 1

GPTQModel's planar layout (``gptq_p``, and every module of 5, 6 or 7 bits) cuts each 32 codes into planes of 4, 2 and 1
bits instead, the low plane first; at 2, 4 and 8 bits that is the same thing.

These never become a W4Tensor: they stay packed as they are, or become plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats import gptq, zero_points
from w4plugin.formats.decoding import floats, need, words
from w4plugin.formats.format import Module
from w4plugin.formats.grouping import group_index
from w4plugin.formats.words import to_int32
from w4plugin.note import Note
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import rounded_once

READABLE = ("gptq", "gptq_v2", "auto-round")

COLUMNS = 2048
"""Columns unpacked at a time: a head of 150,000 columns by 4096 rows would otherwise take gigabytes."""


class Plain(NamedTuple):
    """A module made plain.

    Attributes:
        weight: ``[N, K]``, as a Linear holds it.
        notes: which rules and values decided.
    """

    weight: Tensor
    notes: tuple[Note, ...]


def dequantize(
    module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, dtype: torch.dtype | None = None
) -> Plain:
    """The plain weight of a GPTQ module of any width.

    The product is exact before it is rounded once to ``dtype``: float32 holds a difference of 8 bits times the 11-bit
    significand of float16, float64 that of float32.

    Args:
        module: from ``Census.other_width`` (``Census.modules`` work too).
        tensors: the module's tensors by suffix, on one device.
        config: the checkpoint's config.
        dtype: of the result; None means the dtype of ``scales``.

    Raises:
        UnsupportedError: another layout than GPTQ's, or a value beyond the range of ``dtype``.
        CorruptError: tensors contradict each other.
    """
    name, bits = module.name, module.bits
    if module.format not in READABLE:
        raise UnsupportedError(name, got=f"{bits} bits in {module.format}", wanted="GPTQ's layout, to make it plain")
    stored, stored_zeros, scales = need(module, tensors, "qweight", "qzeros", "scales")
    stored, scales = words(module, "qweight", stored), floats(module, "scales", scales)
    qweight = to_int32(stored, -2, gptq.word_bits(module, stored), f"{name}.qweight")
    N, G = scales.shape[-1], scales.shape[0]
    if qweight.ndim != 2 or scales.ndim != 2 or qweight.shape[1] < N or qweight.shape[0] * 32 != module.K * bits:
        wanted = f"[{module.K * bits // 32}, {N}] for {module.K} rows of {bits} bits"
        raise CorruptError(f"{name}.qweight", got=str(list(qweight.shape)), wanted=wanted)
    if not bool(torch.isfinite(scales).all()):
        raise CorruptError(f"{name}.scales", got="NaN or infinity", wanted="finite scales")
    zeros = _zeros(module, stored_zeros, scales, config)
    index, notes = group_index(name, tensors.get("g_idx"), module.K, G, config.for_module(name), scales.device)
    middle = 1 << (bits - 1)
    true = torch.full(scales.shape, middle, device=scales.device) if zeros.zeros is None else zeros.zeros
    dtype = dtype or scales.dtype
    exact = torch.float64 if scales.dtype == torch.float32 else torch.float32
    out = torch.empty((N, module.K), dtype=dtype, device=scales.device)
    for start in range(0, N, COLUMNS):
        cut = slice(start, min(N, start + COLUMNS))
        weight = _codes(qweight[:, cut].mT, module, config, module.K).to(exact)
        weight -= true[:, cut].to(exact)[index].mT
        weight *= scales[:, cut].to(exact)[index].mT
        out[cut] = rounded_once(weight, dtype)
    if not bool(torch.isfinite(out).all()):
        raise UnsupportedError(f"{name}.weight", got=f"values beyond {dtype}", wanted="a wider dtype")
    return Plain(out, zeros.notes + notes)


def is_planar(module: Module, config: QuantConfig) -> bool:
    """Whether a module's codes lie in planes: always those of 5 to 7 bits, those of 3 where the label says gptq_p."""
    labelled = "gptq_p" in (config.raw.get("checkpoint_format"), config.raw.get("format"))
    return module.bits in PLANES and (module.bits != 3 or labelled)


PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""Widths of the planes that hold a code, lowest bits first."""


def _codes(words: Tensor, module: Module, config: QuantConfig, count: int) -> Tensor:
    """int64 ``[..., count]`` codes of int32 words ``[..., R]``, in the layout of this module."""
    if is_planar(module, config):
        return bit_planes(words, PLANES[module.bits], count)
    return bit_stream(words, module.bits, count)


def bit_planes(words: Tensor, planes: tuple[int, ...], count: int) -> Tensor:
    """``count`` codes along the last axis of int32 words that hold 32 codes as planes.

    Args:
        words: int32 ``[..., R]``, R a multiple of the sum of ``planes``.
        planes: bits of each plane, the lowest bits of a code first.

    Returns:
        int64 ``[..., count]``.
    """
    blocks = words.unflatten(-1, (-1, sum(planes)))
    out = torch.zeros((*blocks.shape[:-1], 32), dtype=torch.int64, device=words.device)
    start = at = 0
    for width in planes:
        plane = bit_stream(blocks[..., at : at + width], width, 32)
        out |= plane << start
        start, at = start + width, at + width
    return out.flatten(-2)[..., :count]


def bit_stream(words: Tensor, bits: int, count: int) -> Tensor:
    """``count`` codes of ``bits`` bits along the last axis of int32 words, low bits first.

    Args:
        words: int32 ``[..., R]`` with ``32 R >= bits * count``.

    Returns:
        int64 ``[..., count]``.
    """
    first = torch.arange(count, device=words.device) * bits
    at, shift = first // 32, first % 32
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    following = (at + 1).clamp(max=words.shape[-1] - 1)
    # only bits up to shift + bits <= 34 of the pair are used, so the sign of the upper word never shows
    pair = unsigned[..., at] | unsigned[..., following] << 32
    return (pair >> shift) & ((1 << bits) - 1)


def _zeros(module: Module, stored: Tensor, scales: Tensor, config: QuantConfig) -> zero_points.Zeros:
    name, bits, N = module.name, module.bits, scales.shape[-1]
    claim = gptq.claim(module, config)._replace(bits=bits)
    word = gptq.zero_word_bits(stored, gptq.word_bits(module, stored))
    if not stored.numel():
        codes = stored.new_empty((scales.shape[0], 0), dtype=torch.uint8)
    elif stored.ndim != 2 or stored.shape[0] != scales.shape[0]:
        raise CorruptError(f"{name}.qzeros", got=str(list(stored.shape)), wanted=f"{scales.shape[0]} rows")
    else:
        packed = to_int32(words(module, "qzeros", stored), -1, word, f"{name}.qzeros")
        codes = _codes(packed, module, config, packed.shape[-1] * 32 // bits).to(torch.uint8)
    # words hold no whole number of codes at other widths, so nothing can be said about lanes there
    return zero_points.decode(name, codes, N, word // bits if bits in (2, 4, 8) else 1, claim)
