"""Which tiles a layer of experts runs in: a pure function of sizes, nothing is tried out at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from w4plugin.kernels import tiles
from w4plugin.kernels.tiles import Problem, Tile

CHUNK = 256
"""Pairs that one program of the sort takes."""

PAIRS = 64
"""Up to so many pairs programs find their rows themselves; more are sorted first."""

BUCKETS = (8, 16, 32, 64)
"""Rows of one expert that a program takes, below the largest; the largest follows the architecture."""


@dataclass(frozen=True)
class Load:
    """How much work a call is.

    Attributes:
        pairs: tokens times topk.
        experts: held here.
    """

    pairs: int
    experts: int

    @property
    def rows(self) -> float:
        """Rows an expert gets that gets any, when routing is even."""
        missed = (1 - 1 / self.experts) ** self.pairs
        return self.pairs / (self.experts * (1 - missed))

    def blocks(self, bm: int) -> int:
        """The most blocks of ``bm`` rows that any routing makes of the pairs."""
        hit = min(self.pairs, self.experts)
        return (self.pairs + hit * (bm - 1)) // bm


@dataclass(frozen=True)
class Layout:
    """Tiles of both products, with one ``bm``.

    Attributes:
        first, second: tiles as the portable kernel has them; ``split`` is always 1.
        inline: programs find their rows themselves.
    """

    first: Tile
    second: Tile
    inline: bool


def choose(load: Load, first: Problem, second: Problem) -> Layout:
    """Tiles for a layer; the problems' ``m`` is not read.

    Sizes alone decide, so the same call has the same bits; rows of one expert may move between tiles of other sizes
    when the number of tokens changes, which changes the last bit of a sum.
    """
    bm = _rows(load, first.arch)
    inline = load.pairs <= PAIRS
    return Layout(_tile(bm, replace(first, m=bm)), _tile(bm, replace(second, m=bm)), inline)


def _rows(load: Load, arch: str) -> int:
    """BM: uneven routing gives some experts twice their share, and half-empty tiles cost little while memory is the
    limit; from 64 rows on the tensor cores are, and tiles should be full."""
    least = 8 if arch.startswith("sm_") else 16
    for bm, most in ((8, 3), (16, 10), (32, 24), (64, 96)):
        if load.rows <= most:
            return max(bm, least)
    return 128


def _tile(bm: int, p: Problem) -> Tile:
    cuda = p.arch.startswith("sm_")
    blocks = -(-p.k // 64)
    if bm <= 16 and cuda:
        warps, unroll = _parts(blocks)
        tile = Tile(bm, 32, unroll, 1, warps, 3, True, k_warps=warps, pdl=True)
    elif bm <= 16:
        tile = Tile(16, 64, 2, 1, 4, 3, True)
    elif bm == 32:
        tile = Tile(32, 64, 2, 1, 4, 3, True, pdl=True)
    elif tiles.asynchronous(p.arch):
        tile = Tile(64, 64, 2, 1, 4, 3, True, pdl=True) if bm == 64 else Tile(128, 128, 2, 1, 8, 3, True, pdl=True)
    else:
        tile = Tile(64, 128, 1, 1, 4, 4, False) if bm == 64 else Tile(128, 128, 1, 1, 8, 4, False)
    return replace(tiles.fit(tile, p), split=1)


def _parts(blocks: int) -> tuple[int, int]:
    """(warps that share K, blocks a step) that leave the fewest places of a step empty; of equals the largest step."""
    choices = ((8, 2), (8, 1), (4, 2), (4, 1))
    return min(choices, key=lambda c: -(-blocks // (c[0] * c[1])) * c[0] * c[1])
