"""The Hopper backend: Gluon kernels for sm_90 on the prepared order of the portable backend.

One prepared weight serves decode, prefill and the dense path. The kernels want groups of 32, 64 or a multiple of 128
rows, or one group; what does not fit is the portable backend's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from w4plugin.kernels import device, grouping, hopper_launch, hopper_requests, hopper_tiles, portable
from w4plugin.kernels.backend import Backend, Prepared, Target
from w4plugin.kernels.fragments import COLUMNS, ROWS, WORDS
from w4plugin.kernels.hopper_launch import View
from w4plugin.kernels.hopper_tiles import CHUNK, Tile
from w4plugin.kernels.tiles import Problem
from w4plugin.tensor import W4Tensor

RUN = 32
"""Shortest group that the kernels can cut a chunk into."""


def why_not(target: Target, weight: W4Tensor | None) -> str | None:
    if target.arch != "sm_90":
        return f"written for sm_90, not {target.arch}"
    reason = portable.why_not(target, weight) or _gluon()
    if reason is not None or weight is None:
        return reason
    if weight.N % COLUMNS:
        return f"N = {weight.N} is not a multiple of {COLUMNS}, at which TMA can start a row of scales and zeros"
    found = grouping.runs(weight, RUN)
    if found is None or not fits(found.size, weight.K):
        size = weight.group_size if found is None else found.size
        return f"groups of {size} rows, not 32, 64, a multiple of 128, or one group"
    return None


def fits(group_size: int, k: int) -> bool:
    """Whether the kernels can cut K into such groups."""
    return group_size >= k or group_size in (32, 64) or group_size % CHUNK == 0


def _gluon() -> str | None:
    try:
        from w4plugin.kernels import hopper_kernels  # noqa: F401
    except (ImportError, AttributeError) as e:
        return f"Triton {device.triton_version()} has another Gluon than this version knows ({e})"
    return None


def prepare(w: W4Tensor) -> Prepared:
    """Fragment order; rows sorted by group where act-order needs it. Counters are one for each warp of each program."""
    p = portable.prepare(w)
    counters = hopper_tiles.COUNTERS * device.multiprocessors(w.device)
    return replace(p, backend="hopper", counters=torch.zeros(counters, dtype=torch.int32, device=w.device))


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything about a call that stays while shapes, dtypes and the device stay.

    Attributes:
        tile: None for the dense path.
        kernel: the Gluon kernel.
        grid: its programs.
        sizes, constants, options: its arguments after the pointers.
        layouts: of the descriptors of x, words, scales and zeros, with their boxes.
        share: float32 elements of the partial sums of all programs; 0 where no tile is shared.
        weights: what a launch takes for words, scales and zeros, by their addresses: a model's layers of one shape
            share a plan.
        launch: of the compiled kernel once there is one.
    """

    tile: Tile | None
    kernel: Any = None
    grid: tuple[int, int, int] = (0, 0, 0)
    sizes: tuple[int, ...] = ()
    constants: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[tuple[list[int], Any], ...] = ()
    share: int = 0
    weights: dict[tuple[int, ...], tuple[Any, ...]] = field(default_factory=dict)
    launch: list[hopper_launch.Bound | hopper_launch.Direct] = field(default_factory=list)


_plans: dict[tuple[Any, ...], Plan] = {}


def apply(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    counters: Tensor | None,
    bias: Tensor | None,
    n: int,
    group_size: int,
) -> Tensor:
    """x ``[M, K]`` float16 or bfloat16 times a prepared weight -> ``[M, n]``."""
    key = portable.key_of(x, (qweight, scales, zeros, g_idx), n, group_size, counters is None, bias is None)
    plan = _plans.get(key)
    if plan is None:
        portable._check(x, qweight, scales, zeros, g_idx, n, group_size)
        problem = portable.problem(x, scales, None, n, group_size)
        tile = hopper_tiles.choose(problem) if counters is not None else None
        plan = make_plan(tile, problem, scales.dtype, zeros is not None, bias is not None)
        _plans[key] = plan
    return multiply(plan, x, qweight, scales, zeros, g_idx, counters, bias, n, group_size)


def make_plan(tile: Tile | None, p: Problem, scale_dtype: torch.dtype, asym: bool, bias: bool) -> Plan:
    """A plan that runs ``tile``, or the dense path for None."""
    if tile is None:
        return Plan(None)
    from triton.experimental.gluon import language as gl

    from w4plugin.kernels import hopper_kernels as kernels

    groups, chunks_a_group = _groups(p.group)
    steps = hopper_tiles.steps(tile, p)
    tiles_m = -(-p.m // tile.bm)
    tiles_n = -(-p.n // tile.bn)
    tiles = tiles_n * tiles_m
    programs = min(hopper_tiles.programs(tile, p), tiles * steps)
    waves, sharing = hopper_tiles.division(tiles, programs, steps, even=not tile.on_sum)
    total = (tiles - waves * programs) * steps
    tail, part = hopper_requests.edges(tile, p, shared=total > 0)
    first, rest = hopper_tiles.two_parts(tile.bm)
    if rest and not part:
        raise ValueError(f"x of {p.m} rows for a tile of {first} and {rest}: it takes {rest} rows at least")
    # a stage's scales in one box; where chunks share a group, one by one
    rows = groups * tile.unroll if chunks_a_group == 1 else 1

    def flat(bits: int, rank: int) -> Any:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=rank)

    one = hopper_requests.one_row(tile, p)
    x_box = [1, part, ROWS] if part else [2 * tile.unroll, 1 if one else tile.bm, ROWS]
    x_layout = flat(16, 3) if one else gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    scales = ([rows, tile.bn], flat(8 * scale_dtype.itemsize, 2))
    layouts: tuple[tuple[list[int], Any], ...] = (
        (x_box, x_layout),
        ([1 if tail else 2 * tile.unroll, tile.bn // COLUMNS, WORDS], flat(32, 3)),
        scales,
        ([rows, max(tile.bn, 128)], flat(8, 2)) if asym else scales,  # TMA writes at multiples of 128 bytes
    )
    if tile.kind == "wide":
        out = ([tile.bm, tile.bn], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
        layouts += (out if tile.staged else layouts[0],)
    return Plan(
        tile=tile,
        kernel=kernels.narrow_kernel if tile.kind == "narrow" else kernels.wide_kernel,
        grid=(programs, 1, 1),
        sizes=(p.m, p.n, steps, total, waves, sharing, tiles_m, tiles_n, hopper_tiles.BAND // tile.bm, chunks_a_group),
        constants=(
            first,
            tile.bn,
            tile.depth,
            tile.stages,
            tile.warps,
            groups,
            asym,
            bias,
            True,
            not tile.on_sum,
            *([tile.staged, part, tail, rest] if tile.kind == "wide" else [one]),
        ),
        options={"num_warps": tile.warps, "maxnreg": tile.registers, "launch_pdl": True},
        layouts=layouts,
        share=2 * programs * tile.bm * tile.bn if total else 0,
    )


def _groups(group: int) -> tuple[int, int]:
    """(groups in a chunk, chunks in a group); ``group`` 0 is one group for all of K."""
    if group == 0:
        return 1, 2**30
    return (CHUNK // group, 1) if group < CHUNK else (1, group // CHUNK)


def multiply(
    plan: Plan,
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    counters: Tensor | None,
    bias: Tensor | None,
    n: int,
    group_size: int,
) -> Tensor:
    """As :func:`apply`, by a given plan."""
    m, k = x.shape
    if not x.numel():
        return x.new_zeros((m, n))
    if g_idx is not None:
        x = x.index_select(1, g_idx)
    elif x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    if plan.tile is not None and k % ROWS:
        x = torch.nn.functional.pad(x, (0, -k % ROWS))
    if plan.tile is None:
        return portable._dense(x, qweight, scales, zeros, None, bias, n, group_size)
    out = x.new_empty((m, n))
    partial = x.new_empty(plan.share, dtype=torch.float32) if plan.share else None
    x_view = View(x.data_ptr(), (x.shape[1] // ROWS, m, ROWS), (ROWS, x.stride(0) if m > 1 else x.shape[1], 1))
    # where the tile is sent; the kernels with wgmma take a descriptor for it that others fill with x's
    after = (View(out.data_ptr(), (m, n), (n, 1)) if plan.tile.staged else x_view,) if plan.tile.kind == "wide" else ()
    aligned = bias is None or bias.data_ptr() % 16 == 0  # what a kept kernel was compiled for
    where = x.device
    with device.current(where):
        if aligned and plan.launch and not hopper_launch.watched():
            launch = plan.launch[0]
            addresses = (qweight.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr())
            weight = plan.weights.get(addresses)
            if weight is None:
                if len(plan.weights) > 4096:  # weights that came and went
                    plan.weights.clear()
                weight = plan.weights[addresses] = launch.weight(_weight_views(qweight, scales, zeros))
            pointers = (
                (out if bias is None else bias).data_ptr(), out.data_ptr(),
                None if partial is None else partial.data_ptr(), counters.data_ptr(),  # type: ignore[union-attr]
            )  # fmt: skip
            launch(where.index, x_view, weight, after, (*pointers, *plan.sizes, *plan.constants))
            return out
        tensors = [x, qweight, scales, scales if zeros is None else zeros]
        if after:
            tensors.append(out if plan.tile.staged else x)
        compiled = plan.kernel[plan.grid](
            *_descriptors(plan, (x_view, *_weight_views(qweight, scales, zeros), *after), tensors),
            out if bias is None else bias,
            out,
            x.new_empty(1, dtype=torch.float32) if partial is None else partial,
            counters,
            *plan.sizes,
            *plan.constants,
            **plan.options,
        )
        if aligned and not plan.launch:
            # skips Triton's binding of arguments, most of a call's time
            plan.launch.append(hopper_launch.of(compiled, plan.grid))
    return out


def _weight_views(qweight: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[View, ...]:
    groups, n = scales.shape
    row = WORDS * (n // COLUMNS)
    return (
        View(qweight.data_ptr(), (qweight.numel() // row, n // COLUMNS, WORDS), (row, WORDS, 1)),
        View(scales.data_ptr(), (groups, n), (n, 1)),
        View((scales if zeros is None else zeros).data_ptr(), (groups, n), (n, 1)),
    )


def _descriptors(plan: Plan, views: tuple[View, ...], tensors: list[Tensor]) -> list[Any]:
    """What Triton wants on the first call of a kernel, when it derives the kernel's types."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return [
        TensorDescriptor(tensor, list(view.shape), list(view.strides), box, layout)
        for tensor, view, (box, layout) in zip(tensors, views, plan.layouts, strict=True)
    ]


BACKEND = Backend("hopper", why_not, prepare, portable.restore, apply, portable.backward)
