"""Which tiles and steps of K a program of the Hopper kernels works on: the kernels' own arithmetic, run as Python.

The loader and the warps that multiply walk the steps each for themselves. Where they part, one waits for ever.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from w4plugin.kernels import hopper_tiles

Step = tuple[int, int]
SHAPES = [(448, 112, 32), (448, 132, 32), (96, 96, 32), (96, 132, 32), (7168, 132, 64), (64, 256, 32), (1, 1, 1)]
"""Tiles, programs and steps of a tile, as real layers have them: waves alone, a rest alone, both."""


def plain(function: Any, pid: int, programs: int) -> Callable[..., Any]:
    """A function of the kernels as one program runs it."""
    language = SimpleNamespace(
        where=lambda condition, yes, no: yes if condition else no,
        minimum=min,
        maximum=max,
        program_id=lambda axis: pid,
        num_programs=lambda axis: programs,
    )
    return FunctionType(function.fn.__code__, {**function.fn.__globals__, "gl": language})


def walked(pid: int, programs: int, tiles: int, steps: int) -> tuple[list[Step], list[Step]]:
    """The (tile, step) pairs of one program: as the loader asks for them, and as the others multiply them."""
    from w4plugin.kernels import hopper_shares as shares

    share, first_step, next_step, visits, visit = (
        plain(function, pid, programs)
        for function in (shares.share, shares.first_step, shares.next_step, shares.visits, shares.visit)
    )
    waves = hopper_tiles.waves(tiles, programs)
    first, last, count = share(steps, (tiles - waves * programs) * steps, waves)

    loaded = [first_step(first, steps, waves)]
    for _ in range(count - 1):
        loaded.append(next_step(*loaded[-1], first, steps, waves))

    multiplied: list[Step] = []
    for i in range(visits(first, last, steps, waves)):
        tile, shared, begin, end = visit(i, first, last, steps, waves)
        assert begin == len(multiplied), "steps are counted without a gap, or a stage is released twice or never"
        start = 0 if i < waves else max(first - shared * steps, 0)
        multiplied += [(tile, start + step) for step in range(end - begin)]
    assert len(multiplied) == count
    return loaded[:count], multiplied


def check(tiles: int, programs: int, steps: int) -> None:
    seen: set[Step] = set()
    for pid in range(programs):
        loaded, multiplied = walked(pid, programs, tiles, steps)
        assert loaded == multiplied, f"program {pid}"
        assert not seen.intersection(multiplied)
        seen.update(multiplied)
    assert seen == {(tile, step) for tile in range(tiles) for step in range(steps)}


@pytest.mark.cpu_only
@pytest.mark.parametrize(("tiles", "programs", "steps"), SHAPES)
def test_every_step_is_walked_once_and_by_all_in_one_order(tiles: int, programs: int, steps: int) -> None:
    check(tiles, programs, steps)


@pytest.mark.cpu_only
def test_any_numbers() -> None:
    draw = random.Random(7)
    for _ in range(500):
        tiles, steps = draw.randint(1, 90), draw.randint(1, 9)
        check(tiles, min(draw.randint(1, 40), tiles * steps), steps)


@pytest.mark.cpu_only
def test_a_rest_is_cut_into_few_parts() -> None:
    """More than a tile for each program, or nothing: so a program shares at most the tiles it begins and ends in."""
    draw = random.Random(8)
    for _ in range(2000):
        tiles, programs = draw.randint(1, 5000), draw.randint(1, 400)
        rest = tiles - hopper_tiles.waves(tiles, programs) * programs
        assert rest == 0 or rest > programs or rest == tiles


@pytest.mark.cpu_only
@pytest.mark.parametrize("band", [1, 3, 4, 100])
def test_a_tile_has_a_place_of_its_own_in_a_band(band: int) -> None:
    from w4plugin.kernels import hopper_shares as shares

    place = plain(shares.place, 0, 1)
    for tiles_m, tiles_n in ((1, 7), (4, 5), (10, 3), (12, 4)):
        places = [place(i, tiles_m, tiles_n, band) for i in range(tiles_m * tiles_n)]
        assert sorted(places) == [(n, m) for n in range(tiles_n) for m in range(tiles_m)]
        assert [m // band for _, m in places] == sorted(m // band for _, m in places), "a band comes after the other"
        whole = band * tiles_n * (tiles_m // band)
        for i in range(0, whole, band):
            assert {n for n, _ in places[i : i + band]} == {places[i][0]}, "columns of W are read by neighbours"
