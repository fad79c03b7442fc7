"""A checkpoint's modules as :mod:`w4plugin.reference` understands them, a few columns at a time.

The reference works on whole arrays of 64-bit integers, sixteen times the size of the packed words. Cut along N, a
module of any size costs the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from w4plugin import reference
from w4plugin.formats import gptq
from w4plugin.formats.format import Decoded, Module
from w4plugin.reference import Exact

Array = NDArray[Any]

ELEMENTS = 1 << 18
"""Codes that are judged at a time: arrays of two megabytes stay in the cache, which saves a third of the time."""

_ALONG_N = {
    "gptq": {"qweight": (1, 1), "qzeros": (1, 8), "scales": (1, 1)},
    "awq": {"qweight": (1, 8), "qzeros": (1, 8), "scales": (1, 1)},
    "awq-gemv": {"qweight": (0, 1), "qzeros": (0, 1), "scales": (0, 1)},
    "awq-gemv-fast": {"qweight": (0, 4), "qzeros": (1, 1), "scaled_zeros": (1, 1), "scales": (1, 1)},
    "gptq-v0": {"qweight": (1, 1), "zeros": (0, 1), "scales": (0, 1)},
    "compressed-tensors": {"weight_packed": (0, 1), "weight_scale": (0, 1), "weight_zero_point": (0, 8)},
}
_ALONG_N["gptq_v2"] = _ALONG_N["auto-round"] = _ALONG_N["gptq"]
_ALONG_N["llm-awq"] = _ALONG_N["awq-gemv-fast"]
"""suffix -> (axis of N, columns in one element), for the formats that can be cut along N."""

_WHOLE = {"g_idx", "weight_g_idx", "weight_shape"}
"""Suffixes that every cut needs whole."""


class Piece(NamedTuple):
    """Columns ``start .. start + q.shape[1]`` of one expert (None: of a single weight)."""

    expert: int | None
    start: int
    exact: Exact


def pieces(module: Module, tensors: Mapping[str, Tensor], decoded: Decoded, step: int | None = None) -> Iterator[Piece]:
    """What the reference makes of a module.

    Args:
        module: from the census.
        tensors: its tensors by suffix.
        decoded: what the reader made of them: which rule its zero points follow, and its resolved group size. Those are
            decisions; the arithmetic is the reference's own.
        step: columns at a time, a multiple of 8; None means about :data:`ELEMENTS` codes.
    """
    weight = decoded.weight
    if step is None:
        step = max(8, ELEMENTS // weight.K // 8 * 8)
    for expert in [None] if weight.experts is None else range(weight.experts):
        mine = {s: _of_expert(s, t, expert) for s, t in tensors.items() if s != "bias"}
        axes = _axes(module, mine, weight.N, step)
        for start in range(0, weight.N, step) if axes is not None else [0]:
            width = min(step, weight.N - start) if axes is not None else weight.N
            cut = {s: _cut(t, axes.get(s), start, width) for s, t in mine.items()} if axes is not None else mine
            yield Piece(expert, start, _judge(module, cut, decoded, width))


def _of_expert(suffix: str, tensor: Tensor, expert: int | None) -> Tensor:
    """One expert's part of a stacked tensor; sizes are said once for all, or once an expert and then equal."""
    if suffix == "weight_shape":
        return tensor.reshape(-1, tensor.shape[-1])[0]
    return tensor if expert is None else tensor[expert]


def _axes(module: Module, tensors: Mapping[str, Tensor], N: int, step: int) -> Mapping[str, tuple[int, int]] | None:
    """How to cut this module; None when it must be judged whole."""
    axes = _ALONG_N.get(module.format)
    if axes is None or step >= N:
        return None
    for suffix, tensor in tensors.items():
        if suffix in _WHOLE or not tensor.numel():
            continue
        if suffix not in axes or tensor.ndim != 2:
            return None
        axis, columns = axes[suffix]
        if tensor.shape[axis] != -(-N // columns) or (columns == 8 and tensor.dtype != torch.int32):
            return None
    return axes


def _cut(tensor: Tensor, where: tuple[int, int] | None, start: int, width: int) -> Tensor:
    if where is None or not tensor.numel():
        return tensor
    axis, columns = where
    return tensor.narrow(axis, start // columns, -(-width // columns))


def _judge(module: Module, tensors: Mapping[str, Tensor], decoded: Decoded, width: int) -> Exact:
    words = tensors.get("qweight")
    wide = words is not None and words.dtype in (torch.int64, torch.uint64)
    return reference.dequantize(
        module.format,
        {suffix: to_numpy(tensor) for suffix, tensor in tensors.items()},
        decoded.weight.group_size,
        zeros=decoded.zero_rule if decoded.zero_rule in _ZERO_RULES else None,
        columns=width,
        word_bits=gptq.word_bits(module, words) if wide and words is not None else None,
        stored="BF16" if decoded.weight.scales.dtype == torch.bfloat16 else None,
    )


_ZERO_RULES = ("true", "minus-one", "minus-one-carry", "symmetric")


def to_numpy(tensor: Tensor) -> Array:
    """A CPU tensor in NumPy, bfloat16 widened to float32, which is exact."""
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.contiguous().view(torch.int16).numpy()
        return reference.widen_bfloat16(bits)
    array: Array = tensor.contiguous().numpy()
    return array


def narrow(weight: Array, dtype: str) -> Array:
    """Exact values rounded once, to nearest even, to a safetensors dtype: the bits as unsigned integers."""
    if dtype == "BF16":
        # bfloat16 is the upper half of float32. A float64 is first brought to float32 by rounding to odd, which makes
        # the second rounding the only one that counts.
        single = _to_odd(weight) if weight.dtype == np.float64 else weight.astype(np.float32)
        bits = np.ascontiguousarray(single).view(np.uint32)
        rounded: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return rounded
    kind = {"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(weight.astype(kind))
    bits_of: Array = cast.view(f"u{cast.dtype.itemsize}")
    return bits_of


def _to_odd(weight: Array) -> Array:
    """float64 to float32, inexact results to the neighbour whose last bit is 1."""
    near = weight.astype(np.float32)
    bits = near.view(np.int32).copy()
    over = np.abs(near.astype(np.float64)) > np.abs(weight)
    inexact = near.astype(np.float64) != weight
    bits[over] -= 1  # towards zero, whatever the sign
    bits[inexact] |= 1
    result: Array = bits.view(np.float32)
    return result


_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""GPTQModel's planar layout: each 32 codes lie as planes of these widths, the lowest bits first."""


def wide_weight(
    module: Module, tensors: Mapping[str, Tensor], label: str | None, sym: bool | None, *, planar: bool = False
) -> Array:
    """``[K, N]`` exact weight of a GPTQ module of 2 to 8 bits, bit by bit.

    Args:
        label: the checkpoint's zero-point rule, "gptq_v2" for true zeros.
        sym: what its config says.
        planar: its codes lie in planes.
    """
    planes = _PLANES[module.bits] if planar else None
    bits, K, N = module.bits, module.K, module.N
    scales = to_numpy(tensors["scales"])
    scales = scales.astype(np.float64 if scales.dtype == np.float32 else np.float32)
    q = _codes(to_numpy(tensors["qweight"]).T, bits, planes)[:, :K].T
    G, middle = scales.shape[0], 1 << (bits - 1)
    qzeros = to_numpy(tensors["qzeros"])
    z = _codes(qzeros, bits, planes)[:, :N] if qzeros.size else np.full((G, N), middle)
    if (sym is not False and bool((z == middle - 1).all())) or bool((z == middle).all()):
        z = np.full((G, N), middle)
    elif label != "gptq_v2":
        z = (z + 1) % (1 << bits)
    g = to_numpy(tensors["g_idx"]).astype(np.int64) if "g_idx" in tensors and tensors["g_idx"].numel() else None
    if g is None or not g.any():
        g = np.arange(K) // (module.group_size or -(-K // G))
    product: Array = (q - z[g]).astype(scales.dtype) * scales[g]
    return product


def _codes(words: Array, bits: int, planes: tuple[int, ...] | None = None) -> Array:
    """int32 ``[R, C]`` as one stream of bits a row, or as planes -> int64 ``[R, 32 C / bits]``."""
    if planes is not None:
        blocks = words.reshape(words.shape[0], -1, bits)  # as many words as bits hold 32 codes
        found: Array = np.zeros((words.shape[0], blocks.shape[1] * 32), np.int64)
        for first, last in itertools.pairwise(itertools.accumulate(planes, initial=0)):
            found |= _codes(blocks[:, :, first:last].reshape(words.shape[0], -1), last - first) << first
        return found
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    stream = stream[:, : stream.shape[1] // bits * bits].reshape(words.shape[0], -1, bits)
    codes: Array = (stream.astype(np.int64) << np.arange(bits)).sum(-1)
    return codes
