"""The portable backend: Triton kernels for every GPU that Triton serves.

Few rows of x run the fused kernel; many dequantise a bounded piece of the weight at a time and multiply it densely,
since the tensor cores are then the limit and a dense library feeds them best. :mod:`.tiles` says which.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from w4plugin.errors import UsageError
from w4plugin.kernels import device, grouping, tiles
from w4plugin.kernels.backend import Backend, Groups, Prepared, Target
from w4plugin.kernels.fragments import COLUMNS, ROWS, blocks, from_fragments, to_fragments
from w4plugin.kernels.tiles import Problem, Tile
from w4plugin.tensor import W4Tensor

OLDEST_TRITON = (3, 6)
DENSE_TILES = 4
"""Groups of 16 columns that one program of the dense path takes."""
RUN = 16
"""Rows that must share a group for a tile to take their scale at once: the K of one tensor-core instruction."""
SCRATCH = 128 * 2**20
"""Bytes of dequantised weight that the dense path holds at a time."""


# ---------------------------------------------------------------------------------------------------- choice


def why_not(target: Target, weight: W4Tensor | None) -> str | None:
    version = device.triton_version()
    if version is None:
        return "Triton is not installed"
    if device.triton_release() < OLDEST_TRITON:
        return f"Triton {version} is older than 3.6"
    if target.arch.startswith("sm_"):
        if int(target.arch[3:]) < 80:
            return f"{target.arch} is older than sm_80 and has no bfloat16 tensor cores"
    elif not target.arch.startswith("gfx") and not (target.arch == "cpu" and interpreting()):
        return f"no Triton kernels for {target.arch}"
    if target.dtype not in (torch.float16, torch.bfloat16):
        return f"activations are {_name(target.dtype)}, not float16 or bfloat16"
    if weight is not None and max(weight.K * weight.N // 8, weight.G * weight.N) >= 2**31:
        return f"K * N = {weight.K * weight.N} passes the kernels' 32-bit offsets"
    return None


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU, as the tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


# ---------------------------------------------------------------------------------------------------- order


def prepare(w: W4Tensor) -> Prepared:
    """Fragment order; rows sorted by group where that makes groups regular.

    ``g_idx`` of the result: ``[K]`` is the gather to apply to x (rows are sorted by group), ``[1, K]`` the group of
    each row (groups too irregular to form runs of a multiple of 16 rows).
    """
    found = grouping.runs(w, RUN)
    qweight, scales, zeros, g_idx, group_size = w.qweight, w.scales, w.zeros, w.g_idx, w.group_size
    if found is None:
        g_idx = w.groups().to(torch.int32)[None].contiguous()
    else:
        g_idx, group_size = None, found.size
        if found.order is not None:
            qweight, g_idx = grouping.reorder(qweight, found.order), found.order.to(torch.int32)
        if found.group is not None:
            scales = scales.index_select(0, found.group)
            zeros = None if zeros is None else zeros.index_select(0, found.group)
    same = found is not None and w.g_idx is None
    prepared = Prepared(
        backend="portable",
        qweight=to_fragments(qweight, None if zeros is None else zeros[-1]),
        scales=_aligned(scales),
        zeros=None if zeros is None else _aligned(zeros),
        g_idx=g_idx,
        counters=torch.zeros(tiles.COUNTERS, dtype=torch.int32, device=w.device),
        K=w.K,
        N=w.N,
        group_size=group_size,
        groups=None if same else Groups(w.scales, w.zeros, w.g_idx, w.group_size),
    )
    if w.device.type == "cuda":
        # A kernel launched early (Tile.pdl) reads the weight before the kernel ahead of it is known to have ended.
        torch.cuda.current_stream(w.device).synchronize()
    return prepared


def restore(p: Prepared) -> W4Tensor:
    """The weight that :func:`prepare` was given."""
    qweight = from_fragments(p.qweight, p.K, p.N)
    if p.g_idx is not None and p.g_idx.ndim == 1:
        qweight = grouping.undo(qweight, p.g_idx)
    if p.groups is None:
        return W4Tensor(qweight, p.scales, p.zeros, None, p.group_size)
    return W4Tensor(qweight, p.groups.scales, p.groups.zeros, p.groups.g_idx, p.groups.group_size)


def _aligned(t: Tensor) -> Tensor:
    """Contiguous, and at a multiple of 16 bytes as the kernels' vector loads want."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


# ---------------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything about a call that stays while shapes, dtypes and the device stay.

    Attributes:
        problem: what the tile was chosen for.
        tile: of the fused kernel; None for the dense path.
        grid: programs of the fused kernel.
        constants: its constexpr arguments, in order.
        runners: the compiled kernel by x's row stride, which Triton specialises on.
    """

    problem: Problem
    tile: Tile | None
    grid: tuple[int, int, int] = (0, 0, 0)
    constants: tuple[Any, ...] = ()
    runners: dict[int, Callable[..., None]] = field(default_factory=dict)


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
    key = key_of(x, (qweight, scales, zeros, g_idx), n, group_size, counters is None, bias is None)
    plan = _plans.get(key)
    if plan is None:
        _check(x, qweight, scales, zeros, g_idx, n, group_size)
        p = problem(x, scales, g_idx, n, group_size)
        plan = make_plan(
            p, tiles.choose(p), asym=zeros is not None, bias=bias is not None, counters=counters is not None
        )
        _plans[key] = plan
    return multiply(plan, x, qweight, scales, zeros, g_idx, counters, bias, group_size)


def key_of(x: Tensor, weight: tuple[Tensor | None, ...], *rest: Any) -> tuple[Any, ...]:
    """What a plan depends on: x, (qweight, scales, zeros, g_idx) and what else the call holds.

    All that :func:`_check` looks at is in it, since that is asked once for a key.
    """
    held = [None if t is None else (t.shape, t.dtype, t.device, t.is_contiguous()) for t in weight]
    return (x.shape, x.dtype, x.device, *rest, *held)


def problem(x: Tensor, scales: Tensor, g_idx: Tensor | None, n: int, group_size: int) -> Problem:
    """What the choice of a tile depends on."""
    m, k = x.shape
    where = device.target(x.device, x.dtype)
    group = 0 if _by_row(g_idx) or group_size >= k else group_size
    sms = device.multiprocessors(where.device)
    narrow, bfloat16 = scales.dtype == x.dtype, x.dtype == torch.bfloat16
    return Problem(max(m, 1), n, k, group, narrow, where.arch, sms, _by_row(g_idx), bfloat16)


def make_plan(p: Problem, tile: Tile | None, *, asym: bool, bias: bool, counters: bool) -> Plan:
    """A plan that runs ``tile``, or the dense path for None."""
    if tile is None:
        return Plan(p, None)
    if not counters:
        tile = replace(tile, split=1)
    grid = (blocks(p.m, tile.bm), blocks(p.n, tile.bn), tile.split)
    return Plan(p, tile, grid, tuple(constants(p, tile, asym=asym, bias=bias).values()))


def multiply(
    plan: Plan,
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    counters: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """As :func:`apply`, by a given plan."""
    n = plan.problem.n
    if not x.numel():
        return x.new_zeros((x.shape[0], n))
    if g_idx is not None and not plan.problem.by_row:
        x, g_idx = x.index_select(1, g_idx), None
    elif x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    if plan.tile is None:
        return _dense(x, qweight, scales, zeros, g_idx, bias, n, group_size)
    return _fused(plan, plan.tile, x, qweight, scales, zeros, g_idx, counters, bias)


def _by_row(g_idx: Tensor | None) -> bool:
    return g_idx is not None and g_idx.ndim == 2


def constants(p: Problem, tile: Tile, *, asym: bool, bias: bool) -> dict[str, Any]:
    """The constexpr arguments of ``matmul_kernel``, in its order."""
    return {
        "BM": tile.bm,
        "BN": tile.bn,
        "UNROLL": tile.unroll,
        "K_WARPS": tile.k_warps,
        "SPLIT": tile.split,
        "STAGES": tile.stages,
        "PREFETCH": tile.ahead,
        "PDL": tile.pdl,
        "GROUP": p.group,
        "SPAN": tiles.span(p.group, tile.unroll),
        "ASYM": asym,
        "ON_SUM": tile.on_sum,
        "BY_ROW": p.by_row,
        "AWAIT": tiles.asynchronous(p.arch) and tile.k_warps == 1,
        "BIAS": bias,
        "WHOLE_K": p.k % (ROWS * tile.unroll * tile.k_warps) == 0,
        "WHOLE_N": p.n % tile.bn == 0,
        "UNPACK": unpack_mode(p.arch),
        "KW": 2 if p.by_row else slot_width(p, tile, asym, device.triton_release()),
    }


def options(tile: Tile) -> dict[str, Any]:
    """How a tile is compiled and launched."""
    pdl = {"launch_pdl": True} if tile.pdl else {}
    return {"num_warps": tile.warps, "num_stages": tile.stages, **pdl}


def unpack_mode(arch: str) -> str:
    """How the kernels take nibbles apart: "asm", "shift", or "interpreter"."""
    if interpreting():
        return "interpreter"
    return "asm" if arch.startswith("sm_") else "shift"


def slot_width(p: Problem, tile: Tile, asym: bool, version: tuple[int, ...]) -> int:
    """K slots of a row that one thread holds side by side in the dot operand that the compiler will choose.

    Only speed hangs on it: where it is wrong, the compiler moves weights between threads (tools/cross_compile shows
    that). wgmma and tcgen05 take 2. For mma.sync Triton derives the number from the narrowest load that it sees the
    operand made of, within the loop or before it: 2 from version 3.8 on, 4 until 3.7, 8 where that is the uint8 zeros.
    """
    wide = tiles.asynchronous(p.arch) and tile.warps % 4 == 0 and tile.bn >= 64 and tile.k_warps == 1
    if wide and (tile.bm >= 16 or version >= (3, 8)):
        return 2
    if asym and (p.group == 0 or not tile.ahead):
        return 8
    return 2 if version >= (3, 8) else 4


def _fused(
    plan: Plan,
    tile: Tile,
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    rows: Tensor | None,
    counters: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    p, grid = plan.problem, plan.grid
    out = x.new_empty((p.m, p.n))
    partial = None
    if tile.split > 1:
        size = grid[0] * grid[1] * tile.split * tile.bm * tile.bn
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    else:
        counters = None
    stride = x.stride(0) // 8
    pointers = (x, qweight, scales, zeros, rows, bias, out, partial, counters)
    sizes = (p.m, p.n, p.k, scales.shape[0], stride, qweight.shape[0], qweight.shape[1])
    with device.current(x.device):
        runner = plan.runners.get(stride)
        if runner is not None:
            addresses = tuple(None if t is None else t.data_ptr() for t in pointers)
            if not any(a is not None and a % 16 for a in addresses):
                runner(*addresses, *sizes, *plan.constants)
                return out
        from w4plugin.kernels.portable_kernels import matmul_kernel

        compiled = matmul_kernel[grid](*pointers, *sizes, *plan.constants, **options(tile))
        if compiled is not None and not any(t is not None and t.data_ptr() % 16 for t in pointers):
            plan.runners[stride] = compiled[grid]  # skips Triton's binding of arguments, most of a call's time
    return out


# ---------------------------------------------------------------------------------------------------- dense


def weight_t(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    rows: Tensor | None,
    k: int,
    group_size: int,
    first: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """Columns ``first : first + columns`` of a prepared weight as rows, ``[columns, k]``; ``first`` a multiple of 16.

    Values are those of ``W4Tensor.dequantize(dtype)``, rows of W in prepared order.
    """
    from w4plugin.kernels.portable_kernels import dequantize_kernel

    out = torch.empty((columns, k), dtype=dtype, device=qweight.device)
    group = 0 if rows is not None or group_size >= k else group_size
    j = DENSE_TILES
    grid = (qweight.shape[0], blocks(columns, COLUMNS * j))
    with device.current(qweight.device):
        dequantize_kernel[grid](
            qweight, scales, zeros, rows, out, first // COLUMNS, scales.shape[1], first + columns, k, scales.shape[0],
            qweight.shape[1], j, group, tiles.span(group, 1), zeros is not None, rows is not None,
            unpack_mode(device.arch(qweight.device)), num_warps=4,
        )  # fmt: skip
    return out


def _pieces(k: int, n: int, size: int) -> list[tuple[int, int]]:
    """(first, columns) of pieces that fit SCRATCH as ``[columns, k]`` of ``size`` bytes an element."""
    most = max(COLUMNS, SCRATCH // (size * k) // 256 * 256)
    return [(first, min(most, n - first)) for first in range(0, n, most)]


def _dense(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    rows: Tensor | None,
    bias: Tensor | None,
    n: int,
    group_size: int,
) -> Tensor:
    k = x.shape[1]
    pieces = _pieces(k, n, x.element_size())
    if len(pieces) == 1:
        w = weight_t(qweight, scales, zeros, rows, k, group_size, 0, n, x.dtype)
        return torch.nn.functional.linear(x, w, bias)
    out = x.new_empty((x.shape[0], n))
    for first, columns in pieces:
        w = weight_t(qweight, scales, zeros, rows, k, group_size, first, columns, x.dtype)
        part = out[:, first : first + columns]
        if bias is None:
            torch.mm(x, w.t(), out=part)
        else:
            torch.addmm(bias[first : first + columns], x, w.t(), out=part)
    return out


def backward(
    grad: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    k: int,
    group_size: int,
) -> Tensor:
    """grad ``[M, N]`` times the transposed weight -> ``[M, K]``, pieces summed in float32."""
    rows = g_idx if _by_row(g_idx) else None
    pieces = _pieces(k, grad.shape[1], grad.element_size())
    total: Tensor | None = None
    for first, columns in pieces:
        w = weight_t(qweight, scales, zeros, rows, k, group_size, first, columns, grad.dtype)
        part = grad[:, first : first + columns] @ w
        if len(pieces) > 1:
            part = part.float()
        total = part if total is None else total.add_(part)
    assert total is not None, "a weight has columns"
    out = total.to(grad.dtype)
    if g_idx is None or rows is not None:
        return out
    return torch.empty_like(out).index_copy_(1, g_idx.long(), out)


# ---------------------------------------------------------------------------------------------------- errors


def _check(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None, n: int, group_size: int
) -> None:
    k = x.shape[1]
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise UsageError("w4a16_linear: x", got=_name(x.dtype), wanted="float16 or bfloat16")
    wanted = [blocks(k, ROWS), blocks(n, COLUMNS), 128]
    if qweight.dtype != torch.int32 or list(qweight.shape) != wanted or not qweight.is_contiguous():
        kind = "contiguous" if qweight.is_contiguous() else "strided"
        raise UsageError(
            "w4a16_linear: qweight",
            got=f"{kind} {_name(qweight.dtype)} {list(qweight.shape)}",
            wanted=f"contiguous int32 {wanted} for x [{x.shape[0]}, {k}] and n = {n}",
            todo="prepare() makes it.",
        )
    groups = scales.shape[0] if _by_row(g_idx) else blocks(k, group_size)
    if list(scales.shape) != [groups, n] or not scales.is_contiguous():
        raise UsageError(
            "w4a16_linear: scales",
            got=f"{_name(scales.dtype)} {list(scales.shape)}",
            wanted=f"contiguous {[groups, n]} for K = {k} and group_size = {group_size}",
        )
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != torch.uint8 or not zeros.is_contiguous()):
        raise UsageError(
            "w4a16_linear: zeros",
            got=f"{_name(zeros.dtype)} {list(zeros.shape)}",
            wanted=f"contiguous uint8 {list(scales.shape)}, as scales",
        )
    if g_idx is not None and (g_idx.shape[-1] != k or g_idx.dtype != torch.int32):
        raise UsageError(
            "w4a16_linear: g_idx", got=f"{_name(g_idx.dtype)} {list(g_idx.shape)}", wanted=f"int32 [{k}], K of x"
        )
    held = {"qweight": qweight, "scales": scales, "zeros": zeros, "g_idx": g_idx}
    elsewhere = {name: str(t.device) for name, t in held.items() if t is not None and t.device != x.device}
    if elsewhere:
        raise UsageError("w4a16_linear: devices", got=f"x on {x.device}, {elsewhere}", wanted="one device")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


BACKEND = Backend("portable", why_not, prepare, restore, apply, backward)
