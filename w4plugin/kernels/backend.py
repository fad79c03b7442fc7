"""What a kernel backend is, and how one is chosen.

A backend prepares a :class:`~w4plugin.tensor.W4Tensor` once, at load time, into the tensors its kernels read, and then
multiplies with them. It says in words why it cannot take a weight or a device; when none fits, those words are the
error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from w4plugin.tensor import W4Tensor


@dataclass(frozen=True)
class Target:
    """Where a weight will be multiplied, and with what.

    Attributes:
        device: of the activations.
        dtype: of the activations, float16 or bfloat16 (float32 on the CPU).
        arch: "sm_90", "gfx942", "cpu"; from :mod:`w4plugin.kernels.device`.
    """

    device: torch.device
    dtype: torch.dtype
    arch: str


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of a weight as it came, where ``prepare`` changed them: what only ``restore`` needs."""

    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    group_size: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """A weight in the order one backend reads it; the fields are the op's arguments, which hosts may register.

    Attributes:
        backend: name of the backend whose order this is.
        qweight: packed words, in that backend's order.
        scales: per-group scales, never narrowed.
        zeros: per-group zero points in that backend's dtype, None when symmetric.
        g_idx: act-order index in that backend's meaning, None when groups are sequential.
        counters: int32, all zero between calls, None where a backend needs none. Split-K kernels count arrivals in them
            and reset them. They belong to the weight, not to a stream or a call: a CUDA graph may hold them, no call
            pays for clearing them, and two layers on two streams cannot meet in them. (One layer must not run on two
            streams at once: programs of either would wait for the other's.)
        K: in_features.
        N: out_features.
        group_size: rows in a group.
        groups: the groups as they came, None where they are still the same.
    """

    backend: str
    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    counters: Tensor | None
    K: int
    N: int
    group_size: int
    groups: Groups | None = None

    def nbytes(self) -> int:
        """Bytes held."""
        held = (self.qweight, self.scales, self.zeros, self.g_idx, self.counters)
        return sum(t.numel() * t.element_size() for t in held if t is not None)


Apply = Callable[
    [Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", "Tensor | None", "Tensor | None", int, int], Tensor
]
"""(x [M, K], qweight, scales, zeros, g_idx, counters, bias, N, group_size) -> [M, N] in x's dtype."""


Backward = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", int, int], Tensor]
"""(grad [M, N], qweight, scales, zeros, g_idx, K, group_size) -> [M, K] in grad's dtype."""


@dataclass(frozen=True)
class Backend:
    """One way to multiply.

    Attributes:
        name: as `w4plugin env` prints it and as the op's ``backend`` argument takes it.
        why_not: None when it can take this weight on this target, else one sentence. ``None`` for the weight asks about
            the target alone.
        prepare: the backend's order of a weight; must not change a value.
        restore: the exact inverse of ``prepare``.
        apply: the multiplication; allocates only its output and scratch, and asks nothing of the host (a CUDA graph may
            hold it).
        backward: the product with the transposed weight, for gradients of x; None where a backend offers none.
    """

    name: str
    why_not: Callable[[Target, W4Tensor | None], str | None]
    prepare: Callable[[W4Tensor], Prepared]
    restore: Callable[[Prepared], W4Tensor]
    apply: Apply
    backward: Backward | None = None
