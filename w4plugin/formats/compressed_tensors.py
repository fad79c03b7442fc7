"""compressed-tensors ``pack-quantized``, W4A16: output-major, codes packed along K, zero points along N.

    weight_packed      int32 [N, ceil(K/8)]     nibble j of word c is input 8c + j, as the unsigned code
    weight_scale       float [N, G]             [N, 1] with the channel strategy; often bfloat16
    weight_zero_point  int32 [ceil(N/8), G]     nibble j of word r is output 8r + j, true zero; absent when symmetric
    weight_shape       int64 [2]                [N, K]
    weight_g_idx       int32 [K]                only with act-order; any -1 means "not initialised"

Codes and zero points are stored as signed numbers plus 8, and the two offsets cancel. Before April 2025 zero points
were not packed: an integer (some exporters: float) ``[N, G]`` in -8..7.

Written by llm-compressor, compressed-tensors and AutoRound (``auto_round:llm_compressor``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats.decoding import finish, floats, need, words
from w4plugin.formats.format import Candidate, Decoded, Found, Module, RowShard
from w4plugin.formats.grouping import Parts, size_from_shape
from w4plugin.formats.words import to_int32
from w4plugin.note import Note
from w4plugin.packing import NIBBLES, pack_padded, unpack
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import SYMMETRIC_ZERO, W4Tensor

SUFFIXES = frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"})


def detect(candidate: Candidate) -> Found | None:
    """N, K (rounded up to a word where only ``weight_shape``'s data could tell) and width of a packed module."""
    h = candidate.headers
    if not {"weight_packed", "weight_scale"} <= h.keys():
        return None
    packed, scale = h["weight_packed"], h["weight_scale"]
    lead = packed.shape[:-2]
    if len(packed.shape) not in (2, 3) or packed.dtype not in ("I32", "U32", "I64") or 0 in packed.shape + scale.shape:
        return None
    if scale.shape[:-1] != packed.shape[:-1] or not scale.dtype.startswith(("F", "BF")) or scale.dtype.startswith("F8"):
        return None
    (N, columns), G = packed.shape[-2:], scale.shape[-1]
    expected = candidate.config.for_module(candidate.name)

    def fits(bits: int) -> bool:
        size, notes = size_from_shape(candidate.name, columns * 32 // bits, G, expected)
        return size is not None and not notes

    stated = expected.bits if expected.bits in (2, 4, 8) else 4
    bits = next((b for b in (stated, 4, 8, 2) if fits(b)), stated)
    K = columns * 32 // bits
    size = expected.group_size
    if G > 1 and size is not None and size > 0 and math.ceil(G * size * bits / 32) == columns:
        K = G * size  # the format knows no short last group, so this is exact even inside a word
    size, notes = size_from_shape(candidate.name, K, G, expected)
    return Found(bits, K, N, size, lead[0] if lead else None, notes)


def read(module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, shard: RowShard | None) -> Decoded:
    """A 4-bit pack-quantized module, or a stack of experts.

    A host that cut the module must leave out ``weight_shape``, which holds the sizes of the whole.

    Raises:
        CorruptError: tensors contradict each other.
        UnsupportedError: K is not a multiple of 8.
    """
    name = module.name
    stored, scale = need(module, tensors, "weight_packed", "weight_scale")
    scale = floats(module, "weight_scale", scale)
    packed = to_int32(words(module, "weight_packed", stored), -1, 32, f"{name}.weight_packed")
    if packed.shape[:-1] != scale.shape[:-1]:
        wanted = f"{[*scale.shape[:-1], 'K/8']}, as weight_scale has"
        raise CorruptError(f"{name}.weight_packed", got=str(list(packed.shape)), wanted=wanted)
    K = _true_k(name, packed, tensors.get("weight_shape"))
    if K % NIBBLES:
        raise UnsupportedError(name, got=f"K = {K}", wanted="a multiple of 8")
    zeros, notes = _zeros(name, tensors.get("weight_zero_point"), scale, config)
    parts = Parts(
        packed.mT.contiguous(),
        scale.mT.contiguous(),
        None if zeros is None else zeros.mT.contiguous(),
        tensors.get("weight_g_idx"),
        unset=-1,
    )
    return finish(module, parts, tensors, config, shard, "true" if zeros is not None else "symmetric", notes)


def _true_k(name: str, packed: Tensor, shape: Tensor | None) -> int:
    N, columns = packed.shape[-2:]
    if shape is None:
        return columns * NIBBLES
    where = f"{name}.weight_shape"
    if shape.is_floating_point() or shape.numel() == 0 or shape.ndim not in (1, 2):
        raise CorruptError(where, got=f"{shape.dtype} {list(shape.shape)}", wanted="whole numbers [N, K]")
    rows = {tuple(row) for row in shape.reshape(-1, shape.shape[-1]).tolist()}
    row = rows.pop()
    if rows or len(row) not in (2, packed.ndim):
        raise CorruptError(where, got=str(shape.tolist())[:80], wanted="one pair N, K")
    if row[-2] != N or math.ceil(row[-1] / NIBBLES) != columns:
        raise CorruptError(
            where, got=f"{list(row)}", wanted=f"N = {N} and K up to {columns * NIBBLES}, as weight_packed holds"
        )
    return int(row[-1])


def _zeros(
    name: str, stored: Tensor | None, scale: Tensor, config: QuantConfig
) -> tuple[Tensor | None, tuple[Note, ...]]:
    """True zero points, uint8 ``[*E, N, G]``."""
    where = f"{name}.weight_zero_point"
    sym = config.for_module(name).sym
    if stored is None or stored.numel() == 0:
        if sym is False:
            raise CorruptError(where, got="no zero points", wanted="them, since the config says symmetric: false")
        return None, ()
    lead, (N, G) = scale.shape[:-2], scale.shape[-2:]
    packed_rows = math.ceil(N / NIBBLES)
    notes: tuple[Note, ...] = ()
    if stored.shape == (*lead, packed_rows, G) and stored.dtype in (torch.int32, torch.uint32):
        zeros = unpack(to_int32(stored, -2, 32, where), -2)[..., :N, :]
    elif stored.shape == (*lead, N, G):
        zeros, notes = _unpacked(where, stored)
    else:
        wanted = f"int32 {[*lead, packed_rows, G]}, or unpacked {[*lead, N, G]}"
        raise CorruptError(where, got=f"{stored.dtype} {list(stored.shape)}", wanted=wanted)
    if bool((zeros == SYMMETRIC_ZERO).all()):
        return None, notes
    if sym:
        text = "the config says symmetric, but zero points other than 0 are stored; the tensor wins"
        notes += (Note("conflict", where, text),)
    return zeros, notes


def _unpacked(where: str, stored: Tensor) -> tuple[Tensor, tuple[Note, ...]]:
    values = stored.to(torch.int64)
    if stored.is_floating_point() and not bool((values == stored).all()):
        raise CorruptError(where, got="fractions", wanted="whole numbers")
    low, high = int(values.min()), int(values.max())
    if low >= -8 and high <= 7:
        return (values + SYMMETRIC_ZERO).to(torch.uint8), ()
    if low >= 0 and high <= 15:
        text = f"zero point range {low}..{high} in a signed field: read as unsigned zero points, without adding 8"
        return values.to(torch.uint8), (Note("warning", where, text),)
    raise CorruptError(
        where, got=f"zero points {low}..{high}", wanted="-8..7, or 0..15 where a tool wrote them unsigned"
    )


def write(weight: W4Tensor) -> dict[str, Tensor]:
    """pack-quantized tensors; ``weight_g_idx`` only for real act-order.

    Raises:
        UnsupportedError: a short last group, which readers of the format refuse.
    """
    if weight.G > 1 and weight.g_idx is None and weight.K % weight.group_size:
        raise UnsupportedError(
            "compressed-tensors",
            got=f"K = {weight.K} in groups of {weight.group_size}",
            wanted="whole groups: its readers refuse a short last one",
            todo="use gptq_v2",
        )
    sizes = [weight.N, weight.K] if weight.experts is None else [weight.experts, weight.N, weight.K]
    tensors = {
        "weight_packed": weight.qweight.mT.contiguous(),
        "weight_scale": weight.scales.mT.contiguous(),
        "weight_shape": torch.tensor(sizes, dtype=torch.int64),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = pack_padded(weight.zeros.mT, -2)
    if weight.g_idx is not None:
        tensors["weight_g_idx"] = weight.g_idx
    return tensors
