"""Every kind of tile and both ways of routing, the sort against its definition, and the choice of tiles."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.kernels.cases import activations
from tests.kernels.expert_cases import Layer, check_experts, expected, expert_sample, routing
from w4plugin import kernels
from w4plugin.kernels import tiles
from w4plugin.kernels.device import target
from w4plugin.kernels.moe import portable, tile_choice
from w4plugin.kernels.moe.backend import Call
from w4plugin.kernels.moe.tile_choice import Layout, Load
from w4plugin.kernels.tiles import Problem, Tile

F16, BF16 = torch.float16, torch.bfloat16

TILES = [
    Tile(8, 32, 2, 1, 8, 3, True, k_warps=8),
    Tile(16, 32, 1, 1, 4, 3, True, k_warps=4),
    Tile(8, 32, 1, 1, 4, 3, False, k_warps=4),
    Tile(16, 64, 2, 1, 4, 3, True, ahead=False),
    Tile(8, 64, 2, 1, 4, 3, True),
    Tile(64, 64, 2, 1, 4, 3, True),
    Tile(32, 128, 1, 1, 8, 3, False),
]


def call_of(p: kernels.PreparedExperts, expert_map: torch.Tensor | None = None, activation: str = "silu") -> Call:
    return Call(
        p.gate_up, p.gate_up_scales, p.gate_up_zeros, p.gate_up_g_idx, p.down, p.down_scales, p.down_zeros,
        p.down_g_idx, expert_map, p.I, p.gate_up_group_size, p.down_group_size, p.gated, activation, False,
    )  # fmt: skip


@pytest.mark.parametrize("pairs", [0, 1, 16], ids=["sorted", "alone", "compared"])
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.bm}x{t.bn}-u{t.unroll}-k{t.k_warps}-{t.on_sum}-{t.ahead}")
def test_each_kind_of_tile(tile: Tile, pairs: int, device: torch.device) -> None:
    """Tiles are forced, and sizes do not fit them: 3 blocks of rows, 5 blocks of columns."""
    layer, dtype = (Layer(2, 144, 40, 32), F16) if tile.unroll == 2 else (Layer(2, 128, 40, 64, False, BF16), BF16)
    s = expert_sample(layer, device)
    p = kernels.prepare_experts(s.gate_up, s.down, dtype=dtype, backend="portable")
    tokens = 3 if pairs == 1 else min(tile.bm + 1, 12)  # alone makes a program a pair
    x = activations(tokens, layer.hidden, dtype, device)
    weights, ids = routing(tokens, 1, 2, device)
    ids[:] = 1  # more pairs than a small tile has rows
    if tokens > 3:
        ids[2] = -1
    ids[-1] = 0
    call = call_of(p)
    sizes = portable.sizes(x, 1, call)
    one, two = (replace(tiles.fit(tile, q), split=1) for q in (sizes.first, sizes.second))
    got = portable.run(sizes, Layout(one, two, pairs), x, weights, ids, call)
    check_experts(got, expected(s, x, weights, ids), f"{tile} {layer} {dtype}")


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "topk", "held", "bm"), [(3, 2, 4, 8), (50, 2, 3, 16), (300, 2, 20, 8), (70, 8, 9, 64), (1100, 2, 20, 16)]
)
def test_sort(tokens: int, topk: int, held: int, bm: int, kind: torch.dtype, device: torch.device) -> None:
    """Slots hold each expert's pairs in order, experts in order, padded to blocks, and the rest is said to be empty."""
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, held + 5, (tokens, topk), generator=g)
    where = torch.full((held + 4,), -1, dtype=torch.int32)
    where[torch.randperm(held + 4, generator=g)[:held]] = torch.arange(held, dtype=torch.int32)
    pairs = tokens * topk
    local = torch.where((ids >= 0) & (ids < held + 4), where[ids.clamp(0, held + 3)].long(), -1).flatten().tolist()
    slots, experts = [], []
    for e in range(held):
        mine = [i for i in range(pairs) if local[i] == e]
        mine += [pairs] * (-len(mine) % bm)
        slots += mine
        experts += [e] * (len(mine) // bm)
    tile = Tile(bm, 64, 2, 1, 4, 3, True)
    problem = Problem(bm, 64, 64, 64, True, target(device, F16).arch, 1)
    s = portable.Sizes(tokens, topk, held, 64, 64, 64, problem, problem)
    got, owners = portable._sort(s, Layout(tile, tile, 0), ids.to(kind).to(device), where.to(device), held + 4, {})
    assert got.tolist()[: len(slots)] == slots
    assert owners.tolist() == experts + [-1] * (len(owners) - len(experts))
    assert len(owners) == Load(pairs, held).blocks(bm)


def test_no_routing_makes_more_blocks_than_there_is_room_for() -> None:
    for held, bm in itertools.product((1, 2, 3, 8), (8, 16)):
        for pairs in (1, 2, 7, 8, 9, 40):
            worst = max(sum(-(-c // bm) for c in counts if c) for counts in _splits(pairs, held))
            assert worst <= Load(pairs, held).blocks(bm) <= pairs, (held, bm, pairs)


def _splits(pairs: int, held: int) -> list[list[int]]:
    """Ways of sharing pairs out: as evenly as can be, one each and the rest to one, all to one, just over a block."""
    even = [pairs // held + (i < pairs % held) for i in range(held)]
    ones = min(held - 1, pairs)
    over = []
    left = pairs
    for _ in range(held - 1):
        over.append(min(left, 9))
        left -= over[-1]
    return [even, [1] * ones + [pairs - ones], [pairs], [*over, left]]


def test_choice() -> None:
    """Few rows an expert take small tiles, whose warps share K without empty steps where programs are few; many take
    large ones."""
    mixtral = [Problem(1, n, k, 128, True, "sm_90", 132) for n, k in ((28672, 4096), (4096, 14336))]
    sizes = [tile_choice.choose(Load(2 * t, 8), *mixtral) for t in (1, 4, 16, 64, 256, 1024, 4096)]
    assert [layout.first.bm for layout in sizes] == [8, 8, 8, 32, 64, 128, 128]
    assert [layout.pairs for layout in sizes] == [1, 16, 32, 0, 0, 0, 0]
    assert [(layout.first.k_warps, layout.second.k_warps) for layout in sizes[:3]] == [(1, 8), (1, 4), (1, 4)]
    assert [layout.second.bn for layout in sizes[3:]] == [128, 64, 128, 128], "64 rows: 128 columns make too few"
    qwen = [Problem(1, n, k, 128, True, "sm_90", 132) for n, k in ((1536, 2048), (2048, 768))]
    first = tile_choice.choose(Load(8, 128), *qwen)
    assert (first.first.k_warps, first.first.unroll, first.second.k_warps, first.second.unroll) == (8, 2, 4, 1)
    many = tile_choice.choose(Load(8 * 64, 128), *qwen)
    assert (many.first.bm, many.first.bn, many.first.k_warps, many.second.k_warps) == (8, 64, 1, 1)
    for t, arch in itertools.product((1, 16, 300, 5000), ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "cpu")):
        layout = tile_choice.choose(Load(8 * t, 128), *(replace(p, arch=arch) for p in qwen))
        assert layout.first.bm == layout.second.bm
        assert layout.first.split == layout.second.split == 1
        assert layout.first.bm >= (8 if arch.startswith("sm_") else 16)
        assert layout.first.pdl == layout.second.pdl


def test_short_groups_and_wide_scales_move_the_scales() -> None:
    for group, narrow, on_sum in ((128, True, True), (16, True, False), (32, True, False), (0, False, True)):
        p = Problem(1, 1536, 2048, group, narrow, "sm_90", 132)
        layout = tile_choice.choose(Load(8, 128), p, p)
        assert layout.first.on_sum == on_sum, group
