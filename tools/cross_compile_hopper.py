"""The Hopper kernels for :mod:`cross_compile`: every tile that can be chosen, compiled for sm_90 without a GPU."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from w4plugin.kernels import hopper, hopper_requests, hopper_tiles
from w4plugin.kernels.hopper_tiles import Tile
from w4plugin.kernels.tiles import BUCKETS, Problem

SHAPES = ((4096, 4096), (4096, 28672), (14336, 4096), (8192, 57344), (28672, 8192))
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Variant:
    """One compilation of a Hopper kernel."""

    tile: Tile
    group: int = 128
    dtype: torch.dtype = torch.float16
    scales: torch.dtype = torch.float16
    asym: bool = False
    m: int = 0
    k: int = 4096

    @property
    def rows(self) -> int:
        """Of x; a whole tile's where none are given."""
        return self.m or self.tile.bm


def variants() -> Iterator[Variant]:
    """Each tile in float16 symmetric and bfloat16 asymmetric; one of each kernel with every kind of group and scale."""
    rows = (*BUCKETS, 640, 96, 160, 192)  # and where 128 rows at a time leave fewer over than 256, or two parts do
    problems = (Problem(m, n, k, 128, True, "sm_90", 132) for (k, n), m in itertools.product(SHAPES, rows))
    choices = (
        (hopper_tiles.choose(p), hopper_tiles.choose(replace(p, bfloat16=True)), hopper_tiles.by_rule(p))
        for p in problems
    )
    chosen = (tile for each in choices for tile in each if tile is not None)
    # what a launch alone depends on makes no other code; of pipelines the deepest needs the most shared memory
    tiles = list(
        {replace(t, stages=0, resident=0, programs=0): t for t in sorted(chosen, key=lambda t: t.stages)}.values()
    )
    for tile in tiles:
        yield Variant(tile)
        yield Variant(tile, dtype=torch.bfloat16, scales=torch.bfloat16, asym=True)
        if tile.bm == 8:  # of one row that is all that is loaded
            yield Variant(tile, m=1)
            yield Variant(tile, dtype=torch.bfloat16, scales=torch.bfloat16, asym=True, m=1)
        more = tile.bm + 1  # rows that are no whole tiles; and half a chunk at the end of K, where no tile is shared
        if hopper_requests.edges(tile, Problem(more, 4096, 4096, 128, True, "sm_90", 132), shared=False)[1]:
            yield Variant(tile, m=more)
        if tile.kind == "wide" and not tile.on_sum:
            whole = replace(_fitting(tile, 64), programs=1)
            yield Variant(whole, 64, torch.bfloat16, torch.bfloat16, asym=True, m=more, k=4160)
    # with each kind of group: each kernel, the largest tiles, one in two parts, one whose scales meet the sums
    sizes = ((128, 256), (256, 128), (192, 128))
    for largest in (next(t for t in tiles if (t.bm, t.bn) == size and not t.on_sum) for size in sizes):
        for group in (32, 64, 256, 0):
            yield Variant(_fitting(largest, group), group, asym=True)
    for kind in ("narrow", "wide"):
        tile = next(t for t in tiles if t.kind == kind and t.on_sum and t.bm != 16)  # scales of every dtype
        for group in (32, 64, 256, 0):
            yield Variant(_fitting(tile, group), group, asym=True)
            if kind == "narrow":
                yield Variant(_fitting(tile, group), group, asym=True, m=1)
        yield Variant(tile, dtype=torch.bfloat16, scales=torch.float32)


def _fitting(tile: Tile, group: int) -> Tile:
    fitting = hopper_tiles.legal(tile, Problem(tile.bm, 4096, 4096, group, True, "sm_90", 132))
    assert fitting is not None
    return fitting


def compile_variant(v: Variant) -> Any:
    """The compiled kernel, from the very plan that a call would make."""
    p = Problem(v.rows, 4096, v.k, v.group, v.dtype == v.scales, "sm_90", 132)
    plan = hopper.make_plan(v.tile, p, v.scales, v.asym, True)
    names = plan.kernel.arg_names
    kinds = (NAMES[v.dtype], "i32", NAMES[v.scales], "u8" if v.asym else NAMES[v.scales], NAMES[v.dtype])
    arguments = [
        f"tensordesc<{kind}[{','.join(map(str, box))}],{layout!r}>"
        for kind, (box, layout) in zip(kinds[: len(plan.layouts)], plan.layouts, strict=True)
    ]
    arguments += [f"*{NAMES[v.dtype]}", f"*{NAMES[v.dtype]}", "*fp32", "*i32", *(["i32"] * len(plan.sizes))]
    signature = dict(zip(names, arguments + ["constexpr"] * len(plan.constants), strict=True))
    constants = {(len(arguments) + i,): value for i, value in enumerate(plan.constants)}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (name == "N" and v.tile.kind == "wide")
    }
    source = GluonASTSource(plan.kernel, signature, constants, attributes)
    options = {key: plan.options[key] for key in ("num_warps", "maxnreg")}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def serialized(compiled: Any) -> int:
    """How often ptxas says that it makes wgmma wait for itself (C7510 and what follows), which costs half the speed."""
    from triton.backends.nvidia.compiler import get_ptxas  # 3.9 brings two assemblers and takes the newer from sm_90 on

    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return said.count("(C751")
