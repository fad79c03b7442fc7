"""AWQ GEMM: codes and zero points both packed along N, eight columns a word in the order 0 2 4 6 1 3 5 7.

    qweight int32 [K, N/8]     column 8c + j of a row is nibble (0, 4, 1, 5, 2, 6, 3, 7)[j] of word c
    qzeros  int32 [G, N/8]     true zeros; may be missing when the config says ``zero_point: false``
    scales  float16 [G, N]
    bias    float [N]          optional

Written by AutoAWQ (``version: gemm``, and ``exllama`` and ``ipex``, which only name kernels), GPTQModel, AutoRound and
llm-awq before September 2023. AWQ folds its activation scaling into the layer before, so the weights are not comparable
with the original model's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats.decoding import finish, floats, need, words
from w4plugin.formats.format import Candidate, Decoded, Found, Module, RowShard
from w4plugin.formats.grouping import Parts, size_from_shape
from w4plugin.formats.words import to_int32
from w4plugin.note import Note
from w4plugin.packing import AWQ_ORDER, NIBBLES, columns_to_rows, pack, rows_to_columns, unpack
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import SYMMETRIC_ZERO, W4Tensor

SUFFIXES = frozenset({"qweight", "qzeros", "scales"})
WORDS = ("I32", "U32", "I64", "F32", "F64")


def detect(candidate: Candidate) -> Found | None:
    """K and N of an AWQ GEMM module."""
    h = candidate.headers
    if not {"qweight", "scales"} <= h.keys() or h.keys() & {"g_idx", "scaled_zeros"}:
        return None
    qweight, scales, qzeros = h["qweight"], h["scales"], h.get("qzeros")
    lead = qweight.shape[:-2]
    if len(qweight.shape) not in (2, 3) or len(scales.shape) != len(qweight.shape) or scales.shape[:-2] != lead:
        return None
    if qweight.dtype not in WORDS or not scales.dtype.startswith(("F", "BF")) or 0 in scales.shape + qweight.shape:
        return None
    (K, columns), (G, N) = qweight.shape[-2:], scales.shape[-2:]
    bits = next((b for b in (4, 8, 2) if columns * 32 == N * b), None)
    if bits is None or G > K:
        return None
    expected = candidate.config.for_module(candidate.name)
    if qzeros is None or 0 in qzeros.shape:
        if not expected.sym:
            return None
    elif qzeros.shape != (*lead, G, columns) or qzeros.dtype not in WORDS:
        return None
    size, notes = size_from_shape(candidate.name, K, G, expected)
    return Found(bits, K, N, size, lead[0] if lead else None, notes)


def read(module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, shard: RowShard | None) -> Decoded:
    """An AWQ GEMM module.

    Raises:
        CorruptError: tensors contradict each other, or zero points are missing while the config says there are some.
    """
    name = module.name
    stored, scales = need(module, tensors, "qweight", "scales")
    scales = floats(module, "scales", scales)
    packed = to_int32(words(module, "qweight", stored), -1, 32, f"{name}.qweight")
    K, N = packed.shape[-2], scales.shape[-1]
    if packed.ndim != scales.ndim or packed.shape[-1] * NIBBLES != N:
        raise CorruptError(
            f"{name}.qweight", got=str(list(packed.shape)), wanted=f"[K, {N / NIBBLES:g}] for {N} columns"
        )
    if K % NIBBLES:
        raise UnsupportedError(name, got=f"K = {K}", wanted="a multiple of 8")
    zeros, rule, notes = _zeros(name, tensors.get("qzeros"), scales, config)
    parts = Parts(columns_to_rows(packed, AWQ_ORDER), scales, zeros)
    return finish(module, parts, tensors, config, shard, rule, notes)


def _zeros(
    name: str, qzeros: Tensor | None, scales: Tensor, config: QuantConfig
) -> tuple[Tensor | None, str, tuple[Note, ...]]:
    where = f"{name}.qzeros"
    if qzeros is None or qzeros.numel() == 0:
        if config.for_module(name).sym is not True:
            raise CorruptError(where, got="no zero points", wanted="them, unless the config says zero_point: false")
        return None, "symmetric", (Note("info", where, "absent, and the config says zero_point: false: 8 everywhere"),)
    if qzeros.shape != (*scales.shape[:-1], scales.shape[-1] // NIBBLES):
        wanted = str([*scales.shape[:-1], scales.shape[-1] // NIBBLES])
        raise CorruptError(where, got=str(list(qzeros.shape)), wanted=wanted)
    zeros = unpack(to_int32(qzeros, -1, 32, where), -1, AWQ_ORDER)
    if bool((zeros == SYMMETRIC_ZERO).all()):
        return None, "true", ()
    notes: tuple[Note, ...] = ()
    if config.for_module(name).sym:
        text = "the config says zero_point: false, but zero points other than 8 are stored; the tensor wins"
        notes = (Note("conflict", where, text),)
    return zeros, "true", notes


def write(weight: W4Tensor) -> dict[str, Tensor]:
    """AWQ GEMM tensors, with zero points even when all are 8: readers allocate them.

    Raises:
        UnsupportedError: act-order, N not a multiple of 8, a short last group, or scales other than float16.
    """
    refusals = (
        (weight.g_idx is not None, "a real act-order", "sequential groups: the format has no g_idx"),
        (weight.N % NIBBLES != 0, f"N = {weight.N}", "a multiple of 8, since eight columns share a word"),
        (
            weight.G > 1 and weight.K % weight.group_size != 0,
            f"K = {weight.K} in groups of {weight.group_size}",
            "whole groups: its readers refuse a short last one",
        ),
        (
            weight.scales.dtype != torch.float16,
            f"{weight.scales.dtype} scales",
            "torch.float16: its readers narrow others",
        ),
    )
    for refused, got, wanted in refusals:
        if refused:
            raise UnsupportedError("awq", got=got, wanted=wanted, todo="use gptq_v2")
    return {
        "qweight": rows_to_columns(weight.qweight, AWQ_ORDER),
        "qzeros": pack(weight.full_zeros(), -1, AWQ_ORDER),
        "scales": weight.scales,
    }
