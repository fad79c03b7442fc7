"""Experts on the CPU: PyTorch's own int4 product, one call for each expert that tokens reached.

What :mod:`w4plugin.kernels.cpu` says of a weight holds for every expert of a stack; scales are brought to one form for
all of them. bfloat16 results are rounded to bfloat16 before routing weights multiply them, as that operator gives
them; others stay float32 until the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4plugin.kernels import cpu
from w4plugin.kernels.backend import Groups, Target
from w4plugin.kernels.moe import plain
from w4plugin.kernels.moe.backend import Call, ExpertsBackend, Kept, PreparedExperts
from w4plugin.packing import pack
from w4plugin.tensor import W4Tensor


def why_not(target: Target, weights: tuple[W4Tensor, W4Tensor] | None) -> str | None:
    against = cpu.why_not(target, None)
    if against is not None or weights is None:
        return against
    for w in weights:
        each = [w.expert(e) for e in range(w.qweight.shape[0])]
        for e, one in enumerate(each):
            against = cpu.why_not(target, one)
            if against is not None:
                return f"expert {e}: {against}"
        sizes = {found[1] for one in each if (found := cpu._runs(one)) is not None}
        if len(sizes) != 1:
            return f"experts' groups come to runs of {sorted(sizes)} rows, not of one size"
    return None


def prepare(gate_up: W4Tensor, down: W4Tensor, gated: bool) -> PreparedExperts:
    """PyTorch's packed order of every expert; scales are ``[E, G, N, 2]``, or ``[E, 2, G, N, 2]`` in two parts."""
    (up, up_scales, up_order, up_size), (dn, dn_scales, dn_order, dn_size) = _stack(gate_up), _stack(down)
    return PreparedExperts(
        backend="cpu",
        gate_up=up,
        gate_up_scales=up_scales,
        gate_up_zeros=None,
        gate_up_g_idx=up_order,
        down=dn,
        down_scales=dn_scales,
        down_zeros=None,
        down_g_idx=dn_order,
        E=down.qweight.shape[0],
        H=gate_up.K,
        I=down.K,
        gate_up_group_size=up_size,
        down_group_size=dn_size,
        gated=gated,
        kept=Kept(_groups(gate_up), _groups(down), None, None),
    )


def _groups(w: W4Tensor) -> Groups:
    return Groups(w.scales, w.zeros, w.g_idx, w.group_size)


def _stack(w: W4Tensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """(words, scales, order of rows ``[E, K]`` or None, rows in a group)."""
    each = [cpu.prepare(w.expert(e)) for e in range(w.qweight.shape[0])]
    whole = torch.stack([cpu._whole(p.scales, torch.float64) for p in each])  # as _parts was given them
    scales = cpu._parts(*whole.unbind(-1))
    if scales.ndim == 5:
        scales = scales.transpose(0, 1).contiguous()
    order = None
    if any(p.g_idx is not None for p in each):
        natural = torch.arange(w.K, dtype=torch.int32)
        order = torch.stack([natural if p.g_idx is None else p.g_idx for p in each])
    return torch.stack([p.qweight for p in each]), scales, order, each[0].group_size


def restore(p: PreparedExperts) -> tuple[W4Tensor, W4Tensor]:
    """The weights that :func:`prepare` was given."""
    assert p.kept is not None, "prepare() keeps the groups"
    assert p.kept.gate_up is not None
    assert p.kept.down is not None
    n = p.I * (2 if p.gated else 1)
    return (
        _sequential(p.gate_up, p.gate_up_g_idx, p.H, n, p.gate_up_group_size, p.kept.gate_up),
        _sequential(p.down, p.down_g_idx, p.I, p.H, p.down_group_size, p.kept.down),
    )


def _sequential(words: Tensor, order: Tensor | None, k: int, n: int, size: int, groups: Groups) -> W4Tensor:
    out = []
    for e in range(words.shape[0]):
        codes = cpu._codes(words[e], k, n, size)
        if order is not None:
            codes = torch.empty_like(codes).index_copy_(0, order[e].long(), codes)
        out.append(pack(codes, 0))
    return W4Tensor(torch.stack(out), groups.scales, groups.zeros, groups.g_idx, groups.group_size)


def apply(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, call: Call) -> Tensor:
    """x ``[T, H]`` through its experts -> ``[T, H]``; see :func:`w4plugin.kernels.moe.plain.run`."""
    return plain.run(x, topk_weights, topk_ids, call, _product, call.down_scales.shape[-2])


def _product(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    n = scales.shape[-2]
    if dtype == torch.bfloat16:  # the fast form of the operator
        x = x.to(dtype)
    return cpu.apply(x, qweight, scales, zeros, g_idx, None, None, n, group_size).float()


BACKEND = ExpertsBackend("cpu", why_not, prepare, restore, apply)
