"""GPTQ: codes packed along K, zero points packed along N; three labels for one layout.

    qweight int32 [K/8, N]          nibble j of word r is row 8r + j: the sequential order itself
    qzeros  int32 [G, ceil(N/8)]    nibble j of word c is column 8c + j; z (v2) or z - 1 (v1), or empty for symmetric
    scales  float [G, N]
    g_idx   int32 [K]               group of each row; AutoRound leaves it out
    bias    float [N]               optional

Written by GPTQ-for-LLaMa, AutoGPTQ, GPTQModel, optimum, AutoRound (``auto_round:*``) and this project. What to do when
the label is wrong, or when zero points were lost on the way, is :mod:`w4plugin.formats.zero_points`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats import zero_points
from w4plugin.formats.decoding import finish, floats, need, words
from w4plugin.formats.format import Candidate, Decoded, Found, Module, RowShard
from w4plugin.formats.grouping import Parts, size_from_shape
from w4plugin.formats.words import WORD_BITS, lanes, to_int32
from w4plugin.packing import NIBBLES, pack_padded, unpack
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import W4Tensor

SUFFIXES = frozenset({"qweight", "qzeros", "scales", "g_idx"})
WIDTHS = (4, 8, 2, 3, 5, 6, 7)
"""Widths of a code, those that leave no doubt first. GPTQModel writes 5 to 7 bits as planes ("gptq_p")."""

PADDED_TO = 32
"""AutoGPTQ's exllama modules pad N to a multiple of this; its packer drops what lies beyond one."""


def detect(candidate: Candidate) -> Found | None:
    """K, N and the width of a GPTQ-shaped module.

    Raises:
        CorruptError: rows that ``g_idx`` counts are missing from ``qweight``.
    """
    h = candidate.headers
    if not {"qweight", "qzeros", "scales"} <= h.keys():
        return None
    qweight, qzeros, scales = h["qweight"], h["qzeros"], h["scales"]
    lead = qweight.shape[:-2]
    if len(qweight.shape) not in (2, 3) or len(scales.shape) != len(qweight.shape) or scales.shape[:-2] != lead:
        return None
    if qweight.dtype not in WORD_BITS or not scales.dtype.startswith(("F", "BF")) or 0 in scales.shape + qweight.shape:
        return None
    empty = 0 in qzeros.shape
    G, N = scales.shape[-2:]
    if not empty and (qzeros.dtype not in WORD_BITS or qzeros.dtype[0] == "F" or qzeros.shape[:-1] != (*lead, G)):
        return None
    if qweight.shape[-1] not in (N, _padded(N)):
        return None
    bits, K = _width(candidate, qweight.shape[-2], None if empty else qzeros.shape[-1], N)
    size, notes = size_from_shape(candidate.name, K, G, candidate.config.for_module(candidate.name))
    return Found(bits, K, N, size, lead[0] if lead else None, notes)


def _padded(N: int) -> int:
    return math.ceil(N / PADDED_TO) * PADDED_TO


def _width(candidate: Candidate, rows: int, zero_words: int | None, N: int) -> tuple[int, int]:
    """Bits of a code and K, from the packed sizes; the config only where they leave a choice."""
    name, h = candidate.name, candidate.headers
    expected = candidate.config.for_module(name)
    dtype, G = h["qweight"].dtype, h["scales"].shape[-2]
    sizes = [WORD_BITS[dtype]]
    if dtype in ("I64", "U64"):
        sizes = [64, 32] if candidate.config.pack_dtype == "int64" else [32, 64]
    fits = [(b, rows * w // b, w) for w in sizes for b in WIDTHS if (rows * w) % b == 0]
    index = h.get("g_idx")
    if index is not None and index.shape and 0 not in index.shape:
        length = index.shape[-1]
        fits = [f for f in fits if f[1] == length]
        if not fits:
            held = rows * sizes[0] // 4
            raise CorruptError(
                f"{name}.qweight",
                got=f"{rows} rows of words ({held} rows at 4 bits) while g_idx has {length} entries",
                wanted=f"{length} rows",
                todo="the packer dropped rows of the weight; quantise the model again" if held < length else "",
            )
    if zero_words is not None:
        told = [f for f in fits if zero_words in _zero_words(N, h["qweight"].shape[-1], f[0], f[2])]
        if not told:
            raise CorruptError(
                f"{name}.qzeros",
                got=f"{zero_words} words a row for {N} columns",
                wanted=f"{math.ceil(N / 8)} at 4 bits",
            )
        fits = told

    def preference(fit: tuple[int, int, int]) -> tuple[bool, bool, int]:
        grouped = size_from_shape(name, fit[1], G, expected)
        return (grouped[0] is None or bool(grouped[1])), fit[0] != expected.bits, fits.index(fit)

    best = min(fits, key=preference)
    return best[0], best[1]


def _zero_words(N: int, columns: int, bits: int, word: int) -> tuple[int, int, int]:
    """Words a row of zero points may have: exact, padded as ``qweight`` is, or cut off by AutoGPTQ's packer."""
    return math.ceil(N * bits / word), math.ceil(columns * bits / word), N // PADDED_TO * PADDED_TO * bits // word


def read(module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, shard: RowShard | None) -> Decoded:
    """A 4-bit GPTQ module.

    Raises:
        CorruptError, UnsupportedError: see :mod:`w4plugin.formats.zero_points` and :mod:`w4plugin.formats.grouping`.
    """
    name = module.name
    stored, stored_zeros, scales = need(module, tensors, "qweight", "qzeros", "scales")
    stored, scales = words(module, "qweight", stored), floats(module, "scales", scales)
    bits = word_bits(module, stored)
    qweight = to_int32(stored, -2, bits, f"{name}.qweight")
    if qweight.ndim != scales.ndim:
        raise CorruptError(
            f"{name}.qweight", got=str(list(qweight.shape)), wanted=f"{scales.ndim} axes, as scales have"
        )
    qweight, scales, columns = _cropped(module, qweight, scales, tensors.get("bias"))
    if stored_zeros.numel():
        words(module, "qzeros", stored_zeros)
        if stored_zeros.ndim != scales.ndim or stored_zeros.shape[:-1] != scales.shape[:-1]:
            raise CorruptError(
                f"{name}.qzeros",
                got=str(list(stored_zeros.shape)),
                wanted=f"{[*scales.shape[:-1], math.ceil(columns / 8)]}",
            )
        nibbles = _codes(to_int32(stored_zeros, -1, zero_word_bits(stored_zeros, bits), f"{name}.qzeros"))
    else:
        nibbles = stored_zeros.new_empty((*scales.shape[:-1], 0), dtype=torch.uint8)
    zeros = zero_points.decode(name, nibbles, columns, lanes(bits), claim(module, config))
    parts = Parts(qweight, scales, zeros.zeros, tensors.get("g_idx"))
    return finish(module, parts, tensors, config, shard, zeros.rule, zeros.notes)


def _codes(words: Tensor) -> Tensor:
    """uint8 ``[*E, G, 8C]`` of zero-point words. Those of symmetric modules are one word: nothing is unpacked, and one
    code stands for all, with strides of 0."""
    word = int(words.flatten()[0])
    if word & 0xFFFFFFFF == (word & 15) * 0x11111111 and bool((words == word).all()):
        one = words.new_full((), word & 15, dtype=torch.uint8)
        return one.expand(*words.shape[:-1], NIBBLES * words.shape[-1])
    return unpack(words, -1)


def word_bits(module: Module, qweight: Tensor) -> int:
    """Bits of a packed word: the dtype's, except for int64, which can also carry 32-bit words."""
    if qweight.dtype in (torch.int64, torch.uint64):
        rows = qweight.shape[-2]
        return 64 if rows * 64 == module.K * module.bits else 32
    return {torch.int8: 8, torch.uint8: 8, torch.int16: 16, torch.uint16: 16}.get(qweight.dtype, 32)


def zero_word_bits(qzeros: Tensor, bits: int) -> int:
    """GPTQModel packs both tensors alike; a plain int32 qzeros beside other words is a 32-bit one."""
    return 32 if qzeros.dtype in (torch.int32, torch.uint32) else bits


def _cropped(module: Module, qweight: Tensor, scales: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Without the columns that AutoGPTQ's exllama modules add to reach a multiple of 32.

    Raises:
        CorruptError: the surplus columns are not empty, or sizes do not fit.
    """
    name, have, N = module.name, qweight.shape[-1], scales.shape[-1]
    true = bias.shape[-1] if bias is not None and bias.ndim == scales.ndim - 1 and bias.shape[-1] else N
    if true < N and _padded(true) == N:
        if bool(scales[..., true:].any()):
            raise CorruptError(
                f"{name}.scales", got=f"values in columns {true}..{N - 1}", wanted=f"{true} columns, as bias has"
            )
        N, scales = true, scales[..., :true].contiguous()
    if have == N:
        return qweight, scales, N
    if have < N or have != _padded(N):
        raise CorruptError(f"{name}.qweight", got=f"{have} columns", wanted=f"{N}, as scales have")
    if bias is None and bool(qweight[..., N:].any()):  # a bias of N columns says that the rest is padding
        raise CorruptError(
            f"{name}.qweight", got=f"codes in columns {N}..{have - 1}, which have no scale", wanted=f"{N}"
        )
    return qweight[..., :N].contiguous(), scales, N


def claim(module: Module, config: QuantConfig) -> zero_points.Claim:
    """What label, config and producer say about zero points."""
    expected = config.for_module(module.name)
    true = (config.layout if config.layout in ("gptq", "gptq_v2") else module.format) == "gptq_v2"
    producer = f", written by {config.producer}" if config.producer else ""
    label = f"{config.layout or module.format}{producer}"
    return zero_points.Claim(true, expected.sym, config.borrows, label)


def write(weight: W4Tensor) -> dict[str, Tensor]:
    """v2: true zeros. ``g_idx`` is always written, since AutoGPTQ and GPTQModel insist on it."""
    return {
        "qweight": weight.qweight,
        "qzeros": pack_padded(weight.full_zeros(), -1),
        "scales": weight.scales,
        "g_idx": weight.groups().to(torch.int32).contiguous(),
    }


def write_v1(weight: W4Tensor) -> dict[str, Tensor]:
    """v1: z - 1.

    Raises:
        UnsupportedError: a zero point is 0, which readers of v1 decode in four different ways.
    """
    zeros = weight.full_zeros()
    if not bool(zeros.all()):
        count = int((zeros == 0).sum())
        raise UnsupportedError(
            "gptq (v1)", got=f"{count} zero points of 0", wanted="1..15, since zero - 1 is stored", todo="use gptq_v2"
        )
    return {**write(weight), "qzeros": pack_padded(zeros - 1, -1)}


def write_auto_round(weight: W4Tensor) -> dict[str, Tensor]:
    """AutoRound's packing with true zeros, which holds no ``g_idx``.

    Raises:
        UnsupportedError: real act-order, or scales other than float16.
    """
    if weight.g_idx is not None:
        raise UnsupportedError("auto-round", got="a real act-order", wanted="sequential groups", todo="use gptq_v2")
    if weight.scales.dtype != torch.float16:
        raise UnsupportedError(
            "auto-round", got=f"{weight.scales.dtype} scales", wanted="torch.float16", todo="use gptq_v2"
        )
    tensors = write(weight)
    del tensors["g_idx"]
    return tensors
