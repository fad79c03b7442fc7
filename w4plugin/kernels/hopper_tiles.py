"""Which Hopper kernel, in which tiles and with how many programs: a pure function of the problem.

The rule below is read off measurements on an H200 (benchmarks/LOG.md). What they say, in short: decode likes few deep
programs (two a multiprocessor, three stages of 512 rows) whose shares of K are whole and long; a program with a ragged
share pays for two partial tiles; from 9 to 128 rows wgmma with the scale on the sum leads, since it unpacks with the
fewest instructions; above, only tiles of 256 rows of x amortise the unpacking.
"""

from __future__ import annotations

from dataclasses import dataclass

from w4plugin.kernels.tiles import Problem

CHUNK = 128
"""Rows of the weight in the kernels' unit of work."""

DENSE_FROM = 3072
"""Rows of x from which dequantising first, then multiplying densely, is faster than any fused tile."""


@dataclass(frozen=True)
class Tile:
    """One variant of a Hopper kernel.

    Attributes:
        kind: "narrow" (mma.sync) or "wide" (wgmma).
        bm: rows of x.
        bn: columns of the weight.
        depth: chunks a stage (narrow) or products a chunk (wide: 2 or 4).
        stages: of the pipeline.
        warps: that multiply; one more loads.
        registers: a thread at launch; with the stages they decide how many programs share a multiprocessor.
        resident: programs a multiprocessor holds.
        on_sum: scales multiply the float32 sum of a group; else the weights, which need scales in x's dtype.
        shortest: chunks of K below which a program's share does not pay for its partial sum.
    """

    kind: str
    bm: int
    bn: int
    depth: int
    stages: int
    warps: int
    registers: int
    resident: int
    on_sum: bool
    shortest: int


def _narrow(bm: int, bn: int, depth: int, stages: int, warps: int, registers: int) -> Tile:
    return Tile("narrow", bm, bn, depth, stages, warps, registers, 2, True, 16)


def _wide(
    bm: int, bn: int, stages: int, warps: int, registers: int, resident: int, on_sum: bool, depth: int = 2
) -> Tile:
    return Tile("wide", bm, bn, depth, stages, warps, registers, resident, on_sum, 12)


def choose(p: Problem) -> Tile | None:
    """The tile for a problem; None means dequantise first, then multiply densely."""
    tile = _by_rows(p, narrow_layer=_columns(p, 128) < 48)
    if tile is None or (not tile.on_sum and not p.narrow):
        # scales in another dtype than x cannot multiply the weights without being narrowed
        tile = None if p.m > 512 else _wide(128, 128, 4, 8, 168, 1, True)
    if tile is not None and tile.kind == "wide" and p.group == 32 and tile.depth != 4:
        tile = Tile(**{**tile.__dict__, "depth": 4})  # four groups a chunk: a product each
    return tile


def _by_rows(p: Problem, narrow_layer: bool) -> Tile | None:
    slots = 2 * p.sms
    if p.m <= 8:
        if _columns(p, 64) > slots >= _columns(p, 128):
            return _narrow(8, 128, 2, 3, 8, 80)
        return _narrow(8, 64, 4, 3, 4, 128)
    if p.m <= 16:
        return _narrow(16, 64, 4, 3, 4, 128) if _columns(p, 64) <= slots else _wide(16, 128, 6, 4, 128, 2, True)
    if p.m <= 32:
        if not narrow_layer:
            return _wide(32, 128, 4, 4, 128, 2, True)
        return _wide(32, 64, 5, 4, 80, 3, True) if p.k >= 8192 else _narrow(16, 64, 4, 3, 4, 128)
    if p.m <= 64:
        if _columns(p, 128) >= 96:
            return _wide(64, 128, 4, 4, 128, 2, True)
        return _wide(64, 64, 4, 4, 80, 2, True) if p.k >= 8192 else _wide(64, 64, 6, 4, 128, 1, True)
    large = _columns(p, 128) >= 96
    if p.m <= 128:
        return _wide(128, 128, 4, 8, 168, 1, True) if large else _wide(128, 64, 4, 4, 128, 1, True)
    if p.m >= DENSE_FROM:
        return None
    if 2 * _columns(p, 128) < 96 and p.m <= 512:  # too few tiles of 128 columns to go round
        return _wide(128, 64, 4, 4, 128, 1, True) if p.m <= 256 else _wide(256, 64, 3, 4, 168, 1, False, depth=4)
    if p.m <= 256 and not large:
        return _wide(128, 128, 4, 8, 168, 1, True)
    return _wide(256, 128, 3, 8, 168, 1, False, depth=4)


def _columns(p: Problem, bn: int) -> int:
    return -(-p.n // bn)


def steps(tile: Tile, p: Problem) -> int:
    """Units of work along K of one tile."""
    unroll = tile.depth if tile.kind == "narrow" else 1
    return -(-p.k // (CHUNK * unroll))


def programs(tile: Tile, p: Problem) -> int:
    """How many programs share the work.

    Whole shares where tiles are fewer than the programs that fit: every tile gets the same number of programs.
    Otherwise, or where that leaves too much of the device idle, as many as fit, each with an equal run of steps.
    """
    tiles = _columns(p, tile.bn) * -(-p.m // tile.bm)
    slots = p.sms * tile.resident
    unroll = tile.depth if tile.kind == "narrow" else 1
    most = max(1, steps(tile, p) * unroll // tile.shortest)
    if tiles <= slots:
        share = min(slots // tiles, most)
        if tiles * share >= 0.6 * slots or share == most:
            return tiles * share
    elif tile.warps == 8 and 1.6 * slots <= tiles <= 2 * slots:
        return tiles  # two nearly full waves of whole large tiles beat cutting each of them once
    return min(slots, tiles * steps(tile, p))
