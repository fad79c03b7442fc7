"""Stages of shared memory handed back and forth between the warps of a Hopper kernel: on the device alone.

The tiles have the fewest stages and most programs that fit, and shapes that keep the loader at the heels of the warps
that multiply; some with whole waves of tiles and a rest, some (1024 x 16896: 1056 tiles, eight waves) with waves alone,
some with the rest alone. An arrival that overtook a load from shared memory showed here as some columns of some tiles
in every run of the first, and in one run of ten of the second.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from w4plugin import kernels
from w4plugin.kernels import hopper, portable
from w4plugin.kernels.hopper_tiles import Tile
from w4plugin.tensor import W4Tensor

TILES = [
    (8192, 57344, 64, Tile("wide", 64, 64, 2, 3, 4, 80, 3, True, 12)),
    (4096, 28672, 512, Tile("wide", 128, 64, 2, 3, 4, 128, 2, True, 12)),
    (8192, 57344, 64, Tile("wide", 64, 64, 2, 4, 4, 80, 2, True, 12)),
    (4096, 28672, 1024, Tile("wide", 256, 128, 4, 3, 8, 168, 1, False, 12)),
    (4096, 28672, 384, Tile("wide", 128, 256, 4, 2, 8, 168, 1, False, 12)),
    (8192, 57344, 2048, Tile("wide", 128, 256, 4, 4, 8, 168, 1, False, 12)),
    (1024, 16896, 1024, Tile("wide", 128, 128, 2, 3, 8, 168, 1, False, 12)),
    (28672, 8192, 100, Tile("wide", 128, 64, 4, 4, 4, 168, 1, False, 12)),
    (4096, 4096, 3000, Tile("wide", 256, 64, 2, 2, 4, 168, 1, False, 12)),
    # stored by TMA: eight chunks a tile; edges in both directions; a single chunk; shared tiles among them
    (1024, 16896, 1024, Tile("wide", 128, 128, 4, 4, 8, 168, 1, False, 12, 0, True)),
    (4096, 28688, 1000, Tile("wide", 128, 256, 4, 3, 8, 168, 1, False, 12, 0, True)),
    (128, 8208, 1030, Tile("wide", 256, 128, 2, 2, 8, 168, 1, False, 12, 0, True)),
    (4096, 6144, 900, Tile("wide", 128, 64, 2, 2, 4, 128, 2, False, 12, 250, True)),
    # sent from the stage of x that was a tile's last, which comes back later: many tiles, few stages
    (4096, 28672, 1024, Tile("wide", 256, 128, 4, 3, 8, 168, 1, False, 12, 0, True)),
    (256, 8208, 2000, Tile("wide", 256, 64, 4, 2, 4, 168, 1, False, 12, 0, True)),
    (14336, 4096, 512, Tile("wide", 256, 64, 4, 3, 4, 168, 1, False, 12, 0, True)),
    # tiles left after whole ones: 60 of them, two programs for each; 32 and 14, runs, with the edge of N; 64, two
    (4096, 6144, 512, Tile("wide", 128, 128, 4, 4, 8, 168, 1, False, 12, 132, True)),
    (3584, 18944, 250, Tile("wide", 128, 128, 4, 4, 8, 168, 1, False, 12, 132, True)),
    (8192, 17680, 200, Tile("wide", 128, 256, 4, 3, 8, 168, 1, False, 12, 126, True)),
    (3584, 18944, 500, Tile("wide", 128, 128, 4, 4, 8, 168, 1, False, 12, 132, True)),
    # rows that are no whole tiles, loaded in parts that overlap: few of them, all but one, on a shared tile's edge
    (8192, 57344, 40, Tile("wide", 64, 64, 2, 3, 4, 80, 3, True, 12)),
    (4096, 28672, 17, Tile("wide", 32, 64, 2, 4, 4, 128, 2, True, 12)),
    (4096, 6144, 129, Tile("wide", 256, 64, 4, 3, 4, 168, 1, False, 12, 132)),
    (4096, 28672, 1025, Tile("wide", 256, 128, 4, 3, 8, 168, 1, False, 12, 0, True)),
    # half a chunk at the end of K: of few steps, many tiles, sent from the stage of x, with few rows
    (192, 8448, 100, Tile("wide", 128, 64, 2, 2, 4, 128, 2, False, 12)),
    (576, 16896, 1024, Tile("wide", 128, 128, 4, 4, 8, 168, 1, False, 12, 0, True)),
    (576, 16896, 1000, Tile("wide", 256, 128, 4, 3, 8, 168, 1, False, 12, 0, True)),
    (4160, 8192, 512, Tile("wide", 128, 256, 2, 3, 8, 168, 1, False, 12, 64, True)),
    (576, 1536, 160, Tile("wide", 256, 64, 4, 3, 4, 168, 1, False, 12)),
    # rows in two parts, each with sums of its own: one tile, two, an edge; two programs a multiprocessor; half a chunk
    (8192, 8192, 160, Tile("wide", 160, 64, 4, 4, 4, 168, 1, False, 12)),
    (4096, 28672, 300, Tile("wide", 160, 128, 4, 4, 8, 168, 1, False, 12)),
    (4096, 28672, 500, Tile("wide", 192, 128, 4, 2, 8, 168, 1, False, 12)),
    (8192, 57344, 72, Tile("wide", 96, 256, 4, 3, 8, 168, 1, False, 12)),
    (4096, 28672, 150, Tile("wide", 160, 64, 2, 2, 4, 128, 2, False, 12)),
    (576, 16896, 193, Tile("wide", 192, 64, 4, 3, 4, 168, 1, False, 12)),
    # shared: by two with their sums of both parts, one of which is too small for that; by three; runs; after whole ones
    (8192, 8192, 160, Tile("wide", 160, 128, 4, 4, 8, 168, 1, False, 12, 128)),
    (14336, 4096, 190, Tile("wide", 192, 64, 4, 3, 4, 168, 1, False, 12, 128)),
    (14336, 2048, 320, Tile("wide", 160, 128, 4, 4, 8, 168, 1, False, 12, 96)),
    (4096, 6160, 288, Tile("wide", 96, 256, 4, 3, 8, 168, 1, False, 12, 132)),
    (3584, 18944, 192, Tile("wide", 192, 128, 4, 3, 8, 168, 1, False, 12, 132)),
    # one row of x, which is all that is loaded of it
    (8192, 57344, 1, Tile("narrow", 8, 64, 2, 2, 4, 128, 2, True, 12)),
    (4096, 28672, 1, Tile("narrow", 8, 128, 1, 3, 8, 80, 2, True, 12)),
    (8192, 57344, 8, Tile("narrow", 8, 64, 4, 2, 4, 80, 3, True, 12)),
    (4096, 28672, 8, Tile("narrow", 8, 64, 1, 3, 4, 80, 3, True, 12)),
]


def _weight(k: int, n: int, device: torch.device) -> W4Tensor:
    g = torch.Generator(device).manual_seed(k + n)
    words = torch.randint(-(2**31), 2**31, (k // 8, n), generator=g, device=device, dtype=torch.int64)
    group = 64 if k % 128 else 128
    scales = (torch.rand(k // group, n, generator=g, device=device) + 0.5) * 0.01
    return W4Tensor(words.to(torch.int32), scales.half(), None, None, group)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "n", "m", "tile"), TILES)
def test_every_run_gives_the_same_right_bits(k: int, n: int, m: int, tile: Tile, device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the kernels are sm_90's")
    weight = _weight(k, n, device)
    q = kernels.prepare(weight, dtype=torch.float16, backend="hopper")
    x = torch.randn(m, k, device=device, generator=torch.Generator(device).manual_seed(m)).half()
    group = weight.group_size
    plan = hopper.make_plan(tile, portable.problem(x, q.scales, None, n, group), torch.float16, False, False)

    def run() -> Tensor:
        return hopper.multiply(plan, x, q.qweight, q.scales, None, None, q.counters, None, n, group)

    first = run()
    want = x.double() @ weight.dequantize(torch.float64)
    sums = x.abs().double() @ weight.dequantize(torch.float64).abs()
    # float32 sums of K products, weights rounded once where scales multiply them, and the output rounded
    bound = sums * ((k + 16) * 2.0**-23 + (0 if tile.on_sum else 2.0**-11)) + want.abs() * 2.0**-11 + 2.0**-25
    assert bool(((first.double() - want).abs() <= bound).all())
    for i in range(30):
        assert torch.equal(run(), first), f"run {i} differs from the first"
