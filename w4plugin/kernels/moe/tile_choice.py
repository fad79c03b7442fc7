"""Which tiles a layer of experts runs in: a pure function of sizes, nothing is tried out at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from w4plugin.kernels import tiles
from w4plugin.kernels.tiles import Problem, Tile

CHUNKS = (128, 256)
"""Pairs that one program of the sort takes: it compares each with all, so few are fast; it counts over all chunks, so
many pairs are cut into larger ones."""

INLINE = 64
"""Up to so many pairs programs find their rows themselves; more are sorted first."""

ALONE = 1.15
"""Up to so many pairs to an expert, on average over the experts that have any, every pair is a program's only row."""


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
        pairs: how programs find their rows, as ``product_kernel`` has it: 0 sorted, 1 alone, else by comparing so many.
    """

    first: Tile
    second: Tile
    pairs: int


def choose(load: Load, first: Problem, second: Problem) -> Layout:
    """Tiles for a layer; the problems' ``m`` is not read.

    Sizes alone decide, so the same call has the same bits; rows of one expert may move between tiles of other sizes
    when the number of tokens changes, which changes the last bit of a sum.
    """
    bm = _rows(load, first.arch)
    return Layout(tile(load, bm, first, True), tile(load, bm, second, False), _pairs(load))


def _pairs(load: Load) -> int:
    if load.pairs > INLINE:
        return 0
    return 1 if load.rows <= ALONE else max(16, power_of_two(load.pairs))


def _rows(load: Load, arch: str) -> int:
    """BM: uneven routing gives some experts twice their share, and half-empty tiles cost little while memory is the
    limit; from 64 rows on the tensor cores are, and tiles should be full. On an H200 16 rows were never the best."""
    if load.rows <= 7:
        return 8 if arch.startswith("sm_") else 16
    return next((bm for bm, most in ((32, 40), (64, 96)) if load.rows <= most), 128)


def tile(load: Load, bm: int, p: Problem, first: bool) -> Tile:
    """The tile of one of the two products for ``bm`` rows of x."""
    p = replace(p, m=bm)
    cuda = p.arch.startswith("sm_")
    blocks = -(-p.k // 64)

    def programs(columns: int) -> float:
        """Programs to a multiprocessor, when each takes so many columns."""
        return load.pairs / load.rows * -(-p.n // columns) / p.sms

    if bm <= 16 and cuda:
        found = Tile(bm, 64, 2, 1, 4, 3, True, pdl=True)
        if programs(64) < 6:  # too few to fill it: fewer columns, and warps share K
            warps, unroll = _parts(blocks, programs(32) >= 4)
            found = Tile(bm, 32, unroll, 1, warps, 3, True, k_warps=warps, pdl=True)
    elif bm <= 16:
        found = Tile(16, 64, 2, 1, 4, 3, True)
    elif bm == 32:
        found = Tile(32, 128, 2, 1, 4, 3, True, pdl=True)
    elif tiles.asynchronous(p.arch):
        found = Tile(bm, 128, 2, 1, 8, 3, True, pdl=True)
        if bm == 64:  # the second product's weights of tokens leave no registers for 128 columns
            found = Tile(64, 128 if first and programs(128) >= 6 else 64, 2, 1, 4, 3, True, pdl=True)
    else:
        found = Tile(64, 128, 1, 1, 4, 4, False) if bm == 64 else Tile(128, 128, 1, 1, 8, 4, False)
    return replace(tiles.fit(found, p), split=1)


def chunk(pairs: int) -> int:
    """Pairs to a program of the sort."""
    return CHUNKS[0] if pairs <= 2048 else CHUNKS[1]


def power_of_two(n: int) -> int:
    """The least power of two of at least n."""
    return 1 << (n - 1).bit_length()


def _parts(blocks: int, many: bool) -> tuple[int, int]:
    """(warps that share K, blocks a step) that leave the fewest places of a step empty; of equals the largest step.

    Where programs are many, four warps each: what a program spends before and after its loop, it spends a warp.
    """
    choices = ((4, 2), (4, 1)) if many else ((8, 2), (8, 1), (4, 2), (4, 1))
    return min(choices, key=lambda c: -(-blocks // (c[0] * c[1])) * c[0] * c[1])
