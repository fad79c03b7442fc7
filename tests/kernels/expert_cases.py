"""Layers of experts, routed tokens, and the float64 reference with the bound that a float32 layer must keep.

Weights come from :mod:`.cases`, whose exact values are formed from the integers in float64; the reference here is a
loop over tokens and their experts in float64 and shares no code with the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.cases import SMALLEST, UNIT, Case, sample
from w4plugin import kernels
from w4plugin.kernels.device import target
from w4plugin.tensor import W4Tensor


@dataclass(frozen=True)
class Layer:
    """One layer of experts.

    Attributes:
        experts, hidden, inner: E, H and I.
        group: rows in a group of both products, -1 for all of K.
        asym, scales, order: as in :class:`~tests.kernels.cases.Case`, for both products.
        gated: with a gate.
    """

    experts: int
    hidden: int
    inner: int
    group: int = 128
    asym: bool = True
    scales: torch.dtype = torch.float16
    order: str | None = None
    gated: bool = True

    def __str__(self) -> str:
        case = Case(self.hidden, self.inner, self.group, self.asym, self.scales, self.order)
        return f"{self.experts}x{case}" + ("" if self.gated else "-ungated")


@dataclass(frozen=True, eq=False)
class ExpertSample:
    """Both stacks, and their exact values, float64 ``[E, K, N]``."""

    gate_up: W4Tensor
    down: W4Tensor
    gate_up_exact: Tensor
    down_exact: Tensor
    gated: bool


def expert_sample(layer: Layer, device: torch.device, seed: int = 0, integers: bool = False) -> ExpertSample:
    """Random experts, every one with its own g_idx where there is one."""
    columns = layer.inner * (2 if layer.gated else 1)
    first = Case(layer.hidden, columns, layer.group, layer.asym, layer.scales, layer.order)
    second = Case(layer.inner, layer.hidden, layer.group, layer.asym, layer.scales, layer.order)
    ups = [sample(first, device, 100 * seed + e, integers) for e in range(layer.experts)]
    downs = [sample(second, device, 100 * seed + e + 50, integers) for e in range(layer.experts)]
    return ExpertSample(
        W4Tensor.stack_experts([s.weight for s in ups]),
        W4Tensor.stack_experts([s.weight for s in downs]),
        torch.stack([s.exact for s in ups]),
        torch.stack([s.exact for s in downs]),
        layer.gated,
    )


def routing(tokens: int, topk: int, experts: int, device: torch.device, seed: int = 3) -> tuple[Tensor, Tensor]:
    """(topk_weights, topk_ids): distinct experts for each token, as a router gives them."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=g)
    weights, ids = scores.topk(topk, -1)
    return (weights / weights.sum(-1, keepdim=True)).to(device), ids.to(torch.int32).to(device)


def expert_backends(device: torch.device, dtype: torch.dtype, s: ExpertSample | None = None) -> list[str]:
    """Every backend that takes these experts on this device: the suite runs them all."""
    weights = None if s is None else (s.gate_up, s.down)
    return [
        name for name, against in kernels.experts_reasons(target(device, dtype), weights).items() if against is None
    ]


def nonlinear(gate: Tensor, activation: str) -> Tensor:
    """Each activation by its formula."""
    if activation == "silu":
        return gate / (1 + torch.exp(-gate))
    if activation == "gelu":
        return 0.5 * gate * (1 + torch.erf(gate / 2**0.5))
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    if activation == "relu2":
        return torch.where(gate > 0, gate * gate, 0.0)
    raise AssertionError(activation)


@dataclass(frozen=True, eq=False)
class Expected:
    """The exact result ``[T, H]`` and the size of what rounding may do to it, both float64."""

    value: Tensor
    bound: Tensor


def expected(
    s: ExpertSample,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    weight_on_input: bool = False,
) -> Expected:
    """The layer in float64, and a bound on a float32 one.

    With u the rounding of x's dtype, c(K) = u + (K + 16) 2^-23 the error of one product relative to S = sum_k |x||w|
    (weights rounded to x's dtype, K products added in float32 by units that cut instead of rounding):
        a gate or up sum is off by              d = c(H) S
        activation(g) * up by                   L |up| dg + |act(g)| du + dg du L,   |activation'| <= L = 1.13 (relu2:
                                                2 |g| + dg); float32 functions themselves 2^-20 of the result
        its rounding to x's dtype by            u |h|
        a result by                             the inner error through |W_down|, plus c(I) S
        the sum over topk by                    topk 2^-23 of the absolute terms
        the last rounding by                    u |y|, or half the smallest subnormal
    """
    u, tiny = UNIT[x.dtype], SMALLEST[x.dtype]
    wide, factors = x.double(), weights.double()
    hidden, inner = s.gate_up_exact.shape[1], s.down_exact.shape[1]
    c1, c2 = u + (hidden + 16) * 2.0**-23, u + (inner + 16) * 2.0**-23
    value, bound = torch.zeros_like(wide), torch.zeros_like(wide)
    for e in range(s.down_exact.shape[0]):
        local = ids.long()
        if expert_map is not None:
            local = torch.where(local >= 0, expert_map.long()[local.clamp(0)], -1)
        token, slot = (local == e).nonzero(as_tuple=True)
        if not token.numel():
            continue
        xs, f = wide[token], factors[token, slot][:, None]
        g = xs @ s.gate_up_exact[e]
        d = c1 * (xs.abs() @ s.gate_up_exact[e].abs())
        if weight_on_input:
            g, d = g * f, (d + 2.0**-23 * g.abs()) * f.abs()
        if s.gated:
            (gate, up), (dg, du) = g.chunk(2, -1), d.chunk(2, -1)
        else:
            gate, up, dg, du = g, torch.ones_like(g), d, torch.zeros_like(d)
        act = nonlinear(gate, activation)
        slope = 2 * gate.abs() + dg if activation == "relu2" else 1.13
        h = act * up
        dh = (
            slope * dg * (up.abs() + du)
            + act.abs() * du
            + 2.0**-20 * (h.abs() + (gate * up).abs())
            + u * h.abs()
            + tiny
        )
        w = s.down_exact[e]
        y, size = h @ w, h.abs() @ w.abs()
        dy = dh @ w.abs() * (1 + c2) + c2 * size
        if not weight_on_input:
            y, dy = y * f, dy * f.abs()
        value.index_add_(0, token, y)
        bound.index_add_(0, token, dy + (ids.shape[1] + 2) * 2.0**-23 * (y.abs() + dy))
    return Expected(value, bound * (1 + u) + u * value.abs() + tiny)


def check_experts(got: Tensor, want: Expected, where: str = "") -> None:
    """Every element within the bound; the first miss is named."""
    assert got.shape == want.value.shape
    error = (got.double() - want.value).abs()
    bad = ~(error <= want.bound)
    if bool(bad.any()):
        at = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(
            f"{where}: {int(bad.sum())} of {bad.numel()} elements outside the bound, first {list(at)}:"
            f" got {float(got[at])}, want {float(want.value[at])}, bound {float(want.bound[at])}"
        )
    if want.value.numel() >= 256:  # errors of either sign cancel: a kernel that loses a bit everywhere shows here
        size, most = float(want.value.norm()), 4 * UNIT[got.dtype] + 2.0**-17
        assert float(error.norm()) <= most * size, f"{where}: error {float(error.norm())} of {size}"
