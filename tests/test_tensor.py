"""W4Tensor: what it checks, and that no cut or merge changes a weight."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError, UsageError
from w4plugin.packing import pack
from w4plugin.tensor import W4Tensor, rounded_once


def random_weight(
    K: int = 64,
    N: int = 12,
    group_size: int = 16,
    *,
    experts: int | None = None,
    sym: bool = False,
    order: bool = False,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> W4Tensor:
    generator = torch.Generator().manual_seed(seed)
    lead = () if experts is None else (experts,)
    G = math.ceil(K / group_size)
    codes = torch.randint(0, 16, (*lead, K, N), generator=generator)
    rows = torch.arange(K) // group_size
    shuffled = torch.stack([rows[torch.randperm(K, generator=generator)] for _ in range(experts or 1)])
    return W4Tensor(
        qweight=pack(codes, -2),
        scales=(torch.rand(*lead, G, N, generator=generator) * 0.1 + 0.001).to(dtype),
        zeros=None if sym else torch.randint(0, 16, (*lead, G, N), generator=generator).to(torch.uint8),
        g_idx=shuffled.reshape(*lead, K).to(torch.int32) if order else None,
        group_size=group_size,
    )


def by_hand(w: W4Tensor, index: tuple[int, ...], k: int, n: int) -> float:
    """One weight in Python numbers."""
    word = int(w.qweight[index][k // 8, n]) & 0xFFFFFFFF
    g = k // w.group_size if w.g_idx is None else int(w.g_idx[index][k])
    zero = 8 if w.zeros is None else int(w.zeros[index][g, n])
    return ((word >> (4 * (k % 8)) & 15) - zero) * float(w.scales[index][g, n])


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dequantize_is_the_formula(sym: bool, order: bool, experts: int | None, dtype: torch.dtype) -> None:
    w = random_weight(K=24, N=5, group_size=16, experts=experts, sym=sym, order=order, dtype=dtype)
    plain = w.dequantize(torch.float64)
    for index in [()] if experts is None else [(e,) for e in range(experts)]:
        for k in range(24):
            for n in range(5):
                assert plain[index][k, n].item() == by_hand(w, index, k, n)
    for to in (torch.float16, torch.bfloat16, torch.float32):
        assert torch.equal(w.dequantize(to), plain.to(to))  # rounded once, from the exact product
    assert w.dequantize().dtype == dtype


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_float64_is_rounded_once(dtype: torch.dtype, digits: int) -> None:
    tie, step = 1 + 2.0**-digits, 2.0 ** (1 - digits)
    exact = torch.tensor([tie, tie + 2.0**-40, tie - 2.0**-40, 0.0, 1e300], dtype=torch.float64)
    assert rounded_once(exact, dtype).tolist() == [1, 1 + step, 1, 0, math.inf]
    assert rounded_once(-exact, dtype).tolist() == [-1, -1 - step, -1, 0, -math.inf]
    random = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-4
    off = (rounded_once(random, dtype).double() - random).abs()
    for neighbour in (math.inf, -math.inf):
        other = torch.nextafter(rounded_once(random, dtype), torch.tensor(neighbour, dtype=dtype))
        assert bool((off <= (other.double() - random).abs()).all())


def test_properties() -> None:
    w = random_weight(K=40, N=12, group_size=16)
    assert (w.K, w.N, w.G, w.experts, w.symmetric, w.device.type) == (40, 12, 3, None, False, "cpu")
    assert random_weight(experts=2).experts == 2
    assert random_weight(sym=True).symmetric
    assert w.nbytes() == 5 * 12 * 4 + 3 * 12 * 2 + 3 * 12
    assert w.groups().tolist() == [k // 16 for k in range(40)]
    assert torch.equal(random_weight(sym=True).full_zeros(), torch.full((4, 12), 8, dtype=torch.uint8))
    assert set(w.tensors()) == {"qweight", "scales", "zeros"}


BAD: dict[str, Any] = {
    "qweight dtype": lambda w: {"qweight": w.qweight.long()},
    "qweight axes": lambda w: {"qweight": w.qweight[0]},
    "qweight empty": lambda w: {"qweight": w.qweight[:0]},
    "scales dtype": lambda w: {"scales": w.scales.double()},
    "scales columns": lambda w: {"scales": w.scales[:, 1:]},
    "scales groups": lambda w: {"scales": w.scales[1:], "zeros": w.zeros[1:]},
    "scales axes": lambda w: {"scales": w.scales[None]},
    "scales nan": lambda w: {"scales": w.scales.clone().index_fill_(0, torch.tensor([1]), float("nan"))},
    "scales inf": lambda w: {"scales": w.scales.clone().index_fill_(0, torch.tensor([1]), float("inf"))},
    "zeros dtype": lambda w: {"zeros": w.zeros.int()},
    "zeros shape": lambda w: {"zeros": w.zeros[:1]},
    "zeros range": lambda w: {"zeros": w.zeros + 16},
    "g_idx dtype": lambda w: {"g_idx": w.groups()},
    "g_idx length": lambda w: {"g_idx": w.groups().int()[1:]},
    "g_idx range": lambda w: {"g_idx": w.groups().int() + 1},
    "g_idx negative": lambda w: {"g_idx": w.groups().int() - 1},
    "group_size": lambda w: {"group_size": 0},
    "group_size unresolved": lambda w: {"group_size": -1},
    "group_size other": lambda w: {"group_size": 32},
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_contradictions_are_found_at_construction(name: str) -> None:
    w = random_weight()
    with pytest.raises(CorruptError) as error:
        replace(w, **BAD[name](w))
    assert error.value.where == ("scales" if name == "group_size other" else name.split()[0])


def test_tensors_on_two_devices() -> None:
    w = random_weight(sym=True)
    with pytest.raises(UsageError, match="one device"):
        replace(w, scales=w.scales.to("meta"))


def test_a_group_larger_than_the_weight_is_one_group() -> None:
    w = replace(random_weight(K=64, group_size=64), group_size=128)
    assert w.groups().tolist() == [0] * 64


def test_shapes_alone_on_the_meta_device() -> None:
    w = random_weight().to("meta")
    assert (w.K, w.N, w.G) == (64, 12, 4)
    assert w.dequantize().shape == (64, 12)


kinds = st.tuples(st.booleans(), st.booleans(), st.sampled_from([None, 2]))


@settings(deadline=None)
@given(kinds, st.integers(1, 12), st.sampled_from([8, 16, 24, 64]), st.data())
def test_row_shards_hold_the_rows_of_the_whole(
    kind: tuple[bool, bool, int | None], eighths: int, size: int, data: Any
) -> None:
    sym, order, experts = kind
    w = random_weight(K=8 * eighths, group_size=size, sym=sym, order=order, experts=experts)
    first = data.draw(st.integers(0, eighths - 1))
    last = data.draw(st.integers(first + 1, eighths))
    part = w.shard_k(8 * first, 8 * last)
    assert torch.equal(part.dequantize(), w.dequantize()[..., 8 * first : 8 * last, :])
    if not order:
        assert math.ceil(8 * last / size) - 8 * first // size == part.G


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_tensor_parallel_changes_nothing(ranks: int, order: bool) -> None:
    w = random_weight(K=192, N=16, group_size=32, order=order)  # 8 ranks cut every group
    rows, columns = w.K // ranks, w.N // ranks
    along_k = [w.shard_k(i * rows, (i + 1) * rows).dequantize() for i in range(ranks)]
    along_n = [w.shard_n(i * columns, (i + 1) * columns) for i in range(ranks)]
    assert torch.equal(torch.cat(along_k, 0), w.dequantize())
    assert torch.equal(torch.cat([p.dequantize() for p in along_n], 1), w.dequantize())
    assert torch.equal(W4Tensor.cat_n(along_n).dequantize(), w.dequantize())


@pytest.mark.parametrize(("start", "stop"), [(-8, 8), (8, 8), (0, 72), (16, 8)])
def test_shards_outside_the_weight(start: int, stop: int) -> None:
    with pytest.raises(UsageError, match="shard_k"):
        random_weight().shard_k(start, stop)
    with pytest.raises(UsageError, match="shard_n"):
        random_weight().shard_n(start, stop + 72)


def test_row_shards_inside_a_word() -> None:
    with pytest.raises(UnsupportedError, match="multiples of 8"):
        random_weight().shard_k(4, 16)


def cat(*parts: W4Tensor) -> Tensor:
    merged = W4Tensor.cat_n(parts)
    assert torch.equal(merged.dequantize(), torch.cat([p.dequantize() for p in parts], -1))
    return merged.dequantize()


def test_merging_along_n() -> None:
    cat(random_weight(N=8, seed=1), random_weight(N=3, seed=2))
    cat(random_weight(sym=True), random_weight(seed=1))  # explicit zeros of 8 beside real ones
    cat(random_weight(group_size=16), random_weight(group_size=64, seed=1), random_weight(group_size=32, seed=2))
    cat(random_weight(experts=2), random_weight(experts=2, N=4))
    both = W4Tensor.cat_n([random_weight(sym=True), random_weight(sym=True, seed=1)])
    assert both.symmetric


def test_b7_merging_with_act_order_demands_the_same_order() -> None:
    w = random_weight(order=True)
    other = replace(w, qweight=w.qweight.flip(1))
    cat(w, other)
    with pytest.raises(UnsupportedError, match="different g_idx"):
        W4Tensor.cat_n([w, random_weight(order=True, seed=5)])
    with pytest.raises(UnsupportedError, match="different g_idx"):
        W4Tensor.cat_n([random_weight(), w])


def test_parts_that_do_not_fit() -> None:
    with pytest.raises(UnsupportedError, match="the same K"):
        W4Tensor.cat_n([random_weight(K=64), random_weight(K=32)])
    with pytest.raises(UnsupportedError, match="one dtype"):
        W4Tensor.cat_n([random_weight(), random_weight(dtype=torch.bfloat16)])
    with pytest.raises(UnsupportedError):
        W4Tensor.cat_n([random_weight(), random_weight(experts=2)])


@pytest.mark.parametrize("order", [True, False])
def test_experts_stack_and_come_apart(order: bool) -> None:
    parts = [random_weight(seed=i, order=order, sym=i == 1) for i in range(3)]
    stack = W4Tensor.stack_experts(parts)
    assert stack.experts == 3
    assert torch.equal(stack.dequantize(), torch.stack([p.dequantize() for p in parts]))
    for i, part in enumerate(parts):
        assert torch.equal(stack.expert(i).dequantize(), part.dequantize())
    mixed = W4Tensor.stack_experts([random_weight(), random_weight(order=True)])
    assert torch.equal(mixed.expert(0).dequantize(), random_weight().dequantize())


def test_experts_that_do_not_fit() -> None:
    with pytest.raises(UnsupportedError, match="2 kinds"):
        W4Tensor.stack_experts([random_weight(), random_weight(group_size=32)])
    with pytest.raises(UsageError, match="a stack of experts"):
        random_weight().expert(0)


def test_regrouping() -> None:
    w = random_weight(group_size=32)
    assert torch.equal(w.regroup(8).dequantize(), w.dequantize())
    assert w.regroup(8).G == 8
    assert w.regroup(32) is w
    for refused in (lambda: w.regroup(24), lambda: random_weight(order=True).regroup(8)):
        with pytest.raises(UnsupportedError, match="regroup"):
            refused()
    short = random_weight(K=40, group_size=16)
    assert torch.equal(short.regroup(8).dequantize(), short.dequantize())
