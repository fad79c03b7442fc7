"""``torch.ops.w4plugin.w4a16_experts``: a whole layer of routed experts as one operator.

    y[t] = sum_j weight[t, j] * (activation(x[t] W_gate[e]) * (x[t] W_up[e])) W_down[e]        e = topk_ids[t, j]

Sums are float32 and added in the order j = 0, 1, ..., whatever order tokens were worked off in. An id of -1, one that
``expert_map`` sends to -1, and, where nothing may ask the host, one outside of the model's experts add nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from w4plugin.errors import UnsupportedError, UsageError
from w4plugin.kernels.backend import Target
from w4plugin.kernels.device import target
from w4plugin.kernels.moe import cpu, plain, portable
from w4plugin.kernels.moe.backend import GATED, PLAIN, Call, ExpertsBackend, PreparedExperts
from w4plugin.tensor import W4Tensor

EXPERTS_BACKENDS: tuple[ExpertsBackend, ...] = (cpu.BACKEND, portable.BACKEND, plain.BACKEND)
"""The first that gives no reason against itself is taken."""

SCHEMA = (
    "w4a16_experts(Tensor x, Tensor topk_weights, Tensor topk_ids,"
    " Tensor gate_up, Tensor gate_up_scales, Tensor? gate_up_zeros, Tensor? gate_up_g_idx,"
    " Tensor down, Tensor down_scales, Tensor? down_zeros, Tensor? down_g_idx, Tensor? expert_map,"
    " int inner, int gate_up_group_size, int down_group_size, bool gated, str activation,"
    " bool apply_router_weight_on_input, str backend) -> Tensor"
)


def experts_reasons(where: Target, weights: tuple[W4Tensor, W4Tensor] | None = None) -> dict[str, str | None]:
    """Each backend's own word on why it cannot run these experts here; None where it can."""
    return {b.name: b.why_not(where, weights) for b in EXPERTS_BACKENDS}


def prepare_experts(
    gate_up: W4Tensor | tuple[W4Tensor, W4Tensor],
    down: W4Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    backend: str | None = None,
    gated: bool = True,
) -> PreparedExperts:
    """Put a layer's experts into the order of the backend that will run them.

    Args:
        gate_up: the first product's weights, E leading: K = H, N = 2 I with the gate's columns first (N = I without a
            gate). Two stacks (gate, up) are laid side by side.
        down: the second product's, E leading: K = I, N = H.
        dtype: of the activations to come.
        device: where to run; None means where the weights are.
        backend: a backend's name; None means the first that fits.
        gated: whether there is a gate.

    Raises:
        UsageError: a weight is no stack, or sizes do not belong together.
        UnsupportedError: gate and up cannot be one stack (their g_idx differ), or no backend fits; the message holds
            each one's own reason.
    """
    if not isinstance(gate_up, W4Tensor):
        gate_up = _side_by_side(*gate_up)
    _check_weights(gate_up, down, gated)
    where = target(device or gate_up.device, dtype)
    asked = EXPERTS_BACKENDS if backend is None else (_get(backend),)
    against = {b.name: b.why_not(where, (gate_up, down)) for b in asked}
    for b in asked:
        if against[b.name] is None:
            return b.prepare(gate_up.to(where.device), down.to(where.device), gated)
    what = (
        f"{gate_up.experts} experts, {where.arch}, {str(dtype).removeprefix('torch.')}, H = {gate_up.K}, I = {down.K}"
    )
    raise UnsupportedError(what, got="; ".join(f"{k}: {v}" for k, v in against.items()), wanted="a backend that fits")


def restore_experts(prepared: PreparedExperts) -> tuple[W4Tensor, W4Tensor]:
    """The (gate_up, down) that :func:`prepare_experts` was given, bit for bit."""
    return _get(prepared.backend).restore(prepared)


def experts(
    x: Tensor,
    weights: PreparedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """x ``[T, H]`` through the experts that its router chose -> ``[T, H]`` in x's dtype.

    Args:
        x: float16 or bfloat16 (float32 with the plain backend).
        weights: from :func:`prepare_experts`.
        topk_weights: float32 ``[T, topk]``.
        topk_ids: int32 or int64 ``[T, topk]``; -1 is no expert. An id past the model's experts is an error on the CPU
            and no expert on a GPU, where asking would make the host wait. A row names an expert at most once.
        expert_map: int32 ``[experts of the model]``, the place of each here or -1; None means all are here.
        activation: "silu", "gelu" (erf) or "gelu_tanh"; without a gate also "relu2".
        apply_router_weight_on_input: multiply x by its routing weight instead of the result.

    Raises:
        UsageError: shapes, dtypes, devices or the activation do not fit.
    """
    p = weights
    if x.shape[-1] != p.H:
        raise UsageError("w4a16_experts: x", got=_what(x), wanted=f"[T, {p.H}], H of the experts")
    return torch.ops.w4plugin.w4a16_experts(  # type: ignore[no-any-return]
        x, topk_weights, topk_ids,
        p.gate_up, p.gate_up_scales, p.gate_up_zeros, p.gate_up_g_idx,
        p.down, p.down_scales, p.down_zeros, p.down_g_idx, expert_map,
        p.I, p.gate_up_group_size, p.down_group_size, p.gated, activation, apply_router_weight_on_input, p.backend,
    )  # fmt: skip


def _get(name: str) -> ExpertsBackend:
    for backend in EXPERTS_BACKENDS:
        if backend.name == name:
            return backend
    raise UsageError("backend", got=repr(name), wanted=" | ".join(b.name for b in EXPERTS_BACKENDS))


def _side_by_side(gate: W4Tensor, up: W4Tensor) -> W4Tensor:
    """Gate and up as one stack."""
    if gate.K != up.K or gate.N != up.N or gate.experts != up.experts or gate.experts is None:
        raise UsageError(
            "prepare_experts: gate, up",
            got=f"{list(gate.qweight.shape)}, {list(up.qweight.shape)}",
            wanted="two stacks of one shape [E, H/8, I]",
        )
    if gate.g_idx is not None or up.g_idx is not None:
        differ = (gate.groups() != up.groups()).any(-1).nonzero().flatten().tolist()
        if differ:
            raise UnsupportedError(
                "prepare_experts: gate, up",
                got=f"different g_idx in {len(differ)} of {gate.experts} experts, first expert {differ[0]}",
                wanted="one g_idx for an expert's gate and up",
                todo="Serve this layer dequantised.",
            )
    return W4Tensor.cat_n([gate, up])


def _check_weights(gate_up: W4Tensor, down: W4Tensor, gated: bool) -> None:
    if gate_up.experts is None or down.experts is None or gate_up.experts != down.experts:
        raise UsageError(
            "prepare_experts",
            got=f"gate_up {list(gate_up.qweight.shape)}, down {list(down.qweight.shape)}",
            wanted="two stacks of the same number of experts",
        )
    inner = down.K * (2 if gated else 1)
    if inner != gate_up.N or gate_up.K != down.N:
        raise UsageError(
            "prepare_experts",
            got=f"gate_up K = {gate_up.K}, N = {gate_up.N}; down K = {down.K}, N = {down.N}",
            wanted=f"gate_up K = {down.N}, N = {inner} for this down"
            + (" and a gate" if gated else ", without a gate"),
        )


def _what(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}"


def _check(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, call: Call) -> None:
    """What can be known without reading a value."""
    if x.ndim != 2 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise UsageError("w4a16_experts: x", got=_what(x), wanted="float16 or bfloat16 [T, H]")
    if topk_ids.ndim != 2 or topk_ids.shape[0] != x.shape[0] or topk_ids.dtype not in (torch.int32, torch.int64):
        raise UsageError("w4a16_experts: topk_ids", got=_what(topk_ids), wanted=f"int32 or int64 [{x.shape[0]}, topk]")
    if topk_weights.shape != topk_ids.shape or topk_weights.dtype != torch.float32:
        raise UsageError(
            "w4a16_experts: topk_weights",
            got=_what(topk_weights),
            wanted=f"float32 {list(topk_ids.shape)}, as topk_ids",
        )
    m = call.expert_map
    if m is not None and (m.ndim != 1 or m.dtype != torch.int32 or not m.shape[0]):
        raise UsageError("w4a16_experts: expert_map", got=_what(m), wanted="int32 [experts of the model]")
    held = {"topk_weights": topk_weights, "topk_ids": topk_ids, "expert_map": m}
    held |= {"gate_up": call.gate_up, "gate_up_scales": call.gate_up_scales, "gate_up_zeros": call.gate_up_zeros}
    held |= {"down": call.down, "down_scales": call.down_scales, "down_zeros": call.down_zeros}
    elsewhere = {name: str(t.device) for name, t in held.items() if t is not None and t.device != x.device}
    if elsewhere:
        raise UsageError("w4a16_experts: devices", got=f"x on {x.device}, {elsewhere}", wanted="one device")
    allowed = GATED if call.gated else PLAIN
    if call.activation not in allowed:
        kind = "with a gate" if call.gated else "without a gate"
        raise UsageError("w4a16_experts: activation", got=f"{call.activation!r} {kind}", wanted=" | ".join(allowed))


def _impl(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    gate_up_g_idx: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    down_g_idx: Tensor | None,
    expert_map: Tensor | None,
    inner: int,
    gate_up_group_size: int,
    down_group_size: int,
    gated: bool,
    activation: str,
    apply_router_weight_on_input: bool,
    backend: str,
) -> Tensor:
    call = Call(
        gate_up, gate_up_scales, gate_up_zeros, gate_up_g_idx, down, down_scales, down_zeros, down_g_idx, expert_map,
        inner, gate_up_group_size, down_group_size, gated, activation, apply_router_weight_on_input,
    )  # fmt: skip
    _check(x, topk_weights, topk_ids, call)
    if not topk_ids.numel():
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    return _get(backend).apply(x, topk_weights, topk_ids, call)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def register() -> None:
    """Define the operator; a second call, or a second copy of the package in the process, changes nothing."""
    if hasattr(torch.ops.w4plugin, "w4a16_experts"):
        return
    library: Any = torch.library.Library("w4plugin", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("w4a16_experts", _impl, "CompositeExplicitAutograd")
    torch.library.register_fake("w4plugin::w4a16_experts", _fake, lib=library)
    _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []  # a Library that is collected takes its operator with it
register()
