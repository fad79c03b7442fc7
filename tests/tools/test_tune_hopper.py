"""How tools/tune compares tiles, without a GPU."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from w4plugin.kernels import hopper_tiles
from w4plugin.kernels.tiles import Problem


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "tools")
    sys.modules.pop("tune_hopper", None)
    import tune_hopper

    return tune_hopper


def test_rounds_begin_with_another_tile_each(tune: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device rests before every time; a tile that fails once is out; the median decides, the fastest first."""
    a, b, c = tune.variants(1024)[:3]
    turns = {a: [9.0, 1.0, 8.0], b: [7.0, 7.0, 7.0], c: [1.0, None, 1.0]}
    order: list[object] = []
    rests: list[float] = []

    def timed(tile: object, factor: float) -> float | None:
        order.append(tile)
        return turns[tile][order.count(tile) - 1]

    empty = torch.empty(0)
    point = tune.Point(empty, empty, [], 128, 3, 200)
    monkeypatch.setattr(point, "time", timed)
    monkeypatch.setattr(time, "sleep", rests.append)
    assert point.rounds([a, b, c, a], 3) == [(7.0, b), (8.0, a)]
    assert order == [a, b, c, b, c, a, c, a, b]
    assert rests == [0.2] * 9


def test_variants_fit_a_multiprocessor(tune: ModuleType) -> None:
    for m in (8, 64, 128, 160, 1024):
        problem = Problem(m, 28672, 4096, 128, True, "sm_90", 132)
        found = tune.variants(m)
        assert any(tile.staged for tile in found) == (m >= 128)
        assert any(tile.bm in tune.BETWEEN for tile in found) == (m == 160), "rows that no power of two fits"
        for tile in found:
            assert hopper_tiles.legal(tile, problem) == tile, tune.brief(tile)
            assert tile.stages <= hopper_tiles.deepest(tile.warps) or tile.kind == "narrow"
            assert tile.bn >= 16 * tile.warps, "each warp has columns"
            assert tile.resident * 32 * (tile.warps + 4) * tile.registers <= tune.REGISTERS
