"""``tools/tune --backend hopper``: tiles and programs of the Hopper kernels, measured on this GPU.

Every variant is compiled once, by a first launch in one of many processes, since its code does not depend on the
problem. Then each point (K, N, M) times the variants with the rule's number of programs, and the best of them with
other numbers.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from graph_timing import cold_copies, microseconds

from w4plugin import kernels
from w4plugin.kernels import device, hopper, hopper_requests, hopper_tiles, portable
from w4plugin.kernels.hopper_tiles import Tile
from w4plugin.kernels.tiles import Problem
from w4plugin.tensor import W4Tensor

Entry = dict[str, Any]
REGISTERS = 65536
BETWEEN = sorted({bm for bm, _ in hopper_tiles.BETWEEN})
"""Rows of a tile that are no power of two, for x that fills them better."""
SCATTER = 1.015
"""How far medians of one tile differ between runs, as a ratio."""


def variants(m: int) -> list[Tile]:
    """Tiles worth trying for so many rows of x."""
    out: list[Tile] = []
    if m <= 32:
        for bm, bn, depth, stages, warps in itertools.product(
            [8 if m <= 8 else 16], [64, 128], [2, 4], [2, 3, 4], [4, 8]
        ):
            if bn < 16 * warps:
                continue  # a warp's columns
            for resident in (2, 3):
                registers = REGISTERS // (32 * resident * (warps + 4)) // 8 * 8
                tile = Tile("narrow", bm, bn, depth, stages, warps, min(registers, 168), resident, True, 16)
                most = taken(tile)  # what takes little would do better with more stages
                if most <= hopper_tiles.SHARED < 2 * most // resident * (resident + 1) and registers >= 64:
                    out.append(tile)
    if m >= 16:
        # up to 256 rows every M of a bucket makes as many tiles, so a row has the same bits in all of them
        least = m // 2 if m <= 256 else 128
        rows = [b for b in (16, 32, 64, 128, 256) if b >= least and b < 2 * max(m, 16)]
        rows += [b for b in BETWEEN if m > 64 and -(-m // b) * b <= -(-m // 128) * 128]
        for bm, bn, warps, on_sum, depth in itertools.product(rows, [64, 128, 256], [4, 8], [True, False], [2, 4]):
            sums = bm * bn // (32 * warps)
            if bm in BETWEEN and on_sum:
                continue
            if bn < 16 * warps or sums > (64 if on_sum else 128) or (on_sum and depth == 4 and sums > 32):
                continue
            if not on_sum and sums < 32:
                continue  # a weight would be scaled for too few products
            for resident in (1, 2, 3):
                registers = REGISTERS // (32 * resident * (warps + 4)) // 8 * 8
                if registers < 80 or (resident == 3 and sums > 32) or (resident == 2 and sums > 64 and warps == 8):
                    continue
                for staged in [False] if on_sum or bm < 128 or bm in BETWEEN else [False, True]:
                    shape = (depth, 1, warps, min(registers, 168), resident, on_sum, 12)
                    tile = Tile("wide", bm, bn, *shape, staged=staged)
                    depths = (replace(tile, stages=i) for i in range(2, hopper_tiles.deepest(warps) + 1))
                    fitting = [t for t in depths if taken(t) <= hopper_tiles.SHARED]
                    out += [t for t in fitting if t.stages == 4 or t is fitting[-1]]
    return out


def taken(tile: Tile) -> int:
    """Bytes of a multiprocessor's shared memory that a tile's programs take."""
    return tile.resident * hopper_tiles.shared_bytes(tile, Problem(tile.bm, 4096, 4096, 128, True, "sm_90", 132))


def programs(tile: Tile, p: Problem) -> list[int]:
    """Numbers of programs worth trying beside the rule's."""
    tiles, slots = -(-p.n // tile.bn) * -(-p.m // tile.bm), p.sms * tile.resident
    total = tiles * hopper_tiles.steps(tile, p)
    most = hopper_tiles.most_programs(tile, p.sms)
    found = {slots, p.sms, *(tiles * share for share in (1, 2, 3, 4, 6, 8) if tiles * share <= slots)}
    if tiles <= 2 * slots:
        found.add(tiles)
    found.update(n for n in range(slots * 3 // 4, slots) if tiles % n == 0)  # waves of whole tiles, nothing shared
    return sorted(n for n in found if n <= min(most, total) and n >= min(p.sms, tiles) // 2)


@functools.cache
def problem_to_compile(m: int, n: int, k: int, group: int, dtype: str, asym: bool) -> tuple[Any, ...]:
    weight = random_weight(k, n, group, asym, getattr(torch, dtype))
    q = kernels.prepare(weight, dtype=getattr(torch, dtype), backend="hopper")
    return torch.randn(m, k, device="cuda").to(getattr(torch, dtype)), q


def compile_one(job: tuple[Tile, int, int, int, str, bool]) -> str | None:
    """Compile one variant by launching it, in a process of its own; what is wrong with it, if anything.

    M and the rows of K past whole chunks, given after the tile, are part of what a variant is. One program, so that no
    tile is shared: where one is, K's last chunk is whole.
    """
    tile, m, rest, group, dtype, asym = job
    try:
        x, q = problem_to_compile(m, 4096, 1024 + rest, group, dtype, asym)
        run(replace(tile, programs=1), x, q, group)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"
    return None


def run(tile: Tile | None, x: torch.Tensor, q: Any, group: int) -> torch.Tensor:
    return caller(tile, x, [q], group)(0)


def caller(tile: Tile | None, x: torch.Tensor, weights: list[Any], group: int) -> Any:
    q = weights[0]
    p = portable.problem(x, q.scales, None, q.N, group)
    plan = hopper.make_plan(tile, p, q.scales.dtype, q.zeros is not None, False)

    def call(i: int) -> torch.Tensor:
        w = weights[i]
        return hopper.multiply(plan, x, w.qweight, w.scales, w.zeros, None, w.counters, None, w.N, group)

    return call


def random_weight(k: int, n: int, group: int, asym: bool, dtype: torch.dtype) -> W4Tensor:
    g = torch.Generator("cuda").manual_seed(k + n)
    words = torch.randint(-(2**31), 2**31, (k // 8, n), generator=g, device="cuda", dtype=torch.int64).to(torch.int32)
    groups = -(-k // group)
    scales = ((torch.rand(groups, n, generator=g, device="cuda") + 0.5) * 0.01).to(dtype)
    zeros = torch.randint(0, 16, (groups, n), generator=g, device="cuda", dtype=torch.uint8) if asym else None
    return W4Tensor(words, scales, zeros, None, group)


@dataclass
class Point:
    """One problem on the device."""

    x: torch.Tensor
    want: torch.Tensor
    weights: list[Any]
    group: int
    ms: float
    rest_ms: float = 0

    def time(self, tile: Tile | None, factor: float = 1) -> float | None:
        """Microseconds, None where the result is wrong or the launch fails."""
        call = caller(tile, self.x, self.weights, self.group)
        try:
            got = call(0).float()
            error = float((got - self.want).abs().max() / self.want.abs().max())
        except Exception as failure:
            if "CUDA error" in str(failure):
                raise
            print(f"    {brief(tile)}: {type(failure).__name__}: {str(failure)[:120]}", flush=True)
            return None
        if not error < 2e-2:
            print(f"    WRONG {brief(tile)}: relative error {error}", flush=True)
            return None
        return microseconds(call, len(self.weights), factor * self.ms)

    def best(self, tiles: list[Tile], factor: float = 1) -> list[tuple[float, Tile]]:
        rows = [(us, tile) for tile in tiles if (us := self.time(tile, factor)) is not None]
        return sorted(rows, key=lambda row: row[0])

    def rounds(self, tiles: list[Tile | None], count: int) -> list[tuple[float, Tile | None]]:
        """Medians of so many rounds over all of them, each from another one on: what runs before sets the clock."""
        order = list(dict.fromkeys(tiles))
        times: dict[Tile | None, list[float | None]] = {tile: [] for tile in order}
        for i in range(count):
            start = i * len(order) // count
            for tile in order[start:] + order[:start]:
                time.sleep(self.rest_ms / 1e3)
                times[tile].append(self.time(tile, 2))
        rows = [(statistics.median(turns), tile) for tile, turns in times.items() if None not in turns]
        return sorted(rows, key=lambda row: row[0])


def brief(tile: Tile | None) -> str:
    if tile is None:
        return "dense"
    where = "sum" if tile.on_sum else "weights"
    return (
        f"{tile.kind} {tile.bm}x{tile.bn}x{tile.depth} stages {tile.stages} warps {tile.warps} x{tile.resident}"
        f" {where} programs {tile.programs}{' staged' if tile.staged else ''}"
    )


def group_of(k: int, a: argparse.Namespace) -> int:
    return a.group if k % a.group == 0 else 64


def tune_shape(k: int, n: int, ms: list[int], a: argparse.Namespace, usable: set[Tile]) -> Iterator[Entry]:
    """The entries of one shape."""
    dtype = getattr(torch, a.dtype)
    group = group_of(k, a)
    w = random_weight(k, n, group, a.asym, dtype)
    q = kernels.prepare(w, dtype=dtype, backend="hopper")
    copies = cold_copies(q.nbytes(), a.cold_mb)
    weights = [replace(q, qweight=q.qweight.clone(), scales=q.scales.clone()) for _ in range(copies)]
    dense = w.dequantize(dtype).t().contiguous()
    dense_copies = cold_copies(2 * k * n, a.cold_mb)
    denses = [dense.clone() for _ in range(dense_copies)]
    for m in ms:
        x = torch.randn(m, k, device="cuda").to(dtype)
        point = Point(x, (x @ dense.t()).float(), weights, group, a.ms, a.rest_ms)
        p = portable.problem(x, q.scales, None, n, group)
        # what bfloat16 gets an entry for must be faster than float16's
        rule = hopper_tiles.choose(replace(p, bfloat16=False)) if p.bfloat16 else hopper_tiles.by_rule(p)
        fitting = [t for t in variants(m) if t in usable and hopper_tiles.legal(t, p) == t]
        first = [replace(t, programs=hopper_tiles.programs(t, p)) for t in fitting]
        rows = point.best(first)
        more = [
            replace(tile, programs=count)
            for _, tile in rows[: 3 if m > 64 else 4]
            for count in programs(tile, p)
            if count != tile.programs
        ]
        rows = sorted(rows + point.best(more), key=lambda row: row[0])
        # the more a call computes, the more its time depends on the clock, so on what ran before it
        best: list[Tile | None] = [tile for _, tile in rows[: a.finalists if m >= 256 else 4]]
        final = point.rounds([*best, rule, None] if m >= 1024 else [*best, rule], a.rounds)
        time.sleep(a.rest_ms / 1e3)
        blas = microseconds(lambda i, x=x: torch.nn.functional.linear(x, denses[i]), dense_copies, 3 * a.ms)
        ruled = next((t for t, found in final if found == rule), 0.0)
        # what is no further ahead than runs scatter is not worth an exception from the rule
        us, tile = (ruled, rule) if 0 < ruled <= SCATTER * final[0][0] else final[0]
        print(
            f"{k}x{n} M={m}: {us:.2f} us {brief(tile)}; rule {ruled:.2f}; blas {blas:.2f}; {len(rows)} tried; compared "
            + "; ".join(f"{t:.2f} {brief(v)}" for t, v in final),
            flush=True,
        )
        if p.bfloat16 and tile == rule:
            continue
        yield {
            "m": m, "n": n, "k": k, "tile": None if tile is None else asdict(tile), "us": round(us, 2),
            "rule_us": round(ruled, 2), "blas_us": round(blas, 2),
        }  # fmt: skip


def entries(shapes: list[tuple[int, int]], ms: list[int], a: argparse.Namespace, pool: Any) -> Iterator[Entry]:
    """Every entry, as they come; stops in time."""
    started = time.perf_counter()
    tiles = [t for t in dict.fromkeys(tile for m in ms for tile in variants(m)) if re.search(a.only, brief(t))]
    found = {}
    for tile, m, (k, n) in itertools.product(tiles, ms, shapes):
        p = Problem(m, n, k, group_of(k, a), True, "sm_90", 132)
        kind = hopper_requests.edges(tile, p, shared=False), hopper_requests.one_row(tile, p)
        found[tile, kind, p.group] = (tile, m, k % hopper_tiles.CHUNK, p.group)
    jobs = [(*job, a.dtype, a.asym) for job in found.values()]
    usable = set(tiles)
    for (tile, *_), broken in zip(jobs, pool.map(compile_one, jobs, chunksize=1), strict=True):
        if broken:
            print(f"    {brief(tile)}: {broken}", flush=True)
            usable.discard(tile)
    print(f"{len(usable)} of {len(tiles)} tiles compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for k, n in shapes:
        for entry in tune_shape(k, n, ms, a, usable):
            yield entry
            if time.perf_counter() - started > a.seconds:
                print("out of time", json.dumps([k, n]), flush=True)
                return


def arch() -> str:
    return device.arch(torch.device("cuda", 0))
