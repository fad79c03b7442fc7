"""Which tiles and steps of K a program of the Hopper kernels works on: whole tiles in turn, then a share of the rest.

The loader, the messenger and the warps that multiply walk the same steps, each for itself; see :mod:`.hopper_kernels`.
``total`` are the steps of the tiles that are shared, ``steps`` those of one tile, ``waves`` a program's whole tiles;
``sharing`` programs share, each an equal run of the steps, the first of them.
Tiles are counted down ``band`` tiles of rows of x, then along the columns of W, then the next band: programs that run
together read few rows of x and few columns of W, which the L2 holds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def share(steps, total, waves, sharing):
    """First and last (exclusive) of the shared steps that are this program's, and how many steps it has in all."""
    pid = gl.program_id(0)
    first = gl.minimum(pid, sharing) * total // sharing
    last = gl.minimum(pid + 1, sharing) * total // sharing
    return first, last, waves * steps + last - first


@gluon.jit
def first_step(begin, steps, waves):
    """Tile and step of K with which a program starts, whose share of the rest starts at step ``begin`` of that."""
    return gl.where(waves > 0, gl.program_id(0), begin // steps), gl.where(waves > 0, 0, begin % steps)


@gluon.jit
def next_step(i_tile, i_step, begin, steps, waves):
    """Those after a step."""
    programs = gl.num_programs(0)
    whole = waves * programs
    n_tile = i_tile + gl.where(i_tile < whole, programs, 1)
    crosses = (i_tile < whole) & (n_tile >= whole)
    n_tile = gl.where(crosses, whole + begin // steps, n_tile)
    n_step = gl.where(crosses, begin % steps, 0)
    ends = i_step + 1 == steps
    return gl.where(ends, n_tile, i_tile), gl.where(ends, n_step, i_step + 1)


@gluon.jit
def visits(first, last, steps, waves):
    """How many tiles a program works on."""
    return waves + (last + steps - 1) // steps - first // steps


@gluon.jit
def visit(i, first, last, steps, waves):
    """The ``i``-th tile of a program: which, which of those that are shared, and the program's steps for it."""
    programs = gl.num_programs(0)
    i_shared = first // steps + i - waves
    i_tile = gl.where(i < waves, gl.program_id(0) + i * programs, waves * programs + i_shared)
    before = waves * steps - first
    begin = gl.where(i < waves, i * steps, before + gl.maximum(first, i_shared * steps))
    end = gl.where(i < waves, (i + 1) * steps, before + gl.minimum(last, (i_shared + 1) * steps))
    return i_tile, i_shared, begin, end


@gluon.jit
def place(i_tile, tiles_m, tiles_n, band):
    """Which columns of W and which rows of x a tile is of, in tiles."""
    i_band = i_tile // (band * tiles_n)
    rest = i_tile % (band * tiles_n)
    rows = gl.minimum(band, tiles_m - i_band * band)
    return rest // rows, i_band * band + rest % rows
