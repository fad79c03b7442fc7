"""Which kernel, and in which tiles: a pure function of the problem, backed by tables that ``tools/tune`` measured.

Nothing is tried out at run time. A shape that a table does not hold takes the measured tiles of the nearest one, with K
split anew to fill the device; a device without a table takes a rule.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

COUNTERS = 1024
"""Most tiles of a launch that splits K: the arrival counters a weight carries."""

BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Every M up to a bucket's number takes its tiles, so neighbouring batch sizes give the same bits."""


@dataclass(frozen=True)
class Tile:
    """One variant of the fused kernel.

    Attributes:
        bm: rows of x a program takes.
        bn: columns of the weight a program takes, a multiple of 16.
        unroll: blocks of 64 rows of the weight in a step.
        split: shares of K.
        warps: of a program.
        k_warps: parts of K that the warps of a program take, each all columns: 1, or ``warps`` (then ``unroll`` and
            ``split`` count what one warp takes).
        stages: depth of the pipeline that brings x to shared memory.
        on_sum: scales multiply the sum of a group; else the weights.
        ahead: words load one step ahead into registers; else they come through the pipeline too.
        pdl: the launch may overlap the end of the kernel before it (programmatic dependent launch, sm_90 on).
    """

    bm: int
    bn: int
    unroll: int
    split: int
    warps: int
    stages: int
    on_sum: bool
    ahead: bool = True
    k_warps: int = 1
    pdl: bool = False


@dataclass(frozen=True)
class Problem:
    """What a choice depends on, and nothing else.

    Attributes:
        m, n, k: sizes of the product.
        group: rows in a group; 0 when one group spans K.
        narrow: scales have the dtype of x, so they can multiply 16-bit weights.
        arch: as in ``Target``.
        sms: multiprocessors.
        by_row: every row names its own group.
        bfloat16: x is; unpacking takes more instructions than to float16.
    """

    m: int
    n: int
    k: int
    group: int
    narrow: bool
    arch: str
    sms: int
    by_row: bool = False
    bfloat16: bool = False


def span(group: int, unroll: int) -> int:
    """Rows that share a scale inside a step: a power of two; below 16 the fused kernel cannot cut."""
    return math.gcd(group, 64 * unroll) if group else 64 * unroll


def choose(p: Problem) -> Tile | None:
    """The tile for a problem; None means dequantise first, then multiply densely.

    It depends on M through its bucket alone, so a row has the same bits in every batch of that bucket.
    """
    p = replace(p, m=max(p.m, bucket(p.m)))
    entry = _nearest(p)
    if entry is None:
        tile = _rule(p)
    elif entry["tile"] is None:
        return None
    else:
        tile = Tile(**entry["tile"])
        if (entry["n"], entry["k"]) != (p.n, p.k):
            tile = _resplit(tile, p)
    return None if tile is None else fit(tile, p)


def fit(tile: Tile, p: Problem) -> Tile:
    """A tile made legal for a problem: scales where its groups allow, no more shares than steps or counters."""
    if p.by_row and tile.k_warps > 1:  # that form cuts K by groups
        tile = replace(tile, bn=16 * tile.warps, k_warps=1)
    on_sum = (tile.on_sum or not p.narrow) and not p.by_row
    if span(p.group, tile.unroll) < 64:
        on_sum = False  # a block holds several groups; their scales take the registers of a second block
        tile = replace(tile, unroll=1)
    split = min(tile.split, steps(tile, p))
    if grid(tile, p) > COUNTERS:
        split = 1
    pdl = tile.pdl and p.arch.startswith("sm_") and int(p.arch[3:]) >= 90
    return replace(tile, split=split, on_sum=on_sum, pdl=pdl)


def grid(tile: Tile, p: Problem) -> int:
    """Tiles of the output."""
    return -(-p.m // tile.bm) * -(-p.n // tile.bn)


def asynchronous(arch: str) -> bool:
    """Whether large tiles run on tensor cores that a program starts and later waits for (wgmma, tcgen05)."""
    return arch[:5] in ("sm_90", "sm_10")


def steps(tile: Tile, p: Problem) -> int:
    """Steps that cover K."""
    return -(-p.k // (64 * tile.unroll * tile.k_warps))


def bucket(m: int) -> int:
    """The M whose tiles ``m`` takes."""
    return next((b for b in BUCKETS if m <= b), BUCKETS[-1])


def _rule(p: Problem) -> Tile | None:
    """Without a measurement: small tiles that fill the device, larger ones as M grows, dense from 2048 rows on."""
    cuda = p.arch.startswith("sm_")
    if p.m > 1024:
        return None
    if p.m <= 16 and cuda:
        tile = Tile(8 if p.m <= 8 else 16, 32, 2, 1, 8, 3, True, k_warps=8, pdl=True)
    elif p.m <= 16:  # 64 KiB of shared memory hold no activations of eight parts of K
        tile = Tile(16, 64, 2, 1, 4, 3, True)
    elif p.m <= 32:
        tile = Tile(32, 64, 2, 1, 4, 3, True, pdl=True)
    elif asynchronous(p.arch):
        tile = Tile(64, 64, 2, 1, 4, 3, True, pdl=True) if p.m <= 64 else Tile(128, 128, 2, 1, 8, 3, True, pdl=True)
    else:
        tile = Tile(64, 128, 1, 1, 4, 4, False) if p.m <= 64 else Tile(128, 128, 1, 1, 8, 4, False)
    return _resplit(tile, p)


def _resplit(tile: Tile, p: Problem) -> Tile:
    """The tile with as many shares of K as give 16 warps to a multiprocessor.

    A share has at least 4 steps, or one where the warps of a program share K already.
    """
    least = 4 if tile.k_warps == 1 else 1
    wanted = 16 * p.sms / (grid(tile, p) * tile.warps)
    split = 1
    while split * 2 <= wanted and split * 2 * least <= steps(tile, p):
        split *= 2
    return replace(tile, split=split)


@functools.cache
def table(arch: str) -> list[dict[str, Any]]:
    """The measured entries of an architecture, empty where nobody measured."""
    file = resources.files("w4plugin.kernels") / "tables" / f"portable_{arch}.json"
    if not file.is_file():
        return []
    entries: list[dict[str, Any]] = json.loads(file.read_text())["entries"]
    return entries


def _nearest(p: Problem) -> dict[str, Any] | None:
    """The entry of the same bucket of M whose shape is nearest, by the ratios of N and K."""
    entries = [e for e in table(p.arch) if e["m"] == bucket(p.m)]
    if not entries:
        return None
    return min(entries, key=lambda e: abs(math.log(e["n"] / p.n)) + abs(math.log(e["k"] / p.k)))
