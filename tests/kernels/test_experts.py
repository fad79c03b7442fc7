"""Layers of experts: every backend against the float64 reference, exact integers, routing, and restore."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import activations
from tests.kernels.expert_cases import Layer, check_experts, expected, expert_backends, expert_sample, routing
from w4plugin import kernels
from w4plugin.kernels.device import target
from w4plugin.tensor import W4Tensor

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Fresh memory is full of NaN: what a kernel forgets to write, or reads before writing, shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def run(layer: Layer, tokens: list[int], topk: int, dtype: torch.dtype, device: torch.device) -> None:
    s = expert_sample(layer, device)
    names = expert_backends(device, dtype, s)
    assert names, "some backend must take every layer"
    for name in names:
        p = kernels.prepare_experts(s.gate_up, s.down, dtype=dtype, backend=name, gated=layer.gated)
        for t in tokens:
            x = activations(t, layer.hidden, dtype, device)
            weights, ids = routing(t, topk, layer.experts, device)
            got = kernels.experts(x, p, weights, ids)
            assert got.dtype == dtype
            check_experts(got, expected(s, x, weights, ids), f"{name} {layer} T={t} {dtype}")


SMALL = [
    Layer(4, 128, 64, 64),
    Layer(3, 64, 128, 32, False),
    Layer(4, 128, 64, 64, False, BF16),
    Layer(2, 192, 96, 128),  # short last groups in both products
    Layer(2, 64, 72, -1),
    Layer(2, 80, 40, 16),
    Layer(2, 96, 80, 24),  # no power of two of 16 or more divides the group
    Layer(2, 64, 64, 32, True, F32),
    Layer(3, 128, 64, 32, True, F16, "act"),
    Layer(3, 128, 128, 64, False, BF16, "act"),
    Layer(2, 128, 64, 32, True, F16, "random"),
    Layer(2, 8, 8, 8),
    Layer(2, 64, 64, 32, gated=False),
]
LARGE = [
    Layer(8, 4096, 1792),
    Layer(16, 2048, 768, 128, False, BF16),
    Layer(8, 2048, 1408, 64),
    Layer(4, 2880, 2880, 32, False),
    Layer(4, 2048, 768, -1),
    Layer(8, 2048, 1408, 128, True, F16, "act"),
    Layer(4, 1024, 704, 128, True, F16, "random"),
    Layer(64, 1024, 256, 128, False),
    Layer(4, 1024, 1408, 128, False, gated=False),
]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("layer", SMALL, ids=str)
def test_small_sizes(layer: Layer, dtype: torch.dtype, device: torch.device) -> None:
    run(layer, [5] if device.type == "cpu" else [1, 5, 40], 2, dtype, device)


@pytest.mark.parametrize("layer", [SMALL[0], SMALL[3], SMALL[8], SMALL[10]], ids=str)
def test_sorted_tokens(layer: Layer, device: torch.device) -> None:
    run(layer, [40], 2, F16, device)


def test_float32_activations(device: torch.device) -> None:
    for layer in (SMALL[0], SMALL[8]):
        run(layer, [1, 5], 2, F32, device)


@gpu
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("layer", LARGE, ids=str)
def test_large_sizes(layer: Layer, dtype: torch.dtype, device: torch.device) -> None:
    run(layer, [1, 3, 8, 16, 33, 64, 100, 256, 1000], min(4, layer.experts), dtype, device)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("order", [None, "act", "random"])
def test_integers_are_exact(order: str | None, dtype: torch.dtype, device: torch.device) -> None:
    """relu2 of small integers times powers of two: all sums are exact, so only the last rounding is left: equality."""
    layer = Layer(3, 64, 64, 32, True, F16, order, gated=False)
    s = expert_sample(layer, device, integers=True)
    (up, up_exact), (down, down_exact) = _tamed(s.gate_up, s.gate_up_exact), _tamed(s.down, s.down_exact)
    # A row of x picks one row of W_up, so h = relu(w)^2 has the bits of (q - z)^2 <= 225: eight of them.
    g = torch.Generator().manual_seed(0)
    for name in expert_backends(device, dtype, s):
        p = kernels.prepare_experts(up, down, dtype=dtype, backend=name, gated=False)
        for t in (1, 9) if device.type == "cpu" else (1, 9, 40):
            x = torch.zeros(t, 64, dtype=dtype)
            x[torch.arange(t), torch.randint(0, 64, (t,), generator=g)] = 1
            x = x.to(device)
            _, ids = routing(t, 2, 3, device)
            weights = torch.full(ids.shape, 0.5, device=device)
            want = torch.zeros(t, 64, dtype=torch.float64, device=device)
            for e, (token, slot) in itertools.product(range(3), itertools.product(range(t), range(2))):
                if int(ids[token, slot]) == e:
                    h = (x[token].double() @ up_exact[e]).clamp(0).square()
                    assert torch.equal(h.to(dtype).double(), h), "the inner values must not round"
                    size = h @ down_exact[e].abs()  # in units of 2^-4 for h, 2^-2 for W_down, 2^-1 for weights
                    assert float(size.max()) < 2.0 ** (24 - 7), "sums must fit float32"
                    y = h @ down_exact[e]
                    if name == "cpu" and dtype == BF16:  # its products are bfloat16, as documented
                        y = y.to(dtype).double()
                    want[token] += 0.5 * y
            got = kernels.experts(x, p, weights, ids, activation="relu2")
            assert torch.equal(got, want.to(dtype)), f"{name} T={t}: {int((got != want.to(dtype)).sum())} differ"


def _tamed(w: W4Tensor, exact: Tensor) -> tuple[W4Tensor, Tensor]:
    """The weight with scales of 1/4 to 1."""
    scales = w.scales.clamp(0.25, 1)
    factor = (scales.double() / w.scales.double()).gather(1, w.groups()[..., None].expand_as(exact))
    return replace(w, scales=scales), exact * factor


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_with_a_gate(activation: str, device: torch.device) -> None:
    s = expert_sample(Layer(3, 64, 64, 32), device)
    x = activations(7, 64, F16, device) * 8
    weights, ids = routing(7, 2, 3, device)
    for name in expert_backends(device, F16, s):
        p = kernels.prepare_experts(s.gate_up, s.down, dtype=F16, backend=name)
        got = kernels.experts(x, p, weights, ids, activation=activation)
        check_experts(got, expected(s, x, weights, ids, activation), f"{name} {activation}")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_activations_without_a_gate(activation: str, device: torch.device) -> None:
    s = expert_sample(Layer(3, 64, 64, 32, gated=False), device)
    x = activations(7, 64, BF16, device) * 4
    weights, ids = routing(7, 2, 3, device)
    for name in expert_backends(device, BF16, s):
        p = kernels.prepare_experts(s.gate_up, s.down, dtype=BF16, backend=name, gated=False)
        got = kernels.experts(x, p, weights, ids, activation=activation)
        check_experts(got, expected(s, x, weights, ids, activation), f"{name} {activation}")


@pytest.mark.parametrize("topk", [1, 2])
def test_weights_on_the_input(topk: int, device: torch.device) -> None:
    s = expert_sample(Layer(3, 64, 64, 32), device)
    x = activations(6, 64, F16, device) * 4
    weights, ids = routing(6, topk, 3, device)
    weights *= 0.75
    for name in expert_backends(device, F16, s):
        p = kernels.prepare_experts(s.gate_up, s.down, dtype=F16, backend=name)
        got = kernels.experts(x, p, weights, ids, apply_router_weight_on_input=True)
        check_experts(got, expected(s, x, weights, ids, weight_on_input=True), name)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_absent_experts_add_nothing(kind: torch.dtype, device: torch.device) -> None:
    """Expert parallelism: the ranks' sums are the whole; -1 is nobody; a token without experts here gets zeros."""
    layer = Layer(4, 64, 64, 32)
    s = expert_sample(layer, device)
    x = activations(20, 64, F16, device)
    weights, ids = routing(20, 2, 4, device)
    ids = ids.to(kind)
    ids[3] = -1
    ids[4, 0] = -1
    for name in expert_backends(device, F16, s):
        total = torch.zeros(20, 64, dtype=torch.float64, device=device)
        for here in ([0, 3], [2], [1]):
            where = torch.full((4,), -1, dtype=torch.int32)
            where[here] = torch.arange(len(here), dtype=torch.int32)
            where = where.to(device)
            p = kernels.prepare_experts(_some(s.gate_up, here), _some(s.down, here), dtype=F16, backend=name)
            got = kernels.experts(x, p, weights, ids, expert_map=where)
            mine = type(s)(s.gate_up, s.down, s.gate_up_exact[here], s.down_exact[here], True)
            check_experts(got, expected(mine, x, weights, ids, expert_map=where), f"{name} {here}")
            nobody = ~torch.isin(ids.cpu(), torch.tensor(here, dtype=kind)).any(-1)
            assert not got[nobody.to(device)].any(), f"{name}: tokens without experts here"
            total += got.double()
        whole = kernels.prepare_experts(s.gate_up, s.down, dtype=F16, backend=name)
        want = expected(s, x, weights, ids)
        assert ((total - want.value).abs() <= 3 * want.bound).all(), name
        check_experts(kernels.experts(x, whole, weights, ids), want, name)
        assert not kernels.experts(x, whole, weights, torch.full_like(ids, -1)).any(), name


def _some(w: W4Tensor, here: list[int]) -> W4Tensor:
    return W4Tensor.stack_experts([w.expert(e) for e in here])


def test_nan_of_an_absent_row_stays_away(device: torch.device) -> None:
    """A NaN spoils its own token; weights of absent experts are not read at all."""
    s = expert_sample(Layer(2, 64, 64, 32), device)
    x = activations(6, 64, F16, device)
    x[2] = float("nan")
    weights, ids = routing(6, 2, 2, device)
    ids[5] = -1
    weights[5] = float("nan")
    for name in expert_backends(device, F16, s):
        p = kernels.prepare_experts(s.gate_up, s.down, dtype=F16, backend=name)
        got = kernels.experts(x, p, weights, ids)
        assert got.isnan().all(-1).tolist() == [False, False, True, False, False, False], name
        assert got.isnan().any(-1).tolist() == [False, False, True, False, False, False], name


def test_twice_the_same_bits(device: torch.device) -> None:
    layer = Layer(16, 1024, 512) if device.type == "cuda" else Layer(4, 64, 64, 32)
    s = expert_sample(layer, device)
    for name, t in itertools.product(expert_backends(device, F16, s), (1, 40)):
        x = activations(t, layer.hidden, F16, device)
        weights, ids = routing(t, 3, layer.experts, device)
        p = kernels.prepare_experts(s.gate_up, s.down, dtype=F16, backend=name)
        first = kernels.experts(x, p, weights, ids)
        for _ in range(20 if device.type == "cuda" else 2):
            assert torch.equal(kernels.experts(x, p, weights, ids), first), f"{name} T={t}"


def test_all_tokens_at_one_expert(device: torch.device) -> None:
    """The worst balance: one expert gets everything, the others nothing."""
    layer = Layer(5, 64, 64, 32)
    s = expert_sample(layer, device)
    for t in (1, 70):
        x = activations(t, 64, F16, device)
        ids = torch.full((t, 1), 3, dtype=torch.int64, device=device)
        weights = torch.ones(t, 1, device=device)
        for name in expert_backends(device, F16, s):
            p = kernels.prepare_experts(s.gate_up, s.down, dtype=F16, backend=name)
            check_experts(kernels.experts(x, p, weights, ids), expected(s, x, weights, ids), f"{name} T={t}")


@pytest.mark.parametrize("order", [None, "act", "random"])
@pytest.mark.parametrize("group", [16, 24, 32, 64, 128, -1])
def test_restore_undoes_prepare(group: int, order: str | None, device: torch.device) -> None:
    for asym, scales, gated in itertools.product([False, True], [F16, F32], [False, True]):
        s = expert_sample(Layer(3, 192, 72, group, asym, scales, order, gated), device)
        for name in expert_backends(device, F16, s):
            p = kernels.prepare_experts(s.gate_up, s.down, dtype=F16, backend=name, gated=gated)
            for got, want in zip(kernels.restore_experts(p), (s.gate_up, s.down), strict=True):
                left, right = got.tensors(), want.tensors()
                assert got.group_size == want.group_size, name
                assert left.keys() == right.keys(), name
                assert all(t.dtype == right[k].dtype and torch.equal(t, right[k]) for k, t in left.items()), name


def test_row_shards_of_act_order(device: torch.device) -> None:
    """Tensor parallelism: a rank holds columns of gate_up and rows of down; groups become irregular; sums are whole."""
    s = expert_sample(Layer(2, 64, 128, 32, True, F16, "act"), device)
    x = activations(5, 64, F16, device)
    weights, ids = routing(5, 2, 2, device)
    gate, up = s.gate_up.shard_n(0, 128), s.gate_up.shard_n(128, 256)
    want = expected(s, x, weights, ids)
    for name in expert_backends(device, F16):
        total = torch.zeros(5, 64, dtype=torch.float64, device=device)
        for start in (0, 64):
            pair = gate.shard_n(start, start + 64), up.shard_n(start, start + 64)
            rows = s.down.shard_k(start, start + 64)
            whole = W4Tensor.cat_n(pair)
            fits = kernels.experts_reasons(target(device, F16), (whole, rows))[name] is None
            p = kernels.prepare_experts(pair, rows, dtype=F16, backend=name if fits else "plain")
            total += kernels.experts(x, p, weights, ids).double()
        assert ((total - want.value).abs() <= 2 * want.bound).all(), name


def test_the_cpu_takes_the_cpu() -> None:
    """PyTorch's int4 product where it loses nothing, its two forms of scales among them; else the plain backend."""
    here = torch.device("cpu")
    for layer, name in (
        (Layer(2, 64, 32, 32), "cpu"),
        (Layer(2, 64, 32, 32, False, BF16), "cpu"),
        (Layer(2, 64, 64, 32, True, F16, "act"), "cpu"),
        (Layer(2, 64, 40, 32), "plain"),  # I is no multiple of its groups
        (Layer(2, 64, 32, 32, True, F32), "plain"),
    ):
        s = expert_sample(layer, here)
        p = kernels.prepare_experts(s.gate_up, s.down, dtype=BF16, backend=None if name == "cpu" else "plain")
        assert p.backend == name, layer
        assert ("cpu" in expert_backends(here, BF16, s)) == (name == "cpu"), layer


def test_cpu_scales_of_one_form_for_all_experts() -> None:
    """An expert whose scales fit bfloat16 beside one whose scales need two parts."""
    here = torch.device("cpu")
    s = expert_sample(Layer(2, 64, 32, 32), here)
    simple = s.gate_up.scales.clone()
    simple[0] = 0.5
    gate_up = replace(s.gate_up, scales=simple)
    exact = gate_up.dequantize(torch.float64)
    x = activations(5, 64, BF16, here)
    weights, ids = routing(5, 2, 2, here)
    p = kernels.prepare_experts(gate_up, s.down, dtype=BF16, backend="cpu")
    assert p.gate_up_scales.shape == (2, 2, 2, 64, 2)
    mine = type(s)(gate_up, s.down, exact, s.down_exact, True)
    check_experts(kernels.experts(x, p, weights, ids), expected(mine, x, weights, ids), "two forms")
