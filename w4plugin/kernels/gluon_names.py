"""The names of Gluon that moved between Triton 3.6 and 3.9, under one spelling.

Gluon is experimental: what a release renames is mended here and nowhere else.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

__all__ = [
    "arrive_each_thread",
    "barrier",
    "mbarrier",
    "mma_v2",
    "tma_load",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]


@gluon.jit
def arrive_each_thread(barrier):
    """Every thread arrives for itself: the barrier counts threads.

    mbarrier.arrive would let one thread arrive for all, behind a barrier of the whole partition, and that keeps its
    warpgroups in step: all unpack together, and the tensor cores idle.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)
