"""``torch.ops.w4plugin.w4a16_linear``: the one operator that runtimes call.

    y[..., n] = sum_k x[..., k] * (q[k, n] - zero[g, n]) * scale[g, n] + bias[n]

Accumulation is in float32 whatever the activations. The operator takes a prepared weight apart into tensors, since
that is what torch.compile and CUDA graphs see. Its gradient is the one of x (and of bias):

    dx[..., k] = sum_n dy[..., n] * (q[k, n] - zero[g, n]) * scale[g, n]
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
FORWARD = (
    "w4a16_linear(Tensor x, Tensor qweight, Tensor scales, Tensor? zeros, Tensor? g_idx, Tensor? counters,"
    " Tensor? bias, int n, int group_size, str backend) -> Tensor"
)
BACKWARD = (
    "w4a16_linear_backward(Tensor grad, Tensor qweight, Tensor scales, Tensor? zeros, Tensor? g_idx, int k,"
    " int group_size, str backend) -> Tensor"
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
    if x.shape[-1] != weight.K:
        raise UsageError("linear: x", got=f"{list(x.shape)}", wanted=f"[..., {weight.K}], K of the weight")
    return call(
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


def call(
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
    """``torch.ops.w4plugin.w4a16_linear`` with these arguments, by the shortest way that is open.

    For hosts that keep a :class:`Prepared` as tensors of their layers. Without a graph the dispatcher is half of what
    a call costs the host.
    """
    run = _impl if _direct(x, bias) else torch.ops.w4plugin.w4a16_linear
    return run(x, qweight, scales, zeros, g_idx, counters, bias, n, group_size, backend)


def _direct(x: Tensor, bias: Tensor | None) -> bool:
    """No tracing, gradient, mode or subclass: nothing that the dispatcher, half of a call, would have to tell."""
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)))
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
    )


def _check(x: Tensor, qweight: Tensor, bias: Tensor | None, n: int) -> None:
    if not x.is_floating_point() or x.ndim < 1:
        raise UsageError("w4a16_linear: x", got=f"{x.dtype} {list(x.shape)}", wanted="float16 or bfloat16 [..., K]")
    if x.device != qweight.device:
        raise UsageError("w4a16_linear: x", got=f"on {x.device}", wanted=f"on {qweight.device}, as qweight")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype or bias.device != x.device):
        raise UsageError(
            "w4a16_linear: bias",
            got=f"{bias.dtype} {list(bias.shape)} on {bias.device}",
            wanted=f"{x.dtype} [{n}] on {x.device}",
        )


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
    _check(x, qweight, bias, n)
    flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    out = registry.get(backend).apply(flat, qweight, scales, zeros, g_idx, counters, bias, n, group_size)
    return out if x.ndim == 2 else out.reshape(*x.shape[:-1], n)


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


def _backward_impl(
    grad: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    k: int,
    group_size: int,
    backend: str,
) -> Tensor:
    compute = registry.get(backend).backward
    if compute is None:
        raise UnsupportedError(
            f"gradient of w4a16_linear with the {backend} backend",
            got="a backend for inference",
            wanted=" | ".join(b.name for b in registry.BACKENDS if b.backward is not None),
            todo="Name one of these in prepare().",
        )
    flat = grad.reshape(-1, grad.shape[-1])
    if not flat.shape[0]:
        return grad.new_empty((*grad.shape[:-1], k))
    return compute(flat, qweight, scales, zeros, g_idx, k, group_size).reshape(*grad.shape[:-1], k)


def _backward_fake(
    grad: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    k: int,
    group_size: int,
    backend: str,
) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], k))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, qweight, scales, zeros, g_idx, _, _, _, group_size, backend = inputs
    ctx.save_for_backward(qweight, scales, zeros, g_idx)
    ctx.k, ctx.group_size, ctx.backend = x.shape[-1], group_size, backend


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.w4plugin.w4a16_linear_backward(grad, *ctx.saved_tensors, ctx.k, ctx.group_size, ctx.backend)
    if ctx.needs_input_grad[6]:
        dbias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return dx, None, None, None, None, None, dbias, None, None, None


def register() -> None:
    """Define the operators; a second call, or a second copy of the package in the process, changes nothing."""
    if hasattr(torch.ops.w4plugin, "w4a16_linear"):
        return
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")
    for schema, impl, fake in ((FORWARD, _impl, _fake), (BACKWARD, _backward_impl, _backward_fake)):
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, impl, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    torch.library.register_autograd(f"{NAMESPACE}::w4a16_linear", _gradient, setup_context=_keep, lib=library)
    _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []  # a Library that is collected takes its operators with it
register()

__all__ = ["UnsupportedError", "linear", "prepare"]
