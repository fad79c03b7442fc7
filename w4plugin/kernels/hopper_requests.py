"""Which rows of x a Hopper kernel asks TMA for, and of K's last chunk how much.

A request may reach past the end of x, and TMA then writes rows of 0; but those take it longer than rows that are there.
"""

from __future__ import annotations

from w4plugin.kernels.hopper_tiles import CHUNK, Tile, two_parts
from w4plugin.kernels.tiles import Problem

MISSING, PRESENT = 15, 3
"""Cycles in which TMA writes a chunk's part of a row that x does not have, as 0, and of one that it has. Read off times
between the powers of two: 256 x 64 with 96 rows missing took twice as long as with none (benchmarks/LOG.md, 33)."""


def one_row(tile: Tile, p: Problem) -> bool:
    """Whether x has one row, and that is all that is loaded of it: every row of the operand then is that one.

    The seven that it does not have would take TMA twice as long as a chunk's words: 5 % of a call on large layers.
    """
    return tile.kind == "narrow" and p.m == 1


def edges(tile: Tile, p: Problem, shared: bool) -> tuple[bool, int]:
    """Whether only half of K's last chunk is multiplied, and of how many rows parts of x are that stay inside it, or 0.

    Half a chunk takes tiles that are all whole, of at least a chunk and a half. Parts are half a tile's rows, and pay
    where the rows that x does not have would take TMA longer than the chunk takes the rest; a tile in two parts is
    always loaded in parts of its rest. x must have as many rows as a part.
    """
    rest = two_parts(tile.bm)[1]
    part = rest or tile.bm // 2
    if tile.kind != "wide" or p.m < part:
        return False, 0
    tail = not tile.on_sum and not shared and p.k > CHUNK and 0 < p.k % CHUNK <= CHUNK // 2
    missing = -p.m % tile.bm
    loading = MISSING * missing + PRESENT * (tile.bm - missing)
    # the tensor cores' time for the products, or the memory's for the words
    chunk = max(tile.bm * tile.bn / 16, 3.3 * tile.bn)
    # of several tiles of rows one is slow
    slow = missing > 0 and loading > chunk * (1.15 if p.m > tile.bm else 1)
    return tail, part if rest or tail or slow else 0
