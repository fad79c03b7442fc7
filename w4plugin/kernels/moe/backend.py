"""What a backend for a layer of experts is: two stacks of weights, prepared together, applied to routed tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from w4plugin.kernels.backend import Groups, Target
from w4plugin.tensor import W4Tensor

GATED = ("silu", "gelu", "gelu_tanh")
"""activation(gate) * up."""

PLAIN = ("silu", "gelu", "gelu_tanh", "relu2")
"""activation(x W) of experts without a gate."""


@dataclass(frozen=True, eq=False)
class PreparedExperts:
    """Experts in the order one backend reads; the tensors are the operator's arguments, which hosts may register.

    Attributes:
        backend: name of the backend whose order this is.
        gate_up: packed words of the first product, E leading.
        gate_up_scales: its scales ``[E, G, N]``, never narrowed.
        gate_up_zeros: its zero points, None when symmetric.
        gate_up_g_idx: its act-order index in the backend's meaning, None when rows stay where they are.
        down: packed words of the second product, E leading.
        down_scales, down_zeros, down_g_idx: likewise.
        E: experts held here.
        H: features of x and of the result.
        I: intermediate features, as the checkpoint has them.
        gate_up_group_size, down_group_size: rows in a group, in the backend's order.
        gated: the first product has gate columns and up columns.
        kept: what only ``restore_experts`` needs, None where nothing is needed.
    """

    backend: str
    gate_up: Tensor
    gate_up_scales: Tensor
    gate_up_zeros: Tensor | None
    gate_up_g_idx: Tensor | None
    down: Tensor
    down_scales: Tensor
    down_zeros: Tensor | None
    down_g_idx: Tensor | None
    E: int
    H: int
    I: int
    gate_up_group_size: int
    down_group_size: int
    gated: bool
    kept: Kept | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The operator's tensors that are present, by field name."""
        first = ("gate_up", "gate_up_scales", "gate_up_zeros", "gate_up_g_idx")
        second = ("down", "down_scales", "down_zeros", "down_g_idx")
        return {name: t for name in first + second if (t := getattr(self, name)) is not None}

    def nbytes(self) -> int:
        """Bytes of the operator's tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


@dataclass(frozen=True, eq=False)
class Kept:
    """What a prepared order does not hold.

    Attributes:
        gate_up, down: groups as they came, None where they did not change.
        gate_up_order, down_order: the row in each place, int64 ``[E, K']``, -1 for padding; None where rows stayed.
    """

    gate_up: Groups | None
    down: Groups | None
    gate_up_order: Tensor | None
    down_order: Tensor | None


@dataclass(frozen=True, eq=False)
class Call:
    """One layer of experts at work: a prepared weight's tensors and how to apply them.

    Attributes:
        gate_up to down_g_idx: as in :class:`PreparedExperts`.
        expert_map: int32 ``[experts of the model]``, the place here or -1; None means all are here in order.
        I, gate_up_group_size, down_group_size, gated: as in :class:`PreparedExperts`.
        activation: one of GATED or PLAIN.
        weight_on_input: routing weights multiply x, hence the first product, not the result.
    """

    gate_up: Tensor
    gate_up_scales: Tensor
    gate_up_zeros: Tensor | None
    gate_up_g_idx: Tensor | None
    down: Tensor
    down_scales: Tensor
    down_zeros: Tensor | None
    down_g_idx: Tensor | None
    expert_map: Tensor | None
    I: int
    gate_up_group_size: int
    down_group_size: int
    gated: bool
    activation: str
    weight_on_input: bool


@dataclass(frozen=True)
class ExpertsBackend:
    """One way to run experts.

    Attributes:
        name: as the op's ``backend`` argument takes it.
        why_not: None when it can take these weights (gate_up, down, or None: the target alone), else one sentence.
        prepare: (gate_up, down, gated) in the backend's order; must not change a value.
        restore: the exact inverse.
        apply: (x ``[T, H]`` with T > 0, topk_weights, topk_ids, call) -> ``[T, H]`` in x's dtype. On a GPU it asks
            nothing of the host.
    """

    name: str
    why_not: Callable[[Target, tuple[W4Tensor, W4Tensor] | None], str | None]
    prepare: Callable[[W4Tensor, W4Tensor, bool], PreparedExperts]
    restore: Callable[[PreparedExperts], tuple[W4Tensor, W4Tensor]]
    apply: Callable[[Tensor, Tensor, Tensor, Call], Tensor]


def activate(h: Tensor, activation: str, gated: bool) -> Tensor:
    """float32 ``[*, 2 I]`` (``[*, I]`` without a gate) -> ``[*, I]``."""
    gate, up = h.chunk(2, -1) if gated else (h, None)
    if activation == "silu":
        out = torch.nn.functional.silu(gate)
    elif activation == "relu2":
        out = torch.nn.functional.relu(gate).square()
    else:
        out = torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return out if up is None else out * up
