"""The readable twin of every kernel: dequantise, then matmul, in plain PyTorch.

Tests compare kernels with it, and it serves any device where no kernel fits. It materialises a bounded piece of the
weight at a time, so it saves memory at rest and not time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4plugin.kernels.backend import Backend, Prepared, Target
from w4plugin.packing import unpack
from w4plugin.tensor import SYMMETRIC_ZERO, W4Tensor

SCRATCH = 2**26
"""Weights held in full at a time; a piece is never less than one column."""


def why_not(target: Target, weight: W4Tensor | None) -> str | None:
    return None


def prepare(w: W4Tensor) -> Prepared:
    """The sequential order itself."""
    return Prepared("plain", w.qweight, w.scales, w.zeros, w.g_idx, None, w.K, w.N, w.group_size)


def restore(p: Prepared) -> W4Tensor:
    return W4Tensor(p.qweight, p.scales, p.zeros, p.g_idx, p.group_size)


def dequantize(
    qweight: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None, group_size: int, dtype: torch.dtype
) -> Tensor:
    """``W4Tensor.dequantize`` of tensors that were checked before: ``[K, N]``."""
    exact = torch.float64 if scales.dtype == torch.float32 else torch.float32
    k = 8 * qweight.shape[0]
    group = torch.arange(k, device=qweight.device) // group_size if g_idx is None else g_idx.long()
    weight = unpack(qweight, 0).to(exact)
    weight -= SYMMETRIC_ZERO if zeros is None else zeros.to(exact).index_select(0, group)
    weight *= scales.to(exact).index_select(0, group)
    return weight.to(dtype)


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
    """x ``[M, K]`` times the weight rounded to x's dtype -> ``[M, N]``."""
    out = x.new_empty((x.shape[0], n))
    for part in _pieces(8 * qweight.shape[0], n):
        weight = dequantize(*_columns(part, qweight, scales, zeros), g_idx, group_size, x.dtype)
        out[:, part] = torch.nn.functional.linear(x, weight.t(), None if bias is None else bias[part])
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
    pieces = _pieces(k, grad.shape[1])
    if len(pieces) == 1:
        return grad @ dequantize(qweight, scales, zeros, g_idx, group_size, grad.dtype).t()
    out = torch.zeros((grad.shape[0], k), dtype=torch.float32, device=grad.device)
    for part in pieces:
        weight = dequantize(*_columns(part, qweight, scales, zeros), g_idx, group_size, grad.dtype)
        out += grad[:, part] @ weight.t()
    return out.to(grad.dtype)


def _columns(
    part: slice, qweight: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return qweight[:, part], scales[:, part], None if zeros is None else zeros[:, part]


def _pieces(k: int, n: int) -> list[slice]:
    step = max(1, SCRATCH // k)
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]


BACKEND = Backend("plain", why_not, prepare, restore, apply, backward)
