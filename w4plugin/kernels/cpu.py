"""The CPU backend: PyTorch's own int4 product, where it loses nothing.

``aten::_weight_int4pack_mm_for_cpu`` computes x @ ((q - 8) * scale + shift) with one scale and one shift a group and
column, in the dtype of x. Ours has shift = scale * (8 - zero). What it does not demand of us to give up:

* it wants scales and shifts in x's dtype, and is fast in bfloat16 alone. They are kept as bfloat16 parts that sum to
  them exactly, one or two (float16 needs two), and bfloat16 activations are multiplied with each part. Where two do not
  suffice they are kept in float32, and activations are widened to match: never narrowed;
* in float32 it is a scalar loop. From a few rows of x on, a plain float32 piece of the weight and a matmul are faster;
* a shift that float32 cannot hold exactly (float32 scales, asymmetric) would move every weight of a group the same way,
  which no error bound on the sum forgives: such weights are refused, and the plain backend takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4plugin.errors import UsageError
from w4plugin.kernels import grouping
from w4plugin.kernels.backend import Backend, Groups, Prepared, Target
from w4plugin.packing import pack, unpack
from w4plugin.tensor import SYMMETRIC_ZERO, W4Tensor

GROUP_SIZES = (256, 128, 64, 32)
COLUMNS = 16
"""The operator takes these groups, and N in multiples of this."""

BLOCK = 64
"""Columns that PyTorch packs together, at most: cuts at multiples of it are cuts of the packed order as well."""

SCRATCH = 2**24
"""Weights made plain at a time."""

SCALAR = 256
"""A row of x costs as much in the scalar loop as this many rows in the vectorised one that makes a weight plain."""


def why_not(target: Target, weight: W4Tensor | None) -> str | None:
    if target.device.type != "cpu":
        return f"{target.device.type} is not the CPU"
    if target.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"activations are {target.dtype}, not float16, bfloat16 or float32"
    if weight is None:
        return None
    if weight.N % COLUMNS:
        return f"PyTorch's int4 product wants N % {COLUMNS} == 0, and N = {weight.N}"
    if _runs(weight) is None:
        return f"PyTorch's int4 product wants whole groups of {GROUP_SIZES} rows, not {weight.group_size} of {weight.K}"
    if not _holds(torch.float32, *_scale_and_shift(weight.scales, weight.zeros)):
        return "float32 does not hold scale * (8 - zero), which PyTorch's int4 product adds, exactly"
    return None


def _runs(w: W4Tensor) -> tuple[grouping.Runs, int] | None:
    """Runs of rows, and the operator's group size that divides them and K."""
    found = grouping.runs(w, min(GROUP_SIZES))
    if found is None:
        return None
    for size in GROUP_SIZES:
        if w.K % size == 0 and (found.size % size == 0 or found.size >= w.K):
            return found, size
    return None


def _scale_and_shift(scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor]:
    """float64 ``[G, N]``, exact."""
    wide = scales.double()
    return wide, torch.zeros_like(wide) if zeros is None else wide * (SYMMETRIC_ZERO - zeros.double())


def _holds(dtype: torch.dtype, *values: Tensor) -> bool:
    return all(torch.equal(v.to(dtype).double(), v) for v in values)


def prepare(w: W4Tensor) -> Prepared:
    """PyTorch's packed order; ``scales`` holds :func:`_parts` of (scale, shift), ``g_idx`` the gather of x."""
    found = _runs(w)
    assert found is not None, "prepare() asks why_not() first"
    runs, size = found
    codes = unpack(w.qweight, 0)
    if runs.order is not None:
        codes = codes.index_select(0, runs.order)
    scale, shift = _scale_and_shift(w.scales, w.zeros)
    run = torch.arange(0, w.K, size) // runs.size
    group = run if runs.group is None else runs.group[run]
    return Prepared(
        backend="cpu",
        qweight=torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.t().to(torch.int32).contiguous(), 1),
        scales=_parts(scale.index_select(0, group), shift.index_select(0, group)),
        zeros=None,
        g_idx=None if runs.order is None else runs.order.to(torch.int32),
        counters=None,
        K=w.K,
        N=w.N,
        group_size=size,
        groups=Groups(w.scales, w.zeros, w.g_idx, w.group_size),
    )


def _parts(scale: Tensor, shift: Tensor) -> Tensor:
    """float64 scales and shifts ``[G', N]`` -> pairs ``[G', N, 2]`` in bfloat16, or ``[2, G', N, 2]`` bfloat16 that sum
    to them, or float32 ``[G', N, 2]``.

    A part is cut so short that its own shift, part * (8 - zero), is a bfloat16 too. So a weight of 0 is 0 in either
    part, and what rounding the two products costs is relative to the weights, as it is with one.
    """
    pairs = torch.stack([scale, shift], -1)
    if _holds(torch.bfloat16, pairs):
        return pairs.to(torch.bfloat16)
    high = _rounded(scale, 5 if bool(shift.any()) else 8)
    low = scale - high
    steps = torch.where(scale == 0, torch.zeros_like(shift), shift / scale)  # 8 - zero, exact: it was multiplied in
    parts = torch.stack([torch.stack([part, part * steps], -1) for part in (high, low)])
    return parts.to(torch.bfloat16) if _holds(torch.bfloat16, parts) else pairs.to(torch.float32)


def _rounded(values: Tensor, bits: int) -> Tensor:
    """To ``bits`` bits of significand; what is left of 11 bits has 5 after 5, and less after 8."""
    significand, exponent = torch.frexp(values)
    return torch.ldexp(torch.round(significand * 2**bits), exponent - bits)


def _whole(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """(scale, shift) ``[G', N, 2]`` in a dtype that holds the sum of the parts."""
    return scales.to(dtype).sum(0) if scales.ndim == 4 else scales.to(dtype)


def restore(p: Prepared) -> W4Tensor:
    """The weight that :func:`prepare` was given."""
    assert p.groups is not None, "prepare() keeps the groups"
    qweight = pack(_codes(p.qweight, p.K, p.N, p.group_size), 0)
    if p.g_idx is not None:
        qweight = grouping.undo(qweight, p.g_idx)
    return W4Tensor(qweight, p.groups.scales, p.groups.zeros, p.groups.g_idx, p.groups.group_size)


def _codes(qweight: Tensor, k: int, n: int, group_size: int) -> Tensor:
    """uint8 ``[K, N]`` out of PyTorch's packed order, which depends on the machine: the identity times codes.

    (q - 8) * 1 + 8 is an integer of at most 15 at every step, which bfloat16 holds.
    """
    identity = torch.eye(k, dtype=torch.bfloat16)
    pairs = torch.tensor([1.0, 8.0], dtype=torch.bfloat16).expand(k // group_size, n, 2).contiguous()
    codes: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(identity, qweight, group_size, pairs)
    return codes.to(torch.uint8)


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
    """x ``[M, K]`` times a prepared weight -> ``[M, n]``, computed in x's dtype or wider."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise UsageError("w4a16_linear: x", got=str(x.dtype), wanted="float16, bfloat16 or float32")
    if scales.ndim > 4 or tuple(scales.shape[-3:]) != (x.shape[1] // group_size, n, 2) or x.shape[1] % group_size:
        raise UsageError(
            "w4a16_linear: scales",
            got=f"{list(scales.shape)} for x {list(x.shape)}, n = {n}, group_size = {group_size}",
            wanted="(scale, shift) [K / group_size, n, 2], as prepare() makes them",
        )
    dtype = x.dtype
    if g_idx is not None:
        x = x.index_select(1, g_idx)
    x = x.contiguous()
    if dtype == torch.bfloat16 == scales.dtype:
        high, *low = scales.unbind(0) if scales.ndim == 4 else (scales,)
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, qweight, group_size, high)
        for part in low:
            more = torch.ops.aten._weight_int4pack_mm_for_cpu(x, qweight, group_size, part)
            out = torch.where(out.isfinite(), out.float() + more.float(), out)  # infinity - infinity is no infinity
    elif x.shape[0] * SCALAR < x.shape[1]:
        whole = _whole(scales, torch.float32)
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(x.float(), qweight, group_size, whole)
    else:
        out = _dense(x.float(), qweight, _whole(scales, torch.float32), n, group_size)
    if bias is not None:
        out = out.float() + bias.float()
    return out.to(dtype)


def _dense(x: Tensor, qweight: Tensor, scales: Tensor, n: int, group_size: int) -> Tensor:
    """float32 x ``[M, K]`` times the weight, made plain a piece at a time -> float32 ``[M, n]``."""
    k = x.shape[1]
    out = x.new_empty((x.shape[0], n))
    step = max(BLOCK, SCRATCH // k // BLOCK * BLOCK)
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        pairs = scales[:, part].unsqueeze(1)
        weight = _codes(qweight[part], k, part.stop - start, group_size).float().unflatten(0, (-1, group_size))
        weight = (weight - SYMMETRIC_ZERO).mul_(pairs[..., 0]).add_(pairs[..., 1])
        torch.mm(x, weight.flatten(0, 1), out=out[:, part])
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
    """grad ``[M, N]`` times the transposed weight -> ``[M, K]``."""
    wide = _whole(scales, torch.float64).repeat_interleave(group_size, 0)
    codes = _codes(qweight, k, grad.shape[1], group_size).double()
    weight = ((codes - SYMMETRIC_ZERO) * wide[..., 0] + wide[..., 1]).to(grad.dtype)
    out = grad @ weight.t()
    return out if g_idx is None else torch.empty_like(out).index_copy_(1, g_idx.long(), out)


BACKEND = Backend("cpu", why_not, prepare, restore, apply, backward)
