"""The readable twin: one expert at a time is made plain in float32, and rounding is left to the last step.

On the CPU only the experts that tokens reached are touched. Elsewhere nothing may ask the host which those are, so
every expert sees every token and what it was not asked for is dropped: a way to run, not a fast one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from w4plugin.errors import UsageError
from w4plugin.kernels import plain
from w4plugin.kernels.backend import Target
from w4plugin.kernels.moe.backend import Call, ExpertsBackend, PreparedExperts, activate
from w4plugin.tensor import W4Tensor

Product = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", int, torch.dtype], Tensor]
"""(float32 x ``[c, K]``, one expert's words, scales, zeros, g_idx, group_size, dtype of the call) -> float32 [c, N]."""


def why_not(target: Target, weights: tuple[W4Tensor, W4Tensor] | None) -> str | None:
    if target.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"activations are {target.dtype}, not float16, bfloat16 or float32"
    return None


def prepare(gate_up: W4Tensor, down: W4Tensor, gated: bool) -> PreparedExperts:
    """The sequential order itself; ``g_idx`` is the group of each row."""
    return PreparedExperts(
        backend="plain",
        gate_up=gate_up.qweight,
        gate_up_scales=gate_up.scales,
        gate_up_zeros=gate_up.zeros,
        gate_up_g_idx=gate_up.g_idx,
        down=down.qweight,
        down_scales=down.scales,
        down_zeros=down.zeros,
        down_g_idx=down.g_idx,
        E=down.qweight.shape[0],
        H=gate_up.K,
        I=down.K,
        gate_up_group_size=gate_up.group_size,
        down_group_size=down.group_size,
        gated=gated,
    )


def restore(p: PreparedExperts) -> tuple[W4Tensor, W4Tensor]:
    """The weights that :func:`prepare` was given."""
    return (
        W4Tensor(p.gate_up, p.gate_up_scales, p.gate_up_zeros, p.gate_up_g_idx, p.gate_up_group_size),
        W4Tensor(p.down, p.down_scales, p.down_zeros, p.down_g_idx, p.down_group_size),
    )


def apply(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, call: Call) -> Tensor:
    """x ``[T, H]`` through its experts -> ``[T, H]``, float32 until the end."""
    return run(x, topk_weights, topk_ids, call, _product, 8 * call.gate_up.shape[1])


def run(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, call: Call, product: Product, hidden: int) -> Tensor:
    """As :func:`apply`, with any way to multiply with one expert's weights, which take ``hidden`` features.

    Raises:
        UsageError: x has other features; or, on the CPU, an id outside of the model's experts (-1 means no expert).
    """
    if x.shape[1] != hidden:
        raise UsageError("w4a16_experts: x", got=f"{list(x.shape)}", wanted=f"[T, {hidden}], H of the experts")
    experts = call.down.shape[0]
    local = _local(topk_ids, call.expert_map, experts)
    wide, factor = x.float(), topk_weights.float()
    rows = torch.zeros(*local.shape, x.shape[1], dtype=torch.float32, device=x.device)
    reached = torch.unique(local).tolist() if x.device.type == "cpu" else range(experts)
    for e in reached:
        if e < 0:
            continue
        if x.device.type == "cpu":
            token, slot = (local == e).nonzero(as_tuple=True)
            rows[token, slot] = _expert(e, wide[token], factor[token, slot], call, product, x.dtype)
        else:
            here = local == e
            share = torch.where(here, factor, 0).sum(1)  # a router names an expert once a token
            rows = torch.where(here[..., None], _expert(e, wide, share, call, product, x.dtype)[:, None], rows)
    return rows.sum(1).to(x.dtype)


def _local(ids: Tensor, expert_map: Tensor | None, experts: int) -> Tensor:
    """int64 ``[T, topk]``: the place of each id here, -1 for absent ones."""
    ids = ids.long()
    known = experts if expert_map is None else expert_map.shape[0]
    if ids.device.type == "cpu" and ids.numel() and not bool(((ids >= -1) & (ids < known)).all()):
        bad = ids[(ids < -1) | (ids >= known)]
        raise UsageError(
            "w4a16_experts: topk_ids", got=f"expert {int(bad[0])}", wanted=f"0..{known - 1}, or -1 for none"
        )
    inside = (ids >= 0) & (ids < known)
    if expert_map is not None:
        ids = expert_map.long()[ids.clamp(0, known - 1)]
        inside &= (ids >= 0) & (ids < experts)
    return torch.where(inside, ids, -1)


def _expert(e: int, x: Tensor, factor: Tensor, call: Call, product: Product, dtype: torch.dtype) -> Tensor:
    """float32 x ``[c, H]`` through expert e, times the routing weights ``[c]``."""
    h = product(
        x, call.gate_up[e], call.gate_up_scales[e], _of(call.gate_up_zeros, e), _of(call.gate_up_g_idx, e),
        call.gate_up_group_size, dtype,
    )  # fmt: skip
    if call.weight_on_input:
        h = h * factor[:, None]
    y = product(
        activate(h, call.activation, call.gated), call.down[e], call.down_scales[e], _of(call.down_zeros, e),
        _of(call.down_g_idx, e), call.down_group_size, dtype,
    )  # fmt: skip
    return y if call.weight_on_input else y * factor[:, None]


def _of(stack: Tensor | None, e: int) -> Tensor | None:
    return None if stack is None else stack[e]


def _product(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """float32 ``[c, K]`` times a sequential weight -> float32 ``[c, N]``."""
    return plain.apply(x, qweight, scales, zeros, g_idx, None, None, qweight.shape[1], group_size)


BACKEND = ExpertsBackend("plain", why_not, prepare, restore, apply)
