"""The sum of a tile that several programs of a Hopper kernel share.

Each warp sums its own rows of the tile with the same warp of the other programs, so no barrier keeps warps in step and
one that is done goes on. The order of the sum is the programs', whichever comes last: the same bits every time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Each warp has a word of its own among the counters, all zero between launches: the low half counts warps that came,
# the high half, where two share a tile, those whose sums can be read.
_WRITTEN = gl.constexpr(0x10000)

PAIRS_FROM = gl.constexpr(64 * 32)
"""Sums of a warp from which not writing them is worth a second count."""

_WORD = """
.reg .pred first;
.reg .b32 lane, value;
.reg .b64 word;
mov.u32 lane, %tid.x;
shr.u32 value, lane, 5;
mad.wide.u32 word, value, 4, $1;
and.b32 lane, lane, 31;
setp.eq.u32 first, lane, 0;
"""
_ADD = """
mov.u32 value, 0;
@first atom.relaxed.gpu.global.add.u32 value, [word], $2;
shfl.sync.idx.b32 $0, value, 0, 31, -1;
"""
# adds nothing, and asks nobody, where the value is 0
_COUNT = gl.constexpr("{" + _WORD + "setp.ne.and.u32 first, $2, 0, first;" + _ADD + "}")
# what all lanes of the warp stored before can be read by whoever sees the count, and the other way round
_PUBLISH = gl.constexpr(
    "{" + _WORD + "bar.warp.sync -1; fence.acq_rel.gpu;" + _ADD + "fence.acq_rel.gpu; bar.warp.sync -1; }"
)
_AWAIT = gl.constexpr(
    "{"
    + _WORD
    + """
again:
ld.acquire.gpu.global.u32 value, [word];
setp.lt.u32 first, value, $2;
@first bra again;
bar.warp.sync -1;
mov.u32 $0, value;
}"""
)
_RESET = gl.constexpr("{" + _WORD + "bar.warp.sync -1; @first st.relaxed.gpu.global.u32 [word], $2; mov.u32 $0, 0; }")


@gluon.jit
def _at(ASM: gl.constexpr, counter, value):
    """An instruction on this warp's word, of those that start at ``counter``; what it gives is the warp's."""
    return gl.inline_asm_elementwise(
        ASM, "=r,l,r", [counter.to(gl.int64), value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _slot(i_program, i_tile, steps, total, sharing):
    """Where a program's sums of a tile are: it shares at most the tile it starts in and the tile it ends in."""
    return 2 * i_program + gl.where((i_program * total // sharing) // steps == i_tile, 0, 1)


@gluon.jit
def _places(BN: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of sums ``[BN / 8, 8, BM / 8, 8]``, each block of 8 x 8 by itself: what a warp stores at a time."""
    D: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    B: gl.constexpr = gl.SliceLayout(2, D)
    o_row = gl.arange(0, BN // 8, gl.SliceLayout(1, B))[:, None] * (8 * BM)
    o_row += gl.arange(0, 8, gl.SliceLayout(0, B))[None, :] * 8
    o_block = o_row[:, :, None] + gl.arange(0, BM // 8, gl.SliceLayout(0, gl.SliceLayout(1, D)))[None, None, :] * 64
    LAST: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    return o_block[:, :, :, None] + gl.arange(0, 8, LAST)[None, None, None, :]


@gluon.jit
def _places_of_one(BN: gl.constexpr, LAYOUT: gl.constexpr):
    """The same for sums ``[BN, 8]``, whose blocks lie so anyway."""
    o_row = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))[:, None] * 8
    return o_row + gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _sum_of_two(blocks, p_mine, p_other, counter, came):
    """a + b is b + a: who comes last adds what the other wrote, and need not write what it holds."""
    whole = came % _WRITTEN == 1
    if whole:
        _at(_AWAIT, counter, _WRITTEN)
        blocks += gl.load(p_other, cache_modifier=".cg")
        _at(_RESET, counter, 0)
    else:
        gl.store(p_mine, blocks, cache_modifier=".cg")
        _at(_PUBLISH, counter, _WRITTEN)
    return blocks, whole


@gluon.jit
def _sum_of_all(blocks, p_sums, o_mine, counter, i_tile, first, last, steps, total, sharing, SIZE: gl.constexpr):
    """Each writes what it holds, and who comes last adds all of them in their order."""
    gl.store(p_sums + o_mine, blocks, cache_modifier=".cg")
    whole = _at(_PUBLISH, counter, 1) == last - first
    if whole:
        blocks = gl.zeros_like(blocks)
        for i in range(first, last + 1):
            blocks += gl.load(p_sums + _slot(i, i_tile, steps, total, sharing) * SIZE, cache_modifier=".cg")
        _at(_RESET, counter, 0)
    return blocks, whole


@gluon.jit
def sharers(i_tile, steps, total, sharing, shared):
    """First and last of the programs that share a tile, of those that are ``shared`` the ``i_tile``-th."""
    begin = i_tile * steps
    first = 0
    last = 0
    if shared:
        first = ((begin + 1) * sharing - 1) // total
        last = ((begin + steps) * sharing - 1) // total
    return first, last


@gluon.jit
def come(counters, first, last, SIZE: gl.constexpr, WARPS: gl.constexpr):
    """Of two programs that share a tile, which this is: asked while the last product runs, as the answer takes long."""
    came = 0
    if SIZE // WARPS >= PAIRS_FROM:
        # no branch: where paths meet the compiler may move sums that a product is still writing
        came = _at(_COUNT, counters + first * WARPS, gl.where(last == first + 1, 1, 0))
    return came


@gluon.jit
def sum_shares(
    acc, partial, counters, came, i_tile, steps, total, sharing, first, last, BN: gl.constexpr, BM: gl.constexpr,
    WARPS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The whole sum of a tile that programs ``first .. last`` share, and whether this warp holds its part of it."""
    SIZE: gl.constexpr = BN * BM
    pid = gl.program_id(0)
    whole = True
    if first != last:
        # one program is the first of at most one shared tile, so its number names the counters
        counter = counters + first * WARPS
        blocks = gl.reshape(acc, [BN // 8, 8, BM // 8, 8]) if BM > 8 else acc
        BLOCKS: gl.constexpr = blocks.type.layout
        p_sums = partial + (_places(BN, BM, BLOCKS) if BM > 8 else _places_of_one(BN, BLOCKS))
        o_mine = _slot(pid, i_tile, steps, total, sharing) * SIZE
        if SIZE // WARPS >= PAIRS_FROM:
            if last == first + 1:
                o_other = _slot(first + last - pid, i_tile, steps, total, sharing) * SIZE
                blocks, whole = _sum_of_two(blocks, p_sums + o_mine, p_sums + o_other, counter, came)
            else:
                blocks, whole = _sum_of_all(
                    blocks, p_sums, o_mine, counter, i_tile, first, last, steps, total, sharing, SIZE
                )
        else:
            blocks, whole = _sum_of_all(
                blocks, p_sums, o_mine, counter, i_tile, first, last, steps, total, sharing, SIZE
            )
        acc = gl.convert_layout(gl.reshape(blocks, [BN, BM]), LAYOUT, assert_trivial=True)
    return acc, whole
