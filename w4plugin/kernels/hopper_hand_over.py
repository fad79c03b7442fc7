"""How stages of shared memory change hands between the warps of a Hopper kernel, by named barriers.

Mbarriers would do, but around every wait on one, and every arrival, the compiler puts a barrier of all warps that
multiply. That keeps warpgroups in step: both unpack, then both multiply, and the tensor cores idle in between. So one
warp, the messenger, waits on the mbarriers of arriving stages and tells each warpgroup; warpgroups tell the loader.

A program has sixteen named barriers and Triton takes the first ones: ``FIRST_BARRIER + stage * warpgroups + warpgroup``
says that a stage has arrived, and one a stage after those that it has been read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from w4plugin.kernels.gluon_names import mbarrier
from w4plugin.kernels.hopper_shares import share

FIRST_BARRIER = gl.constexpr(4)

_ARRIVE = gl.constexpr("barrier.arrive $1, $2; mov.u32 $0, 0;")
_RELEASE = gl.constexpr("fence.acq_rel.cta; barrier.arrive $1, $2; mov.u32 $0, 0;")
_SYNC = gl.constexpr("barrier.sync $1, $2; mov.u32 $0, 0;")
_SYNC_GROUP = gl.constexpr("""
{
.reg .u32 id;
mov.u32 id, %tid.x;
shr.u32 id, id, 7;
mad.lo.u32 id, $1, $2, id;
add.u32 id, id, 4;
barrier.sync id, 160;
mov.u32 $0, 0;
}
""")


@gluon.jit
def _run(ASM: gl.constexpr, first, second):
    gl.inline_asm_elementwise(ASM, "=r,r,r", [first, second], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_stage(i_stage, GROUPS: gl.constexpr):
    """One of GROUPS warpgroups that multiply waits until the messenger says that a stage has arrived."""
    _run(_SYNC_GROUP, i_stage, GROUPS)


@gluon.jit
def tell(i_barrier, threads):
    """Arrive at a named barrier that others wait at, without waiting."""
    _run(_ARRIVE, i_barrier, threads)


@gluon.jit
def release(i_barrier, threads):
    """As :func:`tell`, once everything that this thread loads from shared memory has arrived in its registers.

    Without the fence an arrival overtakes loads that were issued before it, and the loader overwrites what they read.
    """
    _run(_RELEASE, i_barrier, threads)


@gluon.jit
def wait_to_be_told(i_barrier, threads):
    """Wait at a named barrier."""
    _run(_SYNC, i_barrier, threads)


@gluon.jit
def messenger(full, steps, total, waves, sharing, WARPS: gl.constexpr, STAGES: gl.constexpr):
    """One warp: tells each warpgroup when a stage has arrived."""
    _, _, count = share(steps, total, waves, sharing)
    i_stage = 0
    phase = 0
    for _ in range(count):
        mbarrier.wait(full.index(i_stage), phase)
        for g in gl.static_range(WARPS // 4):
            tell(FIRST_BARRIER + i_stage * (WARPS // 4) + g, 160)
        turn = i_stage + 1 == STAGES
        i_stage = gl.where(turn, 0, i_stage + 1)
        phase = gl.where(turn, phase ^ 1, phase)
