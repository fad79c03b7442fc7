"""What one warp of a Hopper kernel does: all that a program reads, by TMA, some stages ahead of those who multiply.

One request brings a stage's words, one its rows of x, one its scales, one its zeros: a single thread asks, and with a
request for each block it would be what a memory-bound kernel waits for. It asks more often only where one request would
reach past the end of x or of K.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from w4plugin.kernels.gluon_names import mbarrier, reinterpret, tma_load
from w4plugin.kernels.hopper_hand_over import FIRST_BARRIER, wait_to_be_told
from w4plugin.kernels.hopper_shares import first_step, next_step, place, share


@gluon.jit
def wait_for_kernel_in_front():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_kernel_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_weight(
    words, scales, zeros, full, s_words, s_scales, s_zeros, i_stage, i_n, i_step, steps, CHUNKS_A_GROUP,
    BN: gl.constexpr, UNROLL: gl.constexpr, GROUPS: gl.constexpr, ASYM: gl.constexpr, BYTES: gl.constexpr,
    HALF_BYTES: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Asks for the words, scales and zeros of a stage. What lies past the end arrives as 0 or is never stored.

    With TAIL the words of half a chunk at a time, and of the last chunk of K the first half alone.
    """
    ROWS: gl.constexpr = scales.block_shape[0]  # all of a stage's, or one where several chunks share a group
    PARTS: gl.constexpr = UNROLL * GROUPS // ROWS
    if TAIL:
        if i_step + 1 < steps:
            mbarrier.expect(full, BYTES)
            tma_load(words, [2 * i_step + 1, i_n * (BN // 16), 0], full, s_words.index(2 * i_stage + 1))
        else:
            mbarrier.expect(full, BYTES - HALF_BYTES)
        tma_load(words, [2 * i_step, i_n * (BN // 16), 0], full, s_words.index(2 * i_stage))
    else:
        mbarrier.expect(full, BYTES)
        tma_load(words, [2 * UNROLL * i_step, i_n * (BN // 16), 0], full, s_words.index(i_stage))
    for i in gl.static_range(PARTS):
        group = (i_step * UNROLL * GROUPS + i * ROWS) // CHUNKS_A_GROUP
        tma_load(scales, [group, i_n * BN], full, s_scales.index(i_stage * PARTS + i))
        if ASYM:
            tma_load(zeros, [group, i_n * BN], full, s_zeros.index(i_stage * PARTS + i))


@gluon.jit
def first_row(i_row, M, ROWS: gl.constexpr):
    """Where ROWS rows of x start that would start at ``i_row``, moved up so that none is past the last."""
    return gl.minimum(i_row, M - ROWS)


@gluon.jit
def load_parts(
    x, full, s_parts, s_rest, M, steps, i_stage, i_m, i_step, BM: gl.constexpr, PART: gl.constexpr, REST: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """A stage of x in parts of PART rows and half a chunk, none of which reaches past the end of x.

    TMA writes a row that does not exist, as 0, four times slower than one that does: with 96 of 256 rows missing a
    product took twice as long. A part that would reach past the last row starts earlier, so some rows come twice
    (store_tile leaves those out). With TAIL the half of a chunk that K does not have is left out.
    """
    COUNT: gl.constexpr = BM // PART
    begin = i_m * (BM + REST)
    for h in gl.static_range(COUNT):
        load_part(x, full, s_parts, M, steps, i_stage, begin + h * PART, i_step, h, COUNT, PART, TAIL)
    if REST > 0:
        gl.static_assert(REST == PART, "one request for the rest")
        load_part(x, full, s_rest, M, steps, i_stage, begin + BM, i_step, 0, 1, PART, TAIL)


@gluon.jit
def load_part(
    x, full, s_parts, M, steps, i_stage, i_row, i_step, H: gl.constexpr, COUNT: gl.constexpr, PART: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """The H-th of COUNT parts of a stage, of both halves of the chunk."""
    i_row = first_row(i_row, M, PART)
    tma_load(x, [2 * i_step, i_row, 0], full, s_parts.index(2 * COUNT * i_stage + H))
    if not TAIL or i_step + 1 < steps:
        tma_load(x, [2 * i_step + 1, i_row, 0], full, s_parts.index(2 * COUNT * i_stage + COUNT + H))


@gluon.jit
def loader(
    x, words, scales, zeros, s_words, s_x, s_rest, s_scales, s_zeros, full, M, steps, total, waves, sharing,
    tiles_m, tiles_n, band, CHUNKS_A_GROUP,
    BM: gl.constexpr, BN: gl.constexpr, UNROLL: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GROUPS: gl.constexpr, ASYM: gl.constexpr, OVERLAP: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr,
    REST: gl.constexpr,
):  # fmt: skip
    SCALE_BYTES: gl.constexpr = BN * scales.dtype.primitive_bitwidth // 8 + (zeros.block_shape[1] if ASYM else 0)
    BYTES: gl.constexpr = UNROLL * (BN * 64 + (BM + REST) * 256 + GROUPS * SCALE_BYTES)
    HALF_BYTES: gl.constexpr = BN * 32 + (BM + REST) * 128  # words and x of half a chunk
    begin, _, count = share(steps, total, waves, sharing)
    i_tile, i_step = first_step(begin, steps, waves)
    i_n, i_m = place(i_tile, tiles_m, tiles_n, band)
    if OVERLAP:
        # the weight is constant: its first stages may fly before the kernel in front, which made x, has finished
        for i in gl.static_range(STAGES):
            if i < count:
                load_weight(
                    words, scales, zeros, full.index(i), s_words, s_scales, s_zeros, i, i_n, i_step, steps,
                    CHUNKS_A_GROUP, BN, UNROLL, GROUPS, ASYM, BYTES, HALF_BYTES, TAIL,
                )  # fmt: skip
                i_tile, i_step = next_step(i_tile, i_step, begin, steps, waves)
                i_n, i_m = place(i_tile, tiles_m, tiles_n, band)
        wait_for_kernel_in_front()
        i_tile, i_step = first_step(begin, steps, waves)
        i_n, i_m = place(i_tile, tiles_m, tiles_n, band)
    i_stage = 0
    for i in range(count):
        ready = full.index(i_stage)
        if i >= STAGES:
            wait_to_be_told(FIRST_BARRIER + STAGES * (WARPS // 4) + i_stage, 32 * WARPS + 32)
        if not OVERLAP or i >= STAGES:
            load_weight(
                words, scales, zeros, ready, s_words, s_scales, s_zeros, i_stage, i_n, i_step, steps,
                CHUNKS_A_GROUP, BN, UNROLL, GROUPS, ASYM, BYTES, HALF_BYTES, TAIL,
            )  # fmt: skip
        if PART > 0:
            load_parts(x, ready, s_x, s_rest, M, steps, i_stage, i_m, i_step, BM, PART, REST, TAIL)
        else:
            tma_load(x, [2 * UNROLL * i_step, i_m * BM, 0], ready, s_x.index(i_stage))
        n_tile, i_step = next_step(i_tile, i_step, begin, steps, waves)
        if n_tile != i_tile:
            i_n, i_m = place(n_tile, tiles_m, tiles_n, band)
        i_tile = n_tile
        i_stage = gl.where(i_stage + 1 == STAGES, 0, i_stage + 1)


@gluon.jit
def stages(
    x, words, scales, zeros,
    BM: gl.constexpr, BN: gl.constexpr, UNROLL: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    ASYM: gl.constexpr,
):  # fmt: skip
    """Shared memory for the stages of words, x, scales and zeros, as they are loaded."""
    ROWS: gl.constexpr = scales.block_shape[0]
    PARTS: gl.constexpr = STAGES * UNROLL * GROUPS // ROWS
    s_words = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * UNROLL, BN // 16, 128], words.layout)
    s_x = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * UNROLL, BM, 64], x.layout)
    s_scales = gl.allocate_shared_memory(scales.dtype, [PARTS, ROWS, BN], scales.layout)
    if ASYM:
        s_zeros = gl.allocate_shared_memory(gl.uint8, [PARTS, ROWS, zeros.block_shape[1]], zeros.layout)
    else:
        s_zeros = s_scales
    return s_words, s_x, s_scales, s_zeros


@gluon.jit
def units(
    s_words, s_x, s_scales, s_zeros, BM: gl.constexpr, BN: gl.constexpr, UNITS: gl.constexpr, GROUPS: gl.constexpr,
    ASYM: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """The same memory as it is read: a block of words, a block of x, the scales and zeros of one group."""
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    X: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=1)
    SCALES: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=0, element_bitwidth=s_scales.dtype.primitive_bitwidth, rank=1
    )
    BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=1)
    words = reinterpret(s_words, gl.int32, [2 * UNITS, BN // 16, 128], WORDS)
    if BM == 1:
        x = reinterpret(s_x, s_x.dtype, [2 * UNITS, 64], ROW)
    else:
        x = reinterpret(s_x, s_x.dtype, [2 * UNITS, BM, 64], X)
    scales = reinterpret(s_scales, s_scales.dtype, [UNITS * GROUPS, BN], SCALES)
    zeros = reinterpret(s_zeros, gl.uint8, [UNITS * GROUPS, ZEROS], BYTES) if ASYM else scales
    return words, x, scales, zeros
