"""Round-to-nearest group quantiser: a plain weight to a W4Tensor.

For tests, demos and speed measurements; it looks at no activations, so calibrated checkpoints are better ones.

    asymmetric: scale = (max - min) / 15, zero = round(-min / scale) in 0..15     q = round(w / scale) + zero in 0..15
    symmetric:  scale = max|w| / 7,       zero = 8
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.packing import NIBBLES, pack
from w4plugin.tensor import SYMMETRIC_ZERO, W4Tensor


def quantize(
    weight: Tensor, group_size: int = 128, *, sym: bool = False, scale_dtype: torch.dtype = torch.float16
) -> W4Tensor:
    """Quantise along K with one scale and zero point a group and column.

    Args:
        weight: float ``[*E, K, N]`` (a PyTorch Linear stores ``[N, K]``: pass its transpose).
        group_size: rows in a group; -1 means all K rows. The last group may be short.
        sym: fix every zero point at 8.
        scale_dtype: dtype of the stored scales; codes are chosen with the rounded scale, so that it costs no accuracy.

    Raises:
        UnsupportedError: K is not a multiple of 8.
        CorruptError: the weight holds NaN or infinity, or a scale overflows ``scale_dtype``.
    """
    k = weight.shape[-2]
    if k % NIBBLES:
        raise UnsupportedError("quantize", got=f"K = {k}", wanted="a multiple of 8, since eight rows share a word")
    if not bool(torch.isfinite(weight).all()):
        raise CorruptError("quantize", got="a weight with NaN or infinity", wanted="finite values")
    group_size = k if group_size == -1 else group_size
    if group_size < 1:
        raise UnsupportedError("quantize", got=f"group_size {group_size}", wanted="-1 or at least 1")
    groups = math.ceil(k / group_size)
    exact = weight.to(torch.float32)
    # A short last group is padded with its own first row, which changes neither minimum nor maximum.
    missing = groups * group_size - k
    if missing:
        last = exact[..., (groups - 1) * group_size : (groups - 1) * group_size + 1, :]
        exact = torch.cat([exact, last.expand(*last.shape[:-2], missing, -1)], -2)
    grouped = exact.unflatten(-2, (groups, group_size))
    low, high = grouped.amin(-2), grouped.amax(-2)
    scales = torch.maximum(low.abs(), high.abs()) / 7 if sym else (high - low) / 15
    scales = scales.to(scale_dtype)
    if not bool(torch.isfinite(scales).all()):
        raise CorruptError("quantize", got=f"a scale above {scale_dtype}'s range", wanted="a wider scale_dtype")
    # A constant group has scale 0: any code gives weight 0 there, unless the constant itself must be kept.
    flat = (scales == 0) & (high != 0)
    scales = torch.where(flat, (high.abs() / 7).to(scale_dtype), scales)
    divisor = torch.where(scales == 0, torch.ones_like(scales), scales).to(torch.float32)
    if sym:
        zeros = torch.full_like(divisor, SYMMETRIC_ZERO)
    else:
        zeros = torch.where(flat, torch.full_like(low, SYMMETRIC_ZERO), torch.round(-low / divisor).clamp(0, 15))
    codes = torch.round(grouped / divisor.unsqueeze(-2)) + zeros.unsqueeze(-2)
    codes = codes.clamp(0, 15).to(torch.uint8).flatten(-3, -2)[..., :k, :]
    return W4Tensor(
        qweight=pack(codes, -2),
        scales=scales.contiguous(),
        zeros=None if sym else zeros.to(torch.uint8).contiguous(),
        g_idx=None,
        group_size=group_size,
    )
