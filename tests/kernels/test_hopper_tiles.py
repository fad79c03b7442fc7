"""The Hopper backend's choices: pure functions, so every machine can check them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from w4plugin.kernels import hopper, hopper_tiles, portable
from w4plugin.kernels.tiles import BUCKETS, Problem

SHAPES = [
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (57344, 8192),
    (8192, 28672),
    (576, 1536),
    (16, 64),
    (152064, 3584),
]
ROWS = [1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 96, 128, 129, 160, 192, 256, 257, 512, 513, 1024, 3071, 8192]
SMS = 132
SHARED = 227 * 1024
REGISTERS = 65536


def problem(m: int, n: int, k: int, group: int = 128, narrow: bool = True) -> Problem:
    return Problem(m, n, k, group, narrow, "sm_90", SMS)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize(("group", "narrow"), [(128, True), (64, True), (32, True), (0, True), (128, False)])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_every_choice_is_one_the_kernels_take(m: int, n: int, k: int, group: int, narrow: bool, bfloat16: bool) -> None:
    p = dataclasses.replace(problem(m, n, k, group, narrow), bfloat16=bfloat16)
    tile = hopper_tiles.choose(p)
    if tile is None:
        assert m > 512
        assert not narrow, "where scales can multiply weights a fused kernel is faster at any M"
        return
    assert tile.on_sum or narrow, "scales of another dtype are not narrowed onto the weights"
    assert tile.kind == "narrow" or tile.depth in (2, 4)
    assert tile.stages <= hopper_tiles.deepest(tile.warps), "a named barrier for every hand-over"
    assert group != 32 or tile.kind == "narrow" or tile.depth == 4, "a product spans one group"
    threads = 32 * (tile.warps + 4)  # the loader's warp takes a warpgroup of its own
    assert tile.resident * threads * tile.registers <= REGISTERS
    scales = (2 if narrow else 4) * tile.bn + max(tile.bn, 128)  # and zero points, a byte each
    chunk = tile.bn * 64 + tile.bm * 256 + (128 // group if group in (32, 64) else 1) * scales
    stage = chunk * (tile.depth if tile.kind == "narrow" else 1)
    output = 2 * tile.bm * tile.bn if tile.staged and tile.bm <= 128 else 0  # otherwise a stage of x holds it
    assert not tile.staged or tile.bm <= 128 or tile.bn <= 128, "as much as a stage of x"
    assert tile.resident * (tile.stages * stage + output + 1024) <= SHARED, "the resident programs fit shared memory"
    assert tile.stages >= 2, "one stage is read while another comes"
    assert not tile.staged or tile.kind == "wide"
    programs = hopper_tiles.programs(tile, p)
    tiles = -(-n // tile.bn) * -(-m // tile.bm)
    assert 1 <= programs <= max(2 * SMS * tile.resident, 1)
    assert programs <= tiles * hopper_tiles.steps(tile, p), "no program without work"
    parts = 1 if tile.bm & (tile.bm - 1) == 0 else 2
    assert parts * programs * tile.warps <= hopper_tiles.COUNTERS * SMS, "a counter for each warp of each program"


@pytest.mark.parametrize("m", [m for m in ROWS if m <= 2048])
def test_constants_are_plain_values(m: int) -> None:
    """Hosts that watch compilation (vLLM does) write a kernel's constants as JSON."""
    p = problem(m, 4096, 4096)
    tile = hopper_tiles.choose(p)
    assert tile is not None
    plan = hopper.make_plan(tile, p, torch.float16, asym=True, bias=True)
    assert json.loads(json.dumps(plan.constants)) == list(plan.constants)
    assert json.loads(json.dumps(plan.options)) == plan.options


ALIKE = [(1, 8), (9, 16), (17, 32), (33, 64), (65, 96), (97, 128), (129, 160), (161, 192), (193, 256)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize(("low", "high"), ALIKE)
def test_neighbouring_batches_take_the_same_tile(low: int, high: int, n: int, k: int) -> None:
    """The same bits for a row whatever it rides with, as long as no tile has more rows than all of them need."""
    few = hopper_tiles.choose(problem(low, n, k))
    assert all(hopper_tiles.choose(problem(m, n, k)) == few for m in range(low, high + 1))


WAVES = [(448, 112, 4), (448, 132, 2), (132, 132, 1), (133, 132, 0), (96, 132, 0), (265, 132, 1), (1, 1, 1)]
EVEN = [
    (448, 112, 4, 112),
    (448, 132, 3, 104),  # 52 tiles are left: two programs for each
    (896, 132, 6, 104),  # 104 are left: one for each
    (276, 132, 1, 132),  # twelve: with two for each most programs would idle, so runs
    (132, 132, 1, 132),
    (133, 132, 0, 132),
    (262, 132, 1, 130),
    (96, 132, 0, 132),  # no whole tiles first: runs
]


@pytest.mark.parametrize(("tiles", "programs", "waves"), WAVES)
def test_waves_of_whole_tiles(tiles: int, programs: int, waves: int) -> None:
    """Programs share nothing, or more than a tile each: then no tile is cut into more than three parts."""
    assert hopper_tiles.division(tiles, programs, 32, even=False) == (waves, programs)
    rest = tiles - waves * programs
    assert rest == 0 or rest > programs or waves == 0


@pytest.mark.parametrize(("tiles", "programs", "waves", "sharing"), EVEN)
def test_a_rest_in_even_parts(tiles: int, programs: int, waves: int, sharing: int) -> None:
    assert hopper_tiles.division(tiles, programs, 32, even=True) == (waves, sharing)


def test_runs_where_parts_take_longer() -> None:
    """67 tiles left by one wave of 132, of 224 steps: one program for each idles half the device for a tile's time."""
    assert hopper_tiles.division(199, 132, 224, even=True) == (0, 132)


def test_bfloat16_has_entries_of_its_own() -> None:
    """Each is another tile than float16 takes there, and float16 does not take it."""
    common = {(e["m"], e["n"], e["k"]): e["tile"] for e in hopper_tiles.table("sm_90")}
    own = {(e["m"], e["n"], e["k"]): e["tile"] for e in hopper_tiles.table("sm_90", bfloat16=True)}
    assert set(own) >= set(common)
    other = [key for key in own if own[key] != common.get(key)]
    assert other
    for m, n, k in other:
        group = 128 if k % 128 == 0 else 64
        p = problem(m, n, k, group)
        b = dataclasses.replace(p, bfloat16=True)
        tile = hopper_tiles.choose(b)
        assert tile is not None
        assert dataclasses.asdict(tile) == own[m, n, k]
        assert tile != hopper_tiles.choose(p)
        assert hopper_tiles.programs(tile, b) == hopper_tiles.programs(tile, p)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_a_choice_depends_on_names_bfloat16(dtype: torch.dtype) -> None:
    p = portable.problem(torch.zeros(3, 128, dtype=dtype), torch.zeros(1, 16, dtype=dtype), None, 16, 128)
    assert p.bfloat16 == (dtype == torch.bfloat16)
    assert p.narrow


def test_many_rows_take_the_widest_tile_that_fills_the_device() -> None:
    """1024 rows: 896 tiles of 256 x 128 are seven waves of 128; of 192 every other wave would be half empty."""
    assert staged_size(1024, 28672) == (256, 128)
    assert staged_size(1024, 6144) == (128, 128)
    assert staged_size(4096, 6144) == (256, 128)


def staged_size(m: int, n: int) -> tuple[int, int]:
    tile = hopper_tiles.by_rule(problem(m, n, 4096))
    assert tile is not None
    assert tile.staged
    return tile.bm, tile.bn


# K, N, M, and the tile that was fastest there by at least 3 % on an H200 (benchmarks/LOG.md, 33 and 35)
BETWEEN = [
    (4096, 6144, 384, (128, 128)),
    (4096, 4096, 1152, (128, 128)),
    (8192, 8192, 640, (128, 128)),
    (8192, 8192, 896, (128, 128)),
    (4096, 28672, 896, (128, 256)),
    (14336, 4096, 896, (128, 256)),
    (3584, 18944, 640, (128, 256)),
    (3584, 18944, 896, (128, 256)),
    # in two parts
    (4096, 28672, 72, (96, 256)),
    (28672, 8192, 96, (96, 256)),
    (8192, 8192, 160, (160, 128)),
    (14336, 4096, 160, (160, 128)),
    (3584, 18944, 160, (160, 128)),
    (4096, 6144, 176, (192, 64)),
    (8192, 8192, 192, (192, 64)),
    (28672, 8192, 192, (192, 128)),
    (4096, 28672, 192, (192, 128)),
    (4096, 6144, 320, (160, 128)),
    (8192, 8192, 320, (160, 128)),
    (4096, 28672, 300, (160, 128)),
    (8192, 8192, 384, (192, 128)),
    (4096, 4096, 384, (192, 64)),
    (14336, 4096, 768, (192, 128)),
    # not: few columns, few rows
    (4096, 4096, 96, (128, 64)),
    (4096, 6144, 96, (128, 64)),
    (4096, 6144, 384, (128, 128)),
    (4096, 6144, 448, (128, 128)),
    (4096, 28672, 768, (256, 128)),
]


@pytest.mark.parametrize(("k", "n", "m", "best"), BETWEEN)
def test_between_the_powers_of_two(k: int, n: int, m: int, best: tuple[int, int]) -> None:
    """What was measured at the next power of two is no guide where other tiles fit so many rows better."""
    tile = hopper_tiles.choose(problem(m, n, k))
    assert tile is not None
    assert (tile.bm, tile.bn) in {best, best[::-1]}


@pytest.mark.parametrize("m", range(257, 2100, 37))
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (4096, 14336)])
def test_more_rows_never_make_the_busiest_program_do_less(m: int, n: int, k: int) -> None:
    """In products, whatever the tile: as long as a chunk of it takes."""
    tiles = [hopper_tiles._staged(bm, bn) for bm, bn in hopper_tiles.LARGE]
    few, more = (min(hopper_tiles._time(tile, problem(rows, n, k)) for tile in tiles) for rows in (m, m + 128))
    assert few <= more


@pytest.mark.parametrize(("bm", "want"), [(96, (64, 32)), (128, (128, 0)), (160, (128, 32)), (192, (128, 64))])
def test_rows_in_two_parts(bm: int, want: tuple[int, int]) -> None:
    assert hopper_tiles.two_parts(bm) == want


@pytest.mark.parametrize("m", BUCKETS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_two_parts_stay_out_of_what_was_measured(m: int, n: int, k: int) -> None:
    tile = hopper_tiles.choose(problem(m, n, k))
    assert tile is not None
    assert hopper_tiles.two_parts(tile.bm)[1] == 0


@pytest.mark.parametrize(("bm", "warps"), [(160, 8), (192, 4)])
@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize("n", [4096, 6144, 18944, 28672])
def test_tiles_in_two_parts_share_too(bm: int, warps: int, n: int, resident: int) -> None:
    """With counters for both parts, and sums as large as both."""
    tile = hopper_tiles._wide(bm, 16 * warps, 4, warps, 168, resident, False, depth=4)
    p = problem(300, n, 4096)
    programs = hopper_tiles.programs(tile, p)
    assert 2 * programs * warps <= hopper_tiles.COUNTERS * SMS
    plan = hopper.make_plan(tile, p, torch.float16, asym=False, bias=False)
    shared = plan.sizes[3] > 0
    assert shared == (-(-300 // bm) * (n // tile.bn) % programs != 0)
    assert plan.share == (2 * programs * bm * tile.bn if shared else 0)


def test_a_tile_in_two_parts_wants_as_many_rows_as_its_rest() -> None:
    tile = hopper_tiles._wide(160, 64, 4, 4, 168, 1, False, depth=4)
    plan = hopper.make_plan(tile, problem(40, 4096, 4096), torch.float16, asym=False, bias=False)
    assert plan.layouts[0][0] == [1, 32, 64], "parts of x that 40 rows have"
    with pytest.raises(ValueError, match="it takes 32 rows at least"):
        hopper.make_plan(tile, problem(31, 4096, 4096), torch.float16, asym=False, bias=False)


def test_whole_waves_where_tiles_divide() -> None:
    """256 tiles: two waves of 128 programs, nothing shared; 896 are seven; of 448 a few are, so that none idles."""
    tile = hopper_tiles.Tile("wide", 256, 128, 4, 3, 8, 168, 1, False, 12)
    assert hopper_tiles.programs(tile, problem(1024, 8192, 28672)) == 128
    assert hopper_tiles.programs(tile, problem(1024, 28672, 4096)) == 128
    assert hopper_tiles.programs(tile, problem(512, 28672, 4096)) == 132
    assert hopper_tiles.programs(tile, problem(4096, 28672, 4096)) == 132


def test_whole_shares_where_tiles_are_few() -> None:
    p = problem(1, 4096, 14336)
    tile = hopper_tiles.choose(p)
    assert tile is not None
    assert hopper_tiles.programs(tile, p) % -(-p.n // tile.bn) == 0


def test_fields_of_a_tile_are_data() -> None:
    tile = hopper_tiles.choose(problem(1, 4096, 4096))
    assert tile is not None
    assert hopper_tiles.Tile(**json.loads(json.dumps(dataclasses.asdict(tile)))) == tile
