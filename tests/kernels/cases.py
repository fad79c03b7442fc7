"""Weights, an independent float64 reference, and the bound that a kernel's float32 accumulation must keep.

The reference forms W[k, n] = (q - z) * s from the integers in NumPy's float64, where the product is exact, and shares
no code with the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from w4plugin import kernels
from w4plugin.kernels.device import target
from w4plugin.packing import pack
from w4plugin.tensor import W4Tensor

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
"""The largest relative error of one rounding: half a unit in the last place of 11, 8 and 24 significant bits."""
SMALLEST = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}
"""Half the smallest subnormal."""


@dataclass(frozen=True)
class Case:
    """One weight.

    Attributes:
        k, n: in and out features.
        group: rows in a group, -1 for all of K.
        asym: with zero points.
        scales: dtype of the scales.
        order: None, "act" (a permutation of the regular groups) or "random" (groups of any size).
    """

    k: int
    n: int
    group: int = 128
    asym: bool = True
    scales: torch.dtype = torch.float16
    order: str | None = None

    def __str__(self) -> str:
        kind = f"{self.k}x{self.n}-g{self.group}-{'asym' if self.asym else 'sym'}"
        return "-".join(filter(None, [kind, str(self.scales).removeprefix("torch."), self.order]))


@dataclass(frozen=True, eq=False)
class Sample:
    """A weight and its exact values, float64 ``[K, N]``."""

    weight: W4Tensor
    exact: Tensor


def sample(case: Case, device: torch.device, seed: int = 0, integers: bool = False) -> Sample:
    """A random weight; with ``integers`` its scales are powers of two, so that sums can be exact."""
    rng = np.random.default_rng(seed)
    size = case.k if case.group == -1 else case.group
    groups = -(-case.k // size)
    q = rng.integers(0, 16, (case.k, case.n), dtype=np.uint8)
    z = rng.integers(0, 16, (groups, case.n), dtype=np.uint8) if case.asym else np.full((groups, case.n), 8, np.uint8)
    if integers:
        s = torch.from_numpy(2.0 ** rng.integers(-3, 2, (groups, case.n))).to(case.scales)
    else:
        s = torch.from_numpy(rng.uniform(0.005, 0.015, (groups, case.n))).to(case.scales)
    rows = np.arange(case.k) // size
    if case.order == "act":
        rows = rng.permutation(rows)
    elif case.order == "random":
        rows = rng.integers(0, groups, case.k)
    exact = (q.astype(np.float64) - z[rows]) * s.double().numpy()[rows]
    weight = W4Tensor(
        pack(torch.from_numpy(q), 0),
        s,
        torch.from_numpy(z) if case.asym else None,
        torch.from_numpy(rows.astype(np.int32)) if case.order else None,
        size,
    )
    return Sample(weight.to(device), torch.from_numpy(exact).to(device))


def backends(device: torch.device, dtype: torch.dtype, weight: W4Tensor | None = None) -> list[str]:
    """Every backend that takes this weight on this device: the suite runs them all."""
    return [name for name, against in kernels.reasons(target(device, dtype), weight).items() if against is None]


def activations(m: int, k: int, dtype: torch.dtype, device: torch.device, seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(m, k, generator=g) * 0.5).to(dtype).to(device)


def check(got: Tensor, x: Tensor, exact: Tensor, bias: Tensor | None = None, where: str = "") -> None:
    """Every element within the bound; the first miss is named.

    With u the rounding of x's dtype and S = sum_k |x||w|:
        weights rounded to x's dtype       u S
        K products added in float32        (K + 16) 2^-23 S     (tensor cores cut instead of rounding: 2^-23, not 2^-24)
        the result rounded to x's dtype    u |y|, or half the smallest subnormal
    """
    xs, k = x.double(), x.shape[-1]
    want, size = xs @ exact, xs.abs() @ exact.abs()
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    bound = UNIT[x.dtype] * (size + want.abs()) + (k + 16) * 2.0**-23 * size + SMALLEST[x.dtype] * (1 + size)
    assert got.dtype == x.dtype
    assert got.shape == want.shape
    error = (got.double() - want).abs()
    bad = ~(error <= bound)
    if bool(bad.any()):
        at = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(
            f"{where}: {int(bad.sum())} of {bad.numel()} elements outside the bound, first {list(at)}:"
            f" got {float(got[at])}, want {float(want[at])}, bound {float(bound[at])}"
        )
    if want.numel() >= 256:  # a kernel that loses a bit everywhere stays inside the bound, but not inside this
        ratio = float(error.norm() / want.norm())
        assert ratio <= 2 * UNIT[x.dtype] + 2.0**-18, f"{where}: error ratio {ratio}"
