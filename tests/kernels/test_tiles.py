"""The choice of tiles is a pure function, and every tile it can choose computes the same product."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import Case, activations, check, sample
from w4plugin import kernels
from w4plugin.kernels import portable, tiles
from w4plugin.kernels.backend import Prepared
from w4plugin.kernels.tiles import Problem, Tile
from w4plugin.tensor import W4Tensor

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
TABLES = sorted(Path(str(resources.files("w4plugin.kernels") / "tables")).glob("portable_*.json"))


def multiply(x: Tensor, p: Prepared, tile: Tile | None, bias: Tensor | None = None) -> Tensor:
    """The portable backend held to one tile."""
    problem = portable.problem(x, p.scales, p.g_idx, p.N, p.group_size)
    chosen = None if tile is None else tiles.fit(tile, problem)
    plan = portable.make_plan(
        problem, chosen, asym=p.zeros is not None, bias=bias is not None, counters=p.counters is not None
    )
    return portable.multiply(plan, x, p.qweight, p.scales, p.zeros, p.g_idx, p.counters, bias, p.group_size)


VARIANTS = [
    Tile(16, 32, 1, 1, 2, 2, True),
    Tile(16, 32, 2, 2, 2, 3, True),
    Tile(16, 64, 4, 1, 4, 2, True),
    Tile(32, 64, 2, 1, 4, 3, False),
    Tile(32, 64, 4, 3, 4, 3, False, ahead=False),
    Tile(16, 32, 2, 1, 1, 3, True, ahead=False),
    Tile(16, 32, 1, 1, 4, 2, True, k_warps=4),
    Tile(16, 16, 2, 2, 2, 3, True, k_warps=2, pdl=True),
    Tile(32, 32, 1, 1, 4, 2, False, k_warps=4, ahead=False),
]
CASES = [
    Case(512, 40, 64, False),
    Case(640, 33, 128),
    Case(576, 16, -1),
    Case(288, 16, 96, False, F32),
    Case(128, 16, 32, True, F16, "random"),
]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_variant(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    every_variant(case, dtype, device)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("group", [16, 32])
def test_c10_a_step_of_64_rows_and_more_spans_several_groups(
    group: int, dtype: torch.dtype, device: torch.device
) -> None:
    every_variant(Case(96, 48, group), dtype, device)


def every_variant(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    s = sample(case, device)
    p = kernels.prepare(s.weight, dtype=dtype, backend="portable")
    x = activations(19, case.k, dtype, device)
    bias = activations(1, case.n, dtype, device, seed=5)[0]
    for tile in [*VARIANTS, None]:
        check(multiply(x, p, tile, bias), x, s.exact, bias, f"{case} {tile}")


@pytest.mark.parametrize("split", [2, 3, 5])
def test_split_k_resets_its_counters_and_repeats_its_bits(split: int, device: torch.device) -> None:
    case = Case(640, 64, 64)
    s = sample(case, device)
    p = kernels.prepare(s.weight, dtype=F16, backend="portable")
    assert p.counters is not None
    x = activations(5, case.k, F16, device)
    tile = Tile(16, 32, 1, split, 2, 2, True)
    first = multiply(x, p, tile)
    check(first, x, s.exact)
    for _ in range(20 if device.type == "cuda" else 2):
        assert torch.equal(multiply(x, p, tile), first)
        assert not p.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 64])
def test_split_k_under_load(m: int, device: torch.device) -> None:
    """Many shares that end together, thousands of times: a share that reads another's sums too early would show."""
    case = Case(4096, 4096)
    s = sample(case, device)
    p = kernels.prepare(s.weight, dtype=F16, backend="portable")
    x = activations(m, case.k, F16, device)
    for tile in (Tile(8 if m <= 8 else 16, 64, 1, 16, 4, 3, True), Tile(16, 128, 1, 8, 8, 3, True)):
        first = multiply(x, p, tile)
        check(first, x, s.exact)
        different = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(2000):
            different += (multiply(x, p, tile) != first).sum()
        assert int(different) == 0


def test_a_row_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    """Within a bucket of M the tile stays, and a row does not see its neighbours."""
    case = Case(256, 64, 64)
    s = sample(case, device)
    x = activations(16, case.k, F16, device)
    p = kernels.prepare(s.weight, dtype=F16, backend="portable")
    whole = kernels.linear(x, p)
    for m in range(9, 16):
        assert torch.equal(kernels.linear(x[:m], p), whole[:m])


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("asym", [False, True], ids=["sym", "asym"])
def test_every_half_word_unpacks_exactly(asym: bool, dtype: torch.dtype, device: torch.device) -> None:
    """All 65,536 values of both halves of a word, through both kernels, at every zero point: equality."""
    k, n = (2048, 1024) if device.type == "cuda" else (256, 64)
    halves = torch.arange(k // 8 * n, dtype=torch.int64) * (1 if k == 2048 else 37)
    words = (halves % 65536) | ((halves * 40503 + halves // 65536 * 777) % 65536) << 16
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).reshape(k // 8, n)
    zeros = (torch.arange(k // 128 * n) % 16).to(torch.uint8).reshape(k // 128, n) if asym else None
    scales = torch.full((k // 128, n), 0.5, dtype=dtype)
    w = W4Tensor(words, scales, zeros, None, 128).to(device)
    p = kernels.prepare(w, dtype=dtype, backend="portable")
    want = w.dequantize(dtype)
    assert torch.equal(portable.weight_t(p.qweight, p.scales, p.zeros, None, k, 128, 0, n, dtype).t(), want)
    x = torch.eye(k, dtype=dtype, device=device)
    for tile in (Tile(16, 64, 1, 1, 4, 3, True), Tile(16, 64, 1, 1, 4, 3, False)):
        for start in range(0, k, 64) if k > 256 else (64,):
            assert torch.equal(multiply(x[start : start + 64], p, tile), want[start : start + 64]), f"{tile} {start}"


ARCHES = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "cpu")


def test_every_choice_is_legal() -> None:
    rows = (1, 2, 8, 9, 16, 17, 64, 100, 513, 2048, 10**6)
    sizes = (1, 8, 48, 576, 2880, 4096, 28672)
    for arch, m, n, k, group, narrow in itertools.product(
        ARCHES, rows, sizes, (8, 24, 576, 4096, 11008), (0, 16, 32, 128, 96), (False, True)
    ):
        p = Problem(m, n, k, group, narrow, arch, 132)
        tile = tiles.choose(p)
        if tile is None:
            continue
        where = f"{p} {tile}"
        assert tile == tiles.choose(p), where
        assert tile.bm >= (8 if arch.startswith("sm_") else 16), where
        assert tile.bn % 16 == 0, where
        assert tile.warps & (tile.warps - 1) == 0, where
        assert 1 <= tile.split <= tiles.steps(tile, p), where
        assert tile.k_warps in (1, tile.warps), where
        assert tile.split == 1 or tiles.grid(tile, p) <= tiles.COUNTERS, where
        assert not tile.on_sum or tiles.span(group, tile.unroll) >= 64, where
        assert tile.on_sum or narrow or tiles.span(group, tile.unroll) < 64, where
        assert m > tiles.BUCKETS[-1] or tile == tiles.choose(replace(p, m=tiles.bucket(m))), where


def test_tables_say_where_they_come_from() -> None:
    for path in TABLES:
        table = json.loads(path.read_text())
        for key in ("date", "device", "arch", "sms", "torch", "cuda", "triton", "dtype", "group", "command"):
            assert table[key] is not None, f"{path.stem}: {key}"
        assert path.stem == f"portable_{table['arch']}"
        assert tiles.table(table["arch"]) == table["entries"]
        for entry in table["entries"]:
            assert entry["m"] in tiles.BUCKETS, f"{path.stem}: {entry}"
            if entry["tile"] is not None:
                assert asdict(Tile(**entry["tile"])) == entry["tile"], f"{path.stem}: {entry}"


def test_a_table_wins_over_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile(16, 128, 2, 4, 8, 3, True)
    entries = [
        {"m": 16, "n": 4096, "k": 4096, "tile": asdict(tile)},
        {"m": 16, "n": 28672, "k": 4096, "tile": None},
    ]
    monkeypatch.setattr(tiles, "table", lambda arch: entries)
    p = Problem(9, 4096, 4096, 128, True, "sm_90", 132)
    assert tiles.choose(p) == tile
    assert tiles.choose(replace(p, n=28672)) is None
    near = tiles.choose(replace(p, n=5120))  # the nearest shape's tile, K split for this grid
    assert near is not None
    assert (near.bm, near.bn, near.warps) == (16, 128, 8)
    assert tiles.choose(replace(p, m=64)) is not None, "a bucket that nobody measured takes the rule"


@pytest.mark.parametrize("m", [17, 33, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("group", [0, 16, 32, 128])
def test_no_chain_of_wgmma_on_hopper(group: int, m: int) -> None:
    """Products in flight read registers that the next step overwrites; seen on an H200 as wrong results.

    Every wide tile awaits its products (test_cross_compile reads that off the compiler's output).
    """
    for by_row in (False, True):
        p = Problem(m, 4096, 4096, 0 if by_row else group, True, "sm_90", 132, by_row)
        for tile in (tiles.choose(p), tiles.fit(Tile(128, 128, 1, 1, 8, 4, False), p)):
            if tile is not None:
                assert portable.constants(p, tile, asym=True, bias=False)["AWAIT"] or tile.k_warps > 1
                assert tile.bn >= 16 * tile.warps or tile.k_warps > 1, "idle warps"
    old = replace(p, arch="sm_80")
    assert not portable.constants(old, Tile(128, 128, 1, 1, 8, 4, False), asym=True, bias=False)["AWAIT"]
