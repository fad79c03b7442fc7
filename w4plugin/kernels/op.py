"""``torch.ops.w4plugin.w4a16_linear``: the one operator that runtimes call.

    y[..., n] = sum_k x[..., k] * (q[k, n] - zero[g, n]) * scale[g, n] + bias[n]

Accumulation is in float32 whatever the activations. The operator takes a prepared weight apart into tensors, since
that is what torch.compile and CUDA graphs see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from w4plugin.errors import UnsupportedError, UsageError
from w4plugin.kernels import registry
from w4plugin.kernels.backend import Prepared
from w4plugin.kernels.device import target
from w4plugin.tensor import W4Tensor

NAMESPACE = "w4plugin"
SCHEMA = (
    "w4a16_linear(Tensor x, Tensor qweight, Tensor scales, Tensor? zeros, Tensor? g_idx, Tensor? counters,"
    " Tensor? bias, int n, int group_size, str backend) -> Tensor"
)


def prepare(
    weight: W4Tensor, *, dtype: torch.dtype, device: torch.device | str | None = None, backend: str | None = None
) -> Prepared:
    """Put a weight into the order of the backend that will multiply it.

    Args:
        weight: a single weight (not a stack of experts).
        dtype: of the activations to come.
        device: where to multiply; None means where the weight is.
        backend: a name from `w4plugin env`; None means the first that fits.

    Raises:
        UnsupportedError: no backend fits, or the named one does not; the message holds each one's own reason.
    """
    if weight.experts is not None:
        raise UsageError("prepare", got=f"a stack of {weight.experts} experts", wanted="one weight")
    where = target(device or weight.device, dtype)
    chosen = registry.choose(where, weight, backend)
    return chosen.prepare(weight.to(where.device))


def linear(x: Tensor, weight: Prepared, bias: Tensor | None = None) -> Tensor:
    """x ``[..., K]`` float16 or bfloat16 times a prepared weight -> ``[..., N]`` in x's dtype.

    Raises:
        UsageError: x or bias does not fit the weight.
    """
    return torch.ops.w4plugin.w4a16_linear(  # type: ignore[no-any-return]
        x,
        weight.qweight,
        weight.scales,
        weight.zeros,
        weight.g_idx,
        weight.counters,
        bias,
        weight.N,
        weight.group_size,
        weight.backend,
    )


def _check(x: Tensor, scales: Tensor, bias: Tensor | None, n: int) -> None:
    if not x.is_floating_point() or x.ndim < 1:
        raise UsageError("w4a16_linear: x", got=f"{x.dtype} {list(x.shape)}", wanted="float16 or bfloat16 [..., K]")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise UsageError("w4a16_linear: bias", got=f"{bias.dtype} {list(bias.shape)}", wanted=f"{x.dtype} [{n}]")


def _impl(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    counters: Tensor | None,
    bias: Tensor | None,
    n: int,
    group_size: int,
    backend: str,
) -> Tensor:
    _check(x, scales, bias, n)
    flat = x.reshape(-1, x.shape[-1])
    out = registry.get(backend).apply(flat, qweight, scales, zeros, g_idx, counters, bias, n, group_size)
    return out.reshape(*x.shape[:-1], n)


def _fake(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    counters: Tensor | None,
    bias: Tensor | None,
    n: int,
    group_size: int,
    backend: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def register() -> None:
    """Define the operator; a second call, or a second copy of the package in the process, changes nothing."""
    if hasattr(torch.ops.w4plugin, "w4a16_linear"):
        return
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(SCHEMA)
    library.impl("w4a16_linear", _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::w4a16_linear", _fake, lib=library)
    _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []  # a Library that is collected takes its operators with it
register()

__all__ = ["UnsupportedError", "linear", "prepare"]
