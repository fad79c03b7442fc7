"""Which Hopper kernel, in which tiles and with how many programs: a pure function of the problem.

Shapes near one of a table take what ``tools/tune`` measured there. The rule for all others is read off measurements on
an H200 (benchmarks/LOG.md). What they say, in short: decode likes few deep programs (two a multiprocessor, three stages
of 512 rows) whose shares of K are whole and long; a program with a ragged share pays for two partial tiles; from 9 to
64 rows wgmma with the scale on the sum leads, since it unpacks with the fewest instructions; above, products that never
wait for each other hide the scaling of weights, and large tiles want their output stored by TMA. Measured are powers of
two; between them a tile in two parts, of 96, 160 or 192 rows, is taken where it should be clearly faster.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from w4plugin.kernels.tiles import Problem, bucket

CHUNK = 128
"""Rows of the weight in the kernels' unit of work."""

SHARED = 227 * 1024
"""Bytes of shared memory of a multiprocessor that programs can take."""

BAND = 1024
"""Rows of x that programs share before they take the next ones: so x and W are read from the L2 in even parts."""

COUNTERS = 16
"""Warps that multiply, a multiprocessor: a weight carries an arrival counter for each."""

MOST = 2
"""Programs that share a tile left after whole ones, each of no other. Three and four took longer than equal runs."""

RUNS = (10, 0.1)
"""What sharing in equal runs costs a program, in chunks and in chunks of a tile: it has parts of three tiles."""

PARTS = (7, 0.03)
"""The same where it has a part of one."""

LARGE = {(256, 128): 1.85, (128, 256): 1.87, (128, 128): 1.0}
"""Rows and columns of the tiles for many rows, and how long a chunk of one takes. The larger ones read a third less
from the L2, and 256 rows unpack each word for twice as many products. By 42 points between the powers of two
(benchmarks/LOG.md) what this chooses takes 0.4 % longer than the best of the three on average, 8 % at most."""

BETWEEN = {(96, 256): 1.6, (160, 128): 1.25, (192, 128): 1.47, (192, 64): 0.84}
"""The same of tiles in two parts, for rows that are nearer to theirs than to a power of two. By 70 points what is
chosen with them takes 0.5 % longer than the best of all on average, 5 % at most."""

TIMES = {**LARGE, **BETWEEN, (256, 64): 1.03, (128, 64): 0.61}
"""The same of every tile that is compared with others, those of up to 256 rows included."""

AHEAD = 0.93
"""A tile in two parts is taken where it should need less than so much of the other's time: for few rows it is not
products alone that take time."""

NEAR = 1.5
"""How far a measured shape may be from a problem's, as the product of the ratios of N and of K."""


@dataclass(frozen=True)
class Tile:
    """One variant of a Hopper kernel.

    Attributes:
        kind: "narrow" (mma.sync) or "wide" (wgmma).
        bm: rows of x: a power of two; or (wide, scales on the weights, not staged) the sum of two.
        bn: columns of the weight.
        depth: chunks a stage (narrow) or products a chunk (wide: 2 or 4).
        stages: of the pipeline.
        warps: that multiply; one more loads.
        registers: a thread at launch; with the stages they decide how many programs share a multiprocessor.
        resident: programs a multiprocessor holds.
        on_sum: scales multiply the float32 sum of a group; else the weights, which need scales in x's dtype.
        shortest: chunks of K below which a program's share does not pay for its partial sum.
        programs: that share the work; 0 takes a rule's number.
        staged: whole tiles are stored by TMA, from shared memory (wide); otherwise from registers.
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
    programs: int = 0
    staged: bool = False

    @property
    def unroll(self) -> int:
        """Chunks a stage."""
        return self.depth if self.kind == "narrow" else 1


def _narrow(bm: int, bn: int, depth: int, stages: int, warps: int, registers: int) -> Tile:
    return Tile("narrow", bm, bn, depth, stages, warps, registers, 2, True, 16)


def _wide(
    bm: int, bn: int, stages: int, warps: int, registers: int, resident: int, on_sum: bool, depth: int = 2
) -> Tile:
    return Tile("wide", bm, bn, depth, stages, warps, registers, resident, on_sum, 12)


def _staged(bm: int, bn: int) -> Tile:
    """Many rows, whose output goes through shared memory."""
    return replace(_wide(bm, bn, 4 if bm == bn else 3, 8, 168, 1, False, depth=4), staged=True)


def choose(p: Problem) -> Tile | None:
    """The tile for a problem; None means dequantise first, then multiply densely.

    What was measured on the nearest shape (``tools/tune``), or the rule where none is near.
    """
    entry = _nearest(p)
    if entry is None or (p.m > 256 and -(-p.m // CHUNK) != -(-entry["m"] // CHUNK)):
        return by_rule(p)
    if entry["tile"] is None:
        return None
    tile = Tile(**entry["tile"])
    same = (entry["n"], entry["k"]) == (p.n, p.k) and entry["sms"] == p.sms
    if not same or -(-p.m // tile.bm) != -(-entry["m"] // tile.bm):
        tile = replace(tile, programs=0)
    return _between(legal(tile, p), p)


def by_rule(p: Problem) -> Tile | None:
    """The tile by the rule alone."""
    return _between(legal(_by_rows(p, narrow_layer=_columns(p, 128) <= 48), p), p)


def _between(tile: Tile | None, p: Problem) -> Tile | None:
    """The tile, or one in two parts where x has rows for it and it should take less time. Buckets were measured."""
    if tile is None or tile.on_sum or (tile.bm, tile.bn) not in TIMES or p.m <= 64 or p.m == bucket(p.m):
        return tile
    sizes = [(bm, bn) for bm, bn in BETWEEN if bm > 128 or p.m <= bm]  # more of 96 rows read words too often
    tiles = [legal(_wide(bm, bn, 4, 4 if bn == 64 else 8, 168, 1, False, depth=4), p) for bm, bn in sizes]
    best = min((two for two in tiles if two is not None), key=lambda two: _time(two, p))
    return best if _time(best, p) < AHEAD * _time(tile, p) else tile


def legal(tile: Tile | None, p: Problem) -> Tile | None:
    """The tile, or another where the groups or scales of the problem do not allow it."""
    if tile is None or (not tile.on_sum and not p.narrow):
        # scales in another dtype than x cannot multiply the weights without being narrowed
        tile = None if p.m > 512 else _wide(128, 128, 4, 8, 168, 1, True)
    if tile is not None and tile.kind == "wide" and p.group == 32 and tile.depth != 4:
        tile = replace(tile, depth=4)  # four groups a chunk: a product each
        if tile.on_sum and tile.warps == 4 and tile.bm * tile.bn > 64 * 64:
            tile = replace(tile, bn=64, programs=0)  # and the sums of each, for which registers would not do
    while tile is not None and tile.resident * shared_bytes(tile, p) > SHARED:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def shared_bytes(tile: Tile, p: Problem) -> int:
    """Shared memory that a program needs, zero points included."""
    groups = CHUNK // p.group if 0 < p.group < CHUNK else 1
    scales = (2 if p.narrow else 4) * tile.bn + max(tile.bn, 128)
    chunk = tile.bn * CHUNK // 2 + tile.bm * 2 * CHUNK + groups * scales
    own = tile.staged and not lends(tile.bm)
    return tile.stages * chunk * tile.unroll + 2 * own * tile.bm * tile.bn + 1024


def lends(bm: int) -> bool:
    """Whether the stage of x that was a tile's last holds the output to be sent, and memory of its own does not.

    Three stages of 256 rows leave no room. With 128 rows the loader, a stage short meanwhile, falls behind by 3 %.
    """
    return bm > CHUNK


@functools.cache
def table(arch: str, bfloat16: bool = False) -> list[dict[str, Any]]:
    """The measured entries of an architecture, empty where nobody measured.

    They are float16's; bfloat16 has its own where another tile was faster by more than runs scatter.
    """
    found = {}
    for name in [arch, f"{arch}_bfloat16"] if bfloat16 else [arch]:
        file = resources.files("w4plugin.kernels") / "tables" / f"hopper_{name}.json"
        if file.is_file():
            measured = json.loads(file.read_text())
            found.update({(e["m"], e["n"], e["k"]): {**e, "sms": measured["sms"]} for e in measured["entries"]})
    return list(found.values())


def _nearest(p: Problem) -> dict[str, Any] | None:
    """The entry of the same bucket of M whose shape is nearest, if N and K together are within a factor of NEAR."""
    entries = [e for e in table(p.arch, p.bfloat16) if e["m"] == bucket(p.m)]
    found = [(abs(math.log(e["n"] / p.n)) + abs(math.log(e["k"] / p.k)), e) for e in entries]
    distance, entry = min(found, key=lambda pair: pair[0], default=(math.inf, None))
    return entry if distance <= math.log(NEAR) else None


def _by_rows(p: Problem, narrow_layer: bool) -> Tile:
    slots = 2 * p.sms
    thrice = slots < _columns(p, 64) <= 3 * p.sms  # a tile for each of three programs a multiprocessor
    if p.m <= 8:
        if thrice:
            return replace(_narrow(8, 64, 4, 3, 4, 80), resident=3)
        if _columns(p, 64) > slots >= _columns(p, 128):
            return _narrow(8, 128, 2, 3, 8, 80)
        return _narrow(8, 64, 4, 3, 4, 128)
    if p.m <= 16:
        if thrice:
            return replace(_narrow(16, 64, 4, 2, 4, 80), resident=3)
        return _narrow(16, 64, 4, 3, 4, 128) if _columns(p, 64) <= slots else _wide(16, 128, 6, 4, 128, 2, True)
    if p.m <= 32:
        if thrice:
            return _wide(32, 64, 6, 4, 80, 3, True)
        if not narrow_layer:
            return _wide(32, 128, 4, 4, 128, 2, True)
        return _wide(32, 64, 5, 4, 80, 3, True) if p.k >= 8192 else _wide(32, 64, 4, 4, 128, 2, True)
    if p.m <= 64:
        if thrice:
            return _wide(64, 64, 3, 4, 80, 3, True)
        if p.narrow and _columns(p, 256) * min(p.k, 28672) >= 96 * 4096:
            return _wide(64, 256, 4, 8, 168, 1, False, depth=4)
        if _columns(p, 128) >= 96:
            return _wide(64, 128, 4, 4, 128, 2, True)
        return _wide(64, 64, 4, 4, 80, 2, True) if p.k >= 8192 else _wide(64, 64, 6, 4, 128, 1, True)
    if p.m <= 128:
        return _staged(128, 128) if _columns(p, 128) >= 64 else _wide(128, 64, 4, 4, 168, 1, False)
    # narrow tiles where wider ones are too few to go round
    half = 2 * _columns(p, 64) <= p.sms
    if p.m <= 256 and half:
        return _wide(128, 64, 4, 4, 168, 1, False)
    if (p.m <= 256 and _columns(p, 64) <= p.sms) or (384 < p.m <= 512 and half):
        return _wide(256, 64, 3, 4, 168, 1, False, depth=4)
    return min((_staged(bm, bn) for bm, bn in LARGE), key=lambda tile: _time(tile, p))


def _time(tile: Tile, p: Problem) -> float:
    """What the busiest program takes with a tile whose chunks were timed, in chunks of 128 x 128."""
    tiles = _columns(p, tile.bn) * -(-p.m // tile.bm)
    return _cheapest(tiles, programs(tile, p), steps(tile, p))[0] * TIMES[tile.bm, tile.bn]


def _columns(p: Problem, bn: int) -> int:
    return -(-p.n // bn)


def deepest(warps: int) -> int:
    """Most stages of so many warps: one named barrier a stage and warpgroup, and one a stage; twelve are free."""
    return 12 // (warps // 4 + 1)


def steps(tile: Tile, p: Problem) -> int:
    """Units of work along K of one tile."""
    return -(-p.k // (CHUNK * tile.unroll))


def two_parts(bm: int) -> tuple[int, int]:
    """The rows of a tile as a power of two and the rest, which is 0 where they are one."""
    first = 1 << bm.bit_length() - 1
    return first, bm - first


def most_programs(tile: Tile, sms: int) -> int:
    """How many programs have counters: one for each warp, and one more where a tile is in two parts."""
    return COUNTERS * sms // (tile.warps * (2 if two_parts(tile.bm)[1] else 1))


def programs(tile: Tile, p: Problem) -> int:
    """How many programs share the work.

    Whole shares where tiles are fewer than the programs that fit: every tile gets the same number of programs.
    Otherwise, or where that leaves too much of the device idle, as many as fit, or as take least by :func:`division`.
    """
    tiles = _columns(p, tile.bn) * -(-p.m // tile.bm)
    counted = most_programs(tile, p.sms)
    slots = min(p.sms * tile.resident, counted)
    divisors = [n for n in range(1, slots + 1) if tiles % n == 0]
    if tile.programs:
        return min(tile.programs, tiles * steps(tile, p), counted)
    most = max(1, steps(tile, p) * tile.unroll // tile.shortest)
    if tiles <= slots:
        share = min(slots // tiles, most)
        if tiles * share >= 0.6 * slots or share == most:
            return tiles * share
    elif not tile.on_sum:
        # whole tiles on a little less than the device, where that wastes less than sharing costs
        return min(*divisors, slots, key=lambda n: _cheapest(tiles, n, steps(tile, p))[0])
    return min(slots, tiles * steps(tile, p))


def division(tiles: int, programs: int, steps: int, even: bool) -> tuple[int, int]:
    """How many whole tiles each program computes, and how many programs then share what is left.

    What is left is nothing; or more than a tile a program, of which all walk equal runs of steps, so that a tile is cut
    into three parts at most; or where that costs less and ``even`` is given, fewer tiles than programs, each of them
    cut into as many parts.
    """
    if even or tiles % programs == 0:
        return _cheapest(tiles, programs, steps)[1:]
    return max(tiles // programs - 1, 0), programs


def _cheapest(tiles: int, programs: int, steps: int) -> tuple[float, int, int]:
    """What the busiest program takes, in chunks, by the cheapest :func:`division`, and that."""
    whole, left = divmod(tiles, programs)
    if not left:
        return whole * steps, whole, programs
    each, a_step = PARTS if programs % tiles == 0 else RUNS
    equal = tiles * steps / programs + each + a_step * steps, max(whole - 1, 0), programs
    if not whole:
        return equal
    parts = min(MOST, programs // left)
    summing = PARTS[0] + PARTS[1] * steps if parts > 1 else 0.0
    return min(equal, (whole * steps + -(-steps // parts) + summing, whole, left * parts))
