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
SHAPES = [
    (448, 112, 32), (448, 132, 32), (192, 132, 32), (896, 132, 32), (96, 96, 32), (96, 132, 32), (7168, 132, 64),
    (64, 256, 32), (1, 1, 1),
]  # fmt: skip
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


def walked(pid: int, programs: int, tiles: int, steps: int, even: bool) -> tuple[list[Step], list[Step]]:
    """The (tile, step) pairs of one program: as the loader asks for them, and as the others multiply them."""
    from w4plugin.kernels import hopper_shares as shares

    share, first_step, next_step, visits, visit = (
        plain(function, pid, programs)
        for function in (shares.share, shares.first_step, shares.next_step, shares.visits, shares.visit)
    )
    waves, sharing = hopper_tiles.division(tiles, programs, steps, even)
    first, last, count = share(steps, (tiles - waves * programs) * steps, waves, sharing)

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


def check(tiles: int, programs: int, steps: int, even: bool) -> None:
    seen: set[Step] = set()
    workers: dict[int, list[int]] = {}
    for pid in range(programs):
        loaded, multiplied = walked(pid, programs, tiles, steps, even)
        assert loaded == multiplied, f"program {pid}"
        assert not seen.intersection(multiplied)
        seen.update(multiplied)
        for tile in dict.fromkeys(tile for tile, _ in multiplied):
            workers.setdefault(tile, []).append(pid)
    assert seen == {(tile, step) for tile in range(tiles) for step in range(steps)}
    check_sums(workers, tiles, programs, steps, even)


def check_sums(workers: dict[int, list[int]], tiles: int, programs: int, steps: int, even: bool) -> None:
    """Those who work on a tile are those who sum it, and no two sums are kept in one place, or counted in one."""
    from w4plugin.kernels import hopper_sums as sums

    sharers, slot = (plain(function, 0, programs) for function in (sums.sharers, sums._slot))
    waves, sharing = hopper_tiles.division(tiles, programs, steps, even)
    total = (tiles - waves * programs) * steps
    slots: list[int] = []
    counters: list[int] = []
    for tile, pids in workers.items():
        shared = tile - waves * programs
        first, last = sharers(shared, steps, total, sharing, shared >= 0)
        if shared < 0:
            assert len(pids) == 1
            assert first == last
            continue
        assert list(range(first, last + 1)) == pids
        if len(pids) > 1:
            slots += [slot(pid, shared, steps, total, sharing) for pid in pids]
            counters.append(first)
    assert len(set(slots)) == len(slots)
    assert all(0 <= at < 2 * programs for at in slots)
    assert len(set(counters)) == len(counters)


@pytest.mark.cpu_only
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize(("tiles", "programs", "steps"), SHAPES)
def test_every_step_is_walked_once_and_by_all_in_one_order(tiles: int, programs: int, steps: int, even: bool) -> None:
    check(tiles, programs, steps, even)


@pytest.mark.cpu_only
def test_any_numbers() -> None:
    draw = random.Random(7)
    for _ in range(500):
        tiles, steps = draw.randint(1, 90), draw.randint(1, 40)
        check(tiles, min(draw.randint(1, 40), tiles * steps), steps, draw.random() < 0.7)


@pytest.mark.cpu_only
def test_a_rest_is_cut_into_few_parts() -> None:
    """Nothing; or more than a tile a program, which then has parts of its first and last; or one part of one tile."""
    draw = random.Random(8)
    found = {"nothing": 0, "runs": 0, "parts": 0}
    for _ in range(2000):
        tiles, programs = draw.randint(1, 5000), draw.randint(1, 400)
        waves, sharing = hopper_tiles.division(tiles, programs, draw.randint(1, 300), draw.random() < 0.7)
        rest = tiles - waves * programs
        if rest == 0 or rest >= programs or not waves:
            found["runs" if rest else "nothing"] += 1
            assert sharing == programs
        else:
            found["parts"] += 1
            assert sharing <= programs
            assert sharing % rest == 0
            assert sharing // rest == min(hopper_tiles.MOST, programs // rest)
    assert min(found.values()) > 20


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
