"""The readable twin of every kernel: dequantise, then matmul, in plain PyTorch.

Tests compare kernels with it, and it serves any device where no kernel fits. It materialises the whole weight, so it
saves disk and not memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4plugin.kernels.backend import Backend, Prepared, Target
from w4plugin.tensor import W4Tensor


def why_not(target: Target, weight: W4Tensor | None) -> str | None:
    return None


def prepare(w: W4Tensor) -> Prepared:
    """The sequential order itself."""
    return Prepared("plain", w.qweight, w.scales, w.zeros, w.g_idx, None, w.K, w.N, w.group_size)


def restore(p: Prepared) -> W4Tensor:
    return W4Tensor(p.qweight, p.scales, p.zeros, p.g_idx, p.group_size)


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
    weight = W4Tensor(qweight, scales, zeros, g_idx, group_size).dequantize(x.dtype)
    return torch.nn.functional.linear(x, weight.t(), bias)


BACKEND = Backend("plain", why_not, prepare, restore, apply)
