"""Marlin-serialised checkpoints: the order of a kernel's registers, saved to disk.

    B | qweight  int32 [K/16, 2N]   1024 codes of a 16 x 64 tile permuted for tensor cores
    s | scales   float16 [G, N]     permuted too, differently for one group than for several
    workspace                       a runtime buffer, ignored

Always symmetric, never act-order. Written by AutoGPTQ <= 0.7.1 and IST's marlin (B and s), and AutoAWQ
(``version: marlin``: qweight and scales). Current vLLM, SGLang and GPTQModel no longer load it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats.decoding import finish, floats, need, words
from w4plugin.formats.format import Candidate, Decoded, Found, Module, RowShard
from w4plugin.formats.grouping import Parts, size_from_shape
from w4plugin.formats.words import to_int32
from w4plugin.packing import pack, unpack
from w4plugin.quant_config import QuantConfig

SUFFIXES = frozenset({"B", "s", "workspace"})
AWQ_SUFFIXES = frozenset({"qweight", "scales", "workspace"})

TILE = 16
STRIP = 64
"""Columns of four tiles, which one run of 1024 codes covers."""

RUN = TILE * STRIP
_LANES = (0, 2, 4, 6, 1, 3, 5, 7)


def detect(candidate: Candidate) -> Found | None:
    """K and N of a module that AutoGPTQ or marlin itself saved."""
    return _detect(candidate, "B", "s")


def detect_awq(candidate: Candidate) -> Found | None:
    """K and N of a module that AutoAWQ saved."""
    return None if "qzeros" in candidate.headers else _detect(candidate, "qweight", "scales")


def _detect(candidate: Candidate, codes: str, scale: str) -> Found | None:
    h = candidate.headers
    if not {codes, scale} <= h.keys():
        return None
    packed, scales = h[codes], h[scale]
    if packed.dtype != "I32" or len(packed.shape) != 2 or len(scales.shape) != 2 or 0 in packed.shape + scales.shape:
        return None
    K, N, G = packed.shape[0] * TILE, scales.shape[1], scales.shape[0]
    if packed.shape[1] != 2 * N or N % STRIP or not scales.dtype.startswith(("F", "BF")):
        return None
    size, notes = size_from_shape(candidate.name, K, G, candidate.config.for_module(candidate.name))
    return Found(4, K, N, size, None, notes)


def read(module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, shard: RowShard | None) -> Decoded:
    """A Marlin module.

    Raises:
        CorruptError: shapes contradict each other.
        UnsupportedError: a row shard, which this order cannot be cut into.
    """
    name = module.name
    codes, scale = ("B", "s") if "B" in tensors else ("qweight", "scales")
    stored, scales = need(module, tensors, codes, scale)
    scales = floats(module, scale, scales)
    packed = to_int32(words(module, codes, stored), -1, 32, f"{name}.{codes}")
    if packed.ndim != 2 or scales.ndim != 2 or packed.shape[1] != 2 * scales.shape[1] or scales.shape[1] % STRIP:
        wanted = "[K/16, 2N] and [G, N] with N a multiple of 64"
        raise CorruptError(name, got=f"{codes} {list(packed.shape)}, {scale} {list(scales.shape)}", wanted=wanted)
    if shard is not None:
        raise UnsupportedError(name, got="a row shard of Marlin's order", wanted="the whole module")
    K, N = packed.shape[0] * TILE, scales.shape[1]
    slots = unpack(packed, -1).view(-1, RUN)
    tiles = slots.index_select(1, _code_order().argsort().to(slots.device)).view(K // TILE, N // TILE, TILE, TILE)
    matrix = tiles.permute(0, 2, 1, 3).reshape(K, N)
    parts = Parts(pack(matrix, 0), _scales(scales), None)
    return finish(module, parts, tensors, config, shard, "symmetric")


@functools.cache
def _code_order() -> Tensor:
    """Element (tile, row, column) that each of the 1024 slots of a run holds."""
    order: list[int] = []
    for thread in range(32):
        rows = [2 * (thread % 4) + r for r in (0, 1, 8, 9)]
        own = [TILE * r + thread // 4 + 8 * half for half in (0, 1) for r in rows]
        for tile in range(4):
            order += [e + TILE * TILE * tile for e in own]
    return torch.tensor(order).view(-1, 8)[:, _LANES].flatten()


def _scales(scales: Tensor) -> Tensor:
    """Scales in column order. One group is permuted in runs of 32, several in runs of 64."""
    if scales.shape[0] == 1:
        order = torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])
    else:
        order = torch.arange(64).view(8, 8).t().flatten()
    runs = scales.reshape(-1, len(order))
    return runs.index_select(1, order.argsort().to(scales.device)).view(scales.shape)
