"""Other tiles for our experts on this GPU: what the rule chooses against its neighbours, one change at a time.

    tools/bench_experts_sweep.py --layers qwen3-30b-a3b --tokens 1,4,16,64

For every number of rows of x, layouts that differ from the rule's in one product's tile or in how rows are found are
compiled in parallel processes and timed as tools/bench_experts times. Printed, fastest first, and written as JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_experts
import torch
from bench_experts_peers import LAYERS, Layer
from torch import Tensor

from w4plugin import kernels
from w4plugin.bench import timing
from w4plugin.kernels import tiles
from w4plugin.kernels.moe import portable, tile_choice
from w4plugin.kernels.moe.backend import Call
from w4plugin.kernels.moe.tile_choice import Layout
from w4plugin.kernels.tiles import Problem, Tile

DTYPES = bench_experts.DTYPES


def call_of(p: kernels.PreparedExperts) -> Call:
    """A prepared layer as the backend's ``run`` takes it."""
    return Call(
        p.gate_up, p.gate_up_scales, p.gate_up_zeros, p.gate_up_g_idx, p.down, p.down_scales, p.down_zeros,
        p.down_g_idx, None, p.I, p.gate_up_group_size, p.down_group_size, p.gated, "silu", False,
    )  # fmt: skip


def shapes(bm: int) -> list[Tile]:
    """Tiles worth a try for so many rows of x."""
    if bm <= 16:
        shared = [
            Tile(bm, bn, u, 1, w, 3, True, k_warps=w, pdl=True)
            for w, u, bn in ((4, 1, 32), (4, 2, 32), (8, 1, 32), (8, 2, 32), (4, 2, 16))
        ]
        apart = ((32, 2, 2, 4), (64, 4, 1, 4), (64, 4, 2, 3), (64, 4, 2, 4), (128, 4, 1, 4), (128, 8, 2, 3))
        return shared + [Tile(bm, bn, u, 1, w, s, True, pdl=True) for bn, w, u, s in apart]
    if bm <= 64:
        apart = ((64, 4, 1, 4), (64, 4, 2, 3), (64, 4, 2, 4), (128, 4, 1, 4), (128, 4, 2, 3), (128, 8, 2, 3))
        return [Tile(bm, bn, u, 1, w, s, True, pdl=True) for bn, w, u, s in apart]
    return [Tile(bm, 128, u, 1, 8, s, on, pdl=True) for u, s in ((1, 4), (2, 3)) for on in (True, False)]


def neighbours(s: portable.Sizes) -> Iterator[Layout]:
    """The chosen layout; the rule's tiles for other numbers of rows and ways to find them; and for each number of rows
    every tile in the place of one of the two products'."""
    chosen = tile_choice.choose(s.load, s.first, s.second)
    yield chosen

    def fitted(tile: Tile, p: Problem) -> Tile:
        return replace(tiles.fit(tile, replace(p, m=tile.bm)), split=1)

    inline = (1, max(16, tile_choice.power_of_two(s.load.pairs))) if s.load.pairs <= 128 else ()
    for bm in (8, 16, 32, 64, 128):
        if not s.load.rows / 2 <= bm <= max(16, 8 * s.load.rows):
            continue
        one, two = (tile_choice.tile(s.load, bm, p, p is s.first) for p in (s.first, s.second))
        anchor = Layout(one, two, chosen.pairs)
        yield anchor
        for pairs in (0, *inline):
            yield replace(anchor, pairs=pairs)
        for tile in shapes(bm):
            yield replace(anchor, first=fitted(tile, s.first))
            yield replace(anchor, second=fitted(tile, s.second))


@functools.cache
def _zeros(layer: Layer, dtype: str) -> Call:
    p = kernels.prepare_experts(*bench_experts.weights_of(layer, DTYPES[dtype], "cuda", None), dtype=DTYPES[dtype])
    return call_of(p)


def compile_one(job: tuple[Layer, int, str, Layout]) -> str | None:
    """Run a layout once on weights of zeros, in a process of its own; the error if it does not run."""
    layer, tokens, dtype, layout = job
    try:
        call = _zeros(layer, dtype)
        x = torch.zeros(tokens, layer.hidden, dtype=DTYPES[dtype], device="cuda")
        portable.run(
            portable.sizes(x, layer.topk, call), layout, x, *bench_experts.routing(layer, tokens, "cuda", 0), call
        )
        torch.cuda.synchronize()
    except Exception as failure:
        return bench_experts.why(failure)
    return None


def sweep(layer: Layer, tokens: list[int], a: argparse.Namespace, pool: Any, deadline: float) -> list[dict[str, Any]]:
    """Every layout's time at every number of tokens of a layer."""
    dtype, copies = DTYPES[a.dtype], timing.cold_copies(layer.nbytes(), a.cold_mb)
    calls = []
    for i in range(copies):
        p = kernels.prepare_experts(*bench_experts.weights_of(layer, dtype, "cuda", 10 * i), dtype=dtype)
        calls.append(call_of(p))
    inputs = {t: torch.randn(t, layer.hidden, device="cuda").to(dtype) for t in tokens}
    plans = {t: list(dict.fromkeys(neighbours(portable.sizes(inputs[t], layer.topk, calls[0])))) for t in tokens}
    jobs = [(layer, t, a.dtype, layout) for t in tokens for layout in plans[t]]
    failed = {(t, layout): error for (_, t, _, layout), error in zip(jobs, pool.map(compile_one, jobs), strict=True)}
    rows = []
    for t in tokens:
        x, s = inputs[t], portable.sizes(inputs[t], layer.topk, calls[0])
        routes = [bench_experts.routing(layer, t, "cuda", 1000 * t + i) for i in range(bench_experts.CALLS)]
        want: Tensor | None = None
        found = []
        for layout in plans[t]:
            if failed[t, layout] is not None or time.perf_counter() > deadline:
                print(f"{layer.name} T={t} {brief(layout)}: {failed[t, layout] or 'out of time'}", flush=True)
                continue
            got = portable.run(s, layout, x, *routes[0], calls[0]).float()
            want = got if want is None else want
            error = float((got - want).abs().max() / want.abs().max())
            us = timing.microseconds(
                lambda i, layout=layout, x=x, s=s, routes=routes: portable.run(
                    s, layout, x, *routes[i % len(routes)], calls[i % copies]
                ),
                bench_experts.CALLS,
                a.rep_ms,
            )
            found.append({"layer": layer.name, "tokens": t, "us": us, "error": error, "chosen": layout == plans[t][0]})
            found[-1]["layout"] = asdict(layout)
            found[-1]["brief"] = brief(layout)
        for row in sorted(found, key=lambda row: row["us"])[: a.show]:
            mark = " <- chosen" if row["chosen"] else ""
            wrong = " WRONG" if not row["error"] < 1e-2 else ""
            print(f"{layer.name} T={t} {row['us']:8.1f} us  {row['brief']}{mark}{wrong}", flush=True)
        mine = [row for row in found if row["chosen"]]
        print(f"{layer.name} T={t} {mine[0]['us']:8.1f} us  {mine[0]['brief']} <- chosen" if mine else "-", flush=True)
        rows += found
    return rows


def brief(layout: Layout) -> str:
    def one(t: Tile) -> str:
        return (
            f"{t.bm}x{t.bn} u{t.unroll} w{t.warps}{'k' if t.k_warps > 1 else ''} s{t.stages}{'' if t.on_sum else ' w'}"
        )

    return f"{one(layout.first)} | {one(layout.second)} | pairs {layout.pairs}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--tokens", default="1,4,16,64,256,1024,4096")
    parser.add_argument("--dtype", default="fp16", choices=sorted(DTYPES))
    parser.add_argument("--cold-mb", type=float, default=400)
    parser.add_argument("--rep-ms", type=float, default=8)
    parser.add_argument("--seconds", type=float, default=540, help="start no measurement after so long")
    parser.add_argument("--show", type=int, default=6, help="lines a point")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16))
    parser.add_argument("--out", default=os.environ.get("OUT") or ".")
    a = parser.parse_args()
    deadline = time.perf_counter() + a.seconds
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(a.workers, mp_context=context) as pool:
        for name in a.layers.split(","):
            rows += sweep(LAYERS[name], [int(t) for t in a.tokens.split(",")], a, pool, deadline)
            Path(a.out, f"sweep-experts-{a.dtype}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
