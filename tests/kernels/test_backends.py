"""What a backend promises: prepare() loses nothing, restore() undoes it, and registries name their reasons."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.kernels.cases import Case, activations, backends, check, sample
from w4plugin import kernels
from w4plugin.kernels import cpu, registry
from w4plugin.kernels.device import target
from w4plugin.kernels.fragments import from_fragments, to_fragments
from w4plugin.kernels.grouping import runs
from w4plugin.packing import pack, unpack
from w4plugin.tensor import W4Tensor

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def same(a: W4Tensor, b: W4Tensor) -> bool:
    left, right = a.tensors(), b.tensors()
    return (
        a.group_size == b.group_size
        and left.keys() == right.keys()
        and all(t.dtype == right[name].dtype and torch.equal(t, right[name]) for name, t in left.items())
    )


@pytest.mark.parametrize("order", [None, "act", "random"])
@pytest.mark.parametrize("group", [16, 24, 32, 64, 128, -1])
@pytest.mark.parametrize(("k", "n"), [(192, 16), (240, 33), (8, 1)])
def test_restore_undoes_prepare(k: int, n: int, group: int, order: str | None, device: torch.device) -> None:
    for asym, scales in itertools.product([False, True], [F16, BF16, F32]):
        w = sample(Case(k, n, group, asym, scales, order), device).weight
        for name in backends(device, F16, w):
            backend = registry.get(name)
            assert same(backend.restore(backend.prepare(w)), w), name


def test_fragment_order_is_its_definition() -> None:
    """word[b, j, 4r + t, 2c + h], nibble i + 4l holds row 64b + 32c + 8i + 2t + l of column 16j + 8h + r."""
    w = sample(Case(136, 40, 128), torch.device("cpu")).weight
    pad = torch.arange(40, dtype=torch.uint8) % 16
    words, codes = to_fragments(w.qweight, pad), unpack(w.qweight, 0)
    assert words.shape == (3, 3, 128)
    for b, j, r, t, c, h, i, l in itertools.product(*map(range, (3, 3, 8, 4, 2, 2, 4, 2))):
        k, n = 64 * b + 32 * c + 8 * i + 2 * t + l, 16 * j + 8 * h + r
        got = int(words[b, j, (4 * r + t) * 4 + 2 * c + h]) >> (4 * (i + 4 * l)) & 15
        if n >= 40:
            continue
        assert got == int(codes[k, n] if k < 136 else pad[n]), (k, n)
    assert torch.equal(from_fragments(words, 136, 40), w.qweight)


def test_runs() -> None:
    device = torch.device("cpu")
    assert runs(sample(Case(240, 8, 24), device).weight, 16) is None
    plain = runs(sample(Case(240, 8, 48), device).weight, 16)
    assert plain is not None
    assert (plain.order, plain.size, plain.group) == (None, 48, None)
    act = runs(sample(Case(256, 8, 32, order="act"), device).weight, 16)
    assert act is not None
    assert act.order is not None
    assert act.size == 32
    # A row shard that cuts a group: order stays, runs are the common divisor.
    cut = runs(sample(Case(256, 8, 128), device).weight.shard_k(48, 208), 16)
    assert cut is not None
    assert cut.order is None
    assert cut.size == 16
    assert cut.group is not None
    assert cut.group.tolist() == [0] * 5 + [1] * 5
    assert runs(sample(Case(256, 8, 32, order="random"), device).weight, 16) is None


def test_shards_of_act_order_and_of_cut_groups(device: torch.device) -> None:
    """B1, C1: the sum over row shards is the whole, whatever a shard does to groups."""
    for order, k in (("act", 256), (None, 96), ("random", 256)):
        s = sample(Case(k, 32, 32 if k == 96 else 64, True, F16, order), device)
        x = torch.randn(3, k, generator=torch.Generator().manual_seed(0)).to(F16).to(device)
        want = x.double() @ s.exact
        for name in backends(device, F16):
            total = torch.zeros(3, 32, dtype=torch.float64, device=device)
            for start in (0, k // 2):
                shard = s.weight.shard_k(start, start + k // 2)
                if registry.get(name).why_not(target(device, F16), shard) is not None:
                    name = "plain"
                p = kernels.prepare(shard, dtype=F16, backend=name)
                total += kernels.linear(x[:, start : start + k // 2], p).double()
            torch.testing.assert_close(total, want, atol=2e-3, rtol=2e-3)


CPU = torch.device("cpu")


def test_cpu_refuses_what_it_would_round() -> None:
    where = target(CPU, F16)
    for case, reason in [
        (Case(256, 40, 64), "N % 16"),
        (Case(256, 32, 16), "whole groups"),
        (Case(208, 32, 128), "whole groups"),
        (Case(256, 32, 64, True, F32), "scale * (8 - zero)"),
    ]:
        assert reason in str(cpu.why_not(where, sample(case, CPU).weight)), case
    for case in (
        Case(256, 32, 64),
        Case(192, 32, 128),
        Case(256, 32, 64, False, F32),
        Case(512, 32, -1),
        Case(256, 32, 32, order="act"),
    ):
        assert cpu.why_not(where, sample(case, CPU).weight) is None, case
    assert "cuda" in str(
        cpu.why_not(target(torch.device("cuda", 0), F16) if torch.cuda.is_available() else _cuda(), None)
    )


@pytest.mark.parametrize("case", [Case(256, 32, 64), Case(256, 32, 64, False), Case(256, 32, 64, True, BF16)])
def test_cpu_parts_of_scales_sum_to_them_and_keep_zero(case: Case) -> None:
    """bfloat16 activations meet scales in two bfloat16 parts, neither of which makes a weight of 0 anything else."""
    w = sample(case, CPU).weight
    p = kernels.prepare(w, dtype=BF16, backend="cpu")
    assert p.scales.dtype == BF16
    assert p.scales.shape == (2, 4, 32, 2)
    scale, shift = p.scales.double().sum(0).unbind(-1)
    assert torch.equal(scale, w.scales.double())
    assert torch.equal(shift, w.scales.double() * (8 - w.full_zeros().double()))
    nothing = pack(w.full_zeros().repeat_interleave(64, 0), 0)
    dead = kernels.prepare(replace(w, qweight=nothing), dtype=BF16, backend="cpu")
    assert not kernels.linear(activations(5, 256, BF16, CPU), dead).any()


def test_cpu_pieces_of_a_plain_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts of PyTorch's packed order at multiples of 64 columns, the last piece of 16."""
    case = Case(256, 208, 64, False)
    s = sample(case, CPU)
    p = kernels.prepare(s.weight, dtype=F16, backend="cpu")
    x = activations(9, 256, F16, CPU)
    whole = kernels.linear(x, p)
    check(whole, x, s.exact, None, "one piece")
    monkeypatch.setattr(cpu, "SCRATCH", 256 * 64)
    check(kernels.linear(x, p), x, s.exact, None, "four pieces")


def _cuda() -> kernels.Target:
    return kernels.Target(torch.device("cuda", 0), F16, "sm_90")


def test_the_cpu_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    w = sample(Case(256, 32, 64), CPU).weight
    assert kernels.prepare(w, dtype=BF16).backend == "cpu"
    odd = sample(Case(256, 40, 64), CPU).weight
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernels.prepare(odd, dtype=BF16).backend == "plain"


def test_nbytes_counts_what_is_held(device: torch.device) -> None:
    s = sample(Case(256, 32, 64), device)
    p = kernels.prepare(s.weight, dtype=F16, backend="portable")
    assert p.nbytes() == 256 * 32 // 2 + 4 * 32 * (2 + 1) + 4 * 1024
