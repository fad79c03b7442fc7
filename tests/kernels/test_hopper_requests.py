"""What the Hopper kernels ask TMA for: pure functions too."""

from __future__ import annotations

import pytest
import torch

from w4plugin.kernels import hopper, hopper_requests, hopper_tiles
from w4plugin.kernels.tiles import Problem

EDGES = [
    # tile, rows, K, whether tiles are shared -> half a chunk at the end, rows of parts of x inside its bounds
    ((128, 128, False), 1024, 4096, False, (False, 0)),
    ((128, 128, False), 1030, 4096, False, (False, 64)),
    ((128, 128, False), 1000, 4096, False, (False, 0)),  # 24 rows that x does not have cost nothing
    ((128, 128, False), 64, 4096, False, (False, 64)),
    ((128, 128, False), 63, 4096, False, (False, 0)),  # fewer rows than a part
    ((128, 128, False), 1024, 576, False, (True, 64)),
    ((128, 128, False), 1024, 576, True, (False, 0)),  # a shared tile may end elsewhere
    ((128, 128, False), 1024, 64, False, (False, 0)),  # a tile's first chunk must be whole
    ((128, 128, False), 1024, 640 + 65, False, (False, 0)),  # more than half a chunk
    ((64, 64, True), 40, 576, False, (False, 32)),  # scales that meet sums
    ((160, 128, False), 320, 4096, False, (False, 32)),  # rows in two parts, always
    ((192, 128, False), 150, 576, False, (True, 64)),
    ((160, 128, False), 40, 4096, False, (False, 32)),
    ((160, 128, False), 31, 4096, False, (False, 0)),
]


@pytest.mark.parametrize(("size", "m", "k", "shared", "want"), EDGES)
def test_edges(size: tuple[int, int, bool], m: int, k: int, shared: bool, want: tuple[bool, int]) -> None:
    bm, bn, on_sum = size
    tile = hopper_tiles._wide(bm, bn, 4, 8, 168, 1, on_sum)
    assert hopper_requests.edges(tile, Problem(m, 4096, k, 64, True, "sm_90", 132), shared) == want
    narrow = hopper_tiles._narrow(16, 64, 4, 3, 4, 128)
    assert hopper_requests.edges(narrow, Problem(9, 4096, k, 64, True, "sm_90", 132), shared) == (False, 0)


@pytest.mark.parametrize(("m", "rows"), [(1, 1), (2, 8), (8, 8)])
def test_of_one_row_that_is_all_that_is_loaded(m: int, rows: int) -> None:
    """TMA takes longer for seven rows that x does not have than for a chunk's words."""
    p = Problem(m, 4096, 4096, 128, True, "sm_90", 132)
    tile = hopper_tiles.choose(p)
    assert tile is not None
    plan = hopper.make_plan(tile, p, torch.float16, asym=False, bias=False)
    assert plan.layouts[0][0] == [2 * tile.depth, rows, 64]
