"""W4A16 kernels for sm_90, in Gluon.

    out[m, n] = sum_k x[m, k] * (q[k, n] - zero[g, n]) * scale[g, n] + bias[n]

Both compute out^T = W^T x^T, so that W^T, unpacked in registers, is the left operand of the tensor cores and is never
written anywhere. Words come in the fragment order of :mod:`.fragments`: what one lane reads is what it multiplies.

One warp keeps STAGES stages of words, scales, zeros and x on their way by TMA, one says when a stage has arrived; the
other warps unpack and multiply. Each of the P programs takes a whole tile of each of the first ``waves`` times P tiles:
programs that run together then read the same rows of x and columns of W, from the L2. Of the T steps of the tiles
that are left the first S programs walk the share ``pid * T / S .. (pid + 1) * T / S`` (stream-K), so any shape fills
the device evenly; where S is a multiple of those tiles, each is cut into as many parts and no program has two.
A tile that several programs share is summed in the order of those programs, by whichever arrives last: the same bits
every time. A whole tile leaves through shared memory, by TMA, where STAGED. Where PART is given, x comes in parts of as
many rows, which never reach past its end (hopper_loader.load_parts); of ONE row that is all that comes.

``narrow_kernel`` multiplies with mma.sync (few rows of x), ``wide_kernel`` with wgmma. A chunk is 128 rows of W: two
blocks of 64. Units of a stage: UNROLL chunks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from w4plugin.kernels.gluon_names import (
    mbarrier,
    mma_v2,
    reinterpret,
    tma_store_wait,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from w4plugin.kernels.hopper_chunks import multiply_chunk
from w4plugin.kernels.hopper_hand_over import (
    FIRST_BARRIER,
    messenger,
    release,
    wait_for_stage,
)
from w4plugin.kernels.hopper_loader import let_next_kernel_start, loader, stages, units, wait_for_kernel_in_front
from w4plugin.kernels.hopper_output import finish, lends, outputs, send_tile, store_tile
from w4plugin.kernels.hopper_shares import place, share, visit, visits
from w4plugin.kernels.hopper_sums import come, sharers, sum_shares
from w4plugin.kernels.hopper_weights import block_layout, factors, half_block, load_block, operand

# ------------------------------------------------------------------------------------------------------ mma.sync


@gluon.jit
def load_rows(p_x, LAYOUT: gl.constexpr, BM: gl.constexpr, ONE: gl.constexpr):
    """Columns of x as the right operand ``[columns, BM]``; of ONE row, ``p_x [columns]``, all BM are that."""
    if ONE:
        COLUMNS: gl.constexpr = p_x.shape[0]
        b_row = p_x.load(gl.SliceLayout(1, LAYOUT))[:, None]
        b_x, _ = gl.broadcast(b_row, gl.zeros([COLUMNS, BM], p_x.dtype, LAYOUT))
    else:
        b_x = p_x.permute((1, 0)).load(LAYOUT)
    return b_x


@gluon.jit
def narrow_worker(
    s_words, s_x, s_scales, s_zeros, bias, out, partial, counters, M, N, steps, total, waves, sharing,
    tiles_m, tiles_n, band,
    BM: gl.constexpr, BN: gl.constexpr, UNROLL: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GROUPS: gl.constexpr, ASYM: gl.constexpr, BIAS: gl.constexpr, OVERLAP: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = s_x.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = block_layout(BN, WARPS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    first, last, count = share(steps, total, waves, sharing)
    i_stage = 0
    if OVERLAP:
        wait_for_kernel_in_front()
    for i_visit in range(visits(first, last, steps, waves)):
        i_tile, i_shared, begin, end = visit(i_visit, first, last, steps, waves)
        acc = gl.zeros([BN, BM], gl.float32, MMA)
        for i_chunk in range(begin, end):
            wait_for_stage(i_stage, WARPS // 4)
            for i in gl.static_range(UNROLL):
                unit = i_stage * UNROLL + i
                dot = gl.zeros([BN, BM], gl.float32, MMA)
                for b in gl.static_range(2):
                    b_words = load_block(s_words.index(2 * unit + b), WORDS, BN)
                    for c in gl.static_range(2 if GROUPS == 4 else 1):
                        group = unit * GROUPS + (2 * b + c if GROUPS == 4 else b * (GROUPS - 1))
                        p_x = s_x.index(2 * unit + b)
                        b_part = b_words
                        if GROUPS == 4:
                            p_x = p_x.slice(32 * c, 32, dim=0 if ONE else 1)
                            b_part = half_block(b_words, c, BN)
                        b_c, b_d, b_f = factors(
                            b_part, s_scales.index(group), s_zeros.index(group), BN, DTYPE, ASYM, False
                        )
                        b_a = operand(b_part, b_c, b_d, b_f, BN, 1 if GROUPS == 4 else 2, DTYPE, False, LEFT)
                        dot = mma_v2(b_a, load_rows(p_x, RIGHT, BM, ONE), dot)
                        if GROUPS > 1 or b == 1:
                            # the scale meets the float32 sum of its group: it rounds nothing and is never narrowed
                            b_scale = s_scales.index(group).load(gl.SliceLayout(1, MMA)).to(gl.float32)
                            acc += dot * b_scale[:, None]
                            dot = gl.zeros([BN, BM], gl.float32, MMA)
            if i_chunk + STAGES < count:
                release(FIRST_BARRIER + STAGES * (WARPS // 4) + i_stage, 32 * WARPS + 32)
            i_stage = gl.where(i_stage + 1 == STAGES, 0, i_stage + 1)
        sharer, until = sharers(i_shared, steps, total, sharing, i_visit >= waves)
        came = come(counters, sharer, until, BN * BM, WARPS)
        acc, whole = sum_shares(
            acc, partial, counters, came, i_shared, steps, total, sharing, sharer, until, BN, BM, WARPS, MMA
        )
        if whole:
            i_n, i_m = place(i_tile, tiles_m, tiles_n, band)
            o_n = i_n * BN + gl.arange(0, BN, gl.SliceLayout(1, MMA))
            acc = finish(acc, bias, o_n, N, BIAS, DTYPE, False)
            store_tile(acc, out, i_n * BN, i_m * BM, M, N, BN, BM, DTYPE, 0)


@gluon.jit(
    do_not_specialize=[
        "M", "N", "steps", "total", "waves", "sharing", "tiles_m", "tiles_n", "band", "CHUNKS_A_GROUP",
    ]
)  # fmt: skip
def narrow_kernel(
    x, words, scales, zeros, bias, out, partial, counters, M, N, steps, total, waves, sharing,
    tiles_m, tiles_n, band, CHUNKS_A_GROUP,
    BM: gl.constexpr, BN: gl.constexpr, UNROLL: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GROUPS: gl.constexpr, ASYM: gl.constexpr, BIAS: gl.constexpr, OVERLAP: gl.constexpr,
    SCALED: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = 1 if ONE else BM
    s_words, s_x, s_scales, s_zeros = stages(x, words, scales, zeros, ROWS, BN, UNROLL, STAGES, GROUPS, ASYM)
    u_words, u_x, u_scales, u_zeros = units(
        s_words, s_x, s_scales, s_zeros, ROWS, BN, STAGES * UNROLL, GROUPS, ASYM, zeros.block_shape[1]
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    if OVERLAP:
        let_next_kernel_start()
    gl.warp_specialize(
        [
            (narrow_worker, (u_words, u_x, u_scales, u_zeros, bias, out, partial, counters, M, N, steps, total, waves,
                             sharing, tiles_m, tiles_n, band, BM, BN, UNROLL, STAGES, WARPS, GROUPS, ASYM, BIAS,
                             OVERLAP, ONE)),
            (loader, (x, words, scales, zeros, s_words, s_x, s_x, s_scales, s_zeros, full, M, steps, total, waves,
                      sharing, tiles_m, tiles_n, band, CHUNKS_A_GROUP, ROWS, BN, UNROLL, STAGES, WARPS, GROUPS, ASYM,
                      OVERLAP, 0, False, 0)),
            (messenger, (full, steps, total, waves, sharing, WARPS, STAGES)),
        ],
        [1, 1],
        [32 if GROUPS == 4 else 24, 24],  # registers: four groups a chunk are more to ask for
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- wgmma


@gluon.jit
def wide_worker(
    s_words, s_x, s_rest, s_scales, s_zeros, s_out, out_map, bias, out, partial, counters, M, N, steps, total, waves,
    sharing, tiles_m, tiles_n, band,
    BM: gl.constexpr, BN: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GROUPS: gl.constexpr, ASYM: gl.constexpr, BIAS: gl.constexpr, OVERLAP: gl.constexpr,
    SCALED: gl.constexpr, STAGED: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """PIECES products a chunk; each operand is unpacked while the product before it runs.

    With REST a tile has as many rows more than BM, with sums of their own: its tiles are not staged.
    """
    DTYPE: gl.constexpr = s_x.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16])
    MMA_REST: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, REST if REST > 0 else BM, 16]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = block_layout(BN, WARPS)
    HALVES: gl.constexpr = 4 // PIECES
    gl.static_assert(SCALED or not STAGED, "where scales meet sums a stage is given back before its tile is done")
    first, last, count = share(steps, total, waves, sharing)
    i_stage = 0
    zero = gl.zeros([BN, BM], gl.float32, MMA)
    if REST > 0:
        gl.static_assert(SCALED and not STAGED, "sums of two parts, each stored from its registers")
        zero_rest = gl.zeros([BN, REST], gl.float32, MMA_REST)
    if OVERLAP:
        wait_for_kernel_in_front()
    wait_for_stage(0, WARPS // 4)
    b_first = load_block(s_words.index(0), WORDS, BN)
    b_second = load_block(s_words.index(1), WORDS, BN)
    b_part = b_first if PIECES == 2 else half_block(b_first, 0, BN)
    b_c, b_d, b_f = factors(b_part, s_scales.index(0), s_zeros.index(0), BN, DTYPE, ASYM, SCALED)
    b_a = operand(b_part, b_c, b_d, b_f, BN, HALVES, DTYPE, SCALED, LEFT)
    for i_visit in range(visits(first, last, steps, waves)):
        i_tile, i_shared, begin, end = visit(i_visit, first, last, steps, waves)
        acc = warpgroup_mma_init(zero) if SCALED else zero
        acc_rest = warpgroup_mma_init(zero_rest) if REST > 0 else 0
        whole_chunks = end - 1 if TAIL else end
        for i in range(begin, whole_chunks):
            acc, acc_rest, b_first, b_second, b_part, b_c, b_d, b_f, b_a, i_stage = multiply_chunk(
                acc, acc_rest, b_first, b_second, b_part, b_c, b_d, b_f, b_a, zero, s_words, s_x, s_rest, s_scales,
                s_zeros, i, begin, count, i_stage,
                BM, BN, PIECES, PIECES, STAGES, WARPS, GROUPS, ASYM, SCALED, STAGED, MMA, REST, MMA_REST,
            )  # fmt: skip
        if TAIL:  # half a chunk is left of K
            acc, acc_rest, b_first, b_second, b_part, b_c, b_d, b_f, b_a, i_stage = multiply_chunk(
                acc, acc_rest, b_first, b_second, b_part, b_c, b_d, b_f, b_a, zero, s_words, s_x, s_rest, s_scales,
                s_zeros, end - 1, begin, count, i_stage,
                BM, BN, PIECES, PIECES // 2, STAGES, WARPS, GROUPS, ASYM, SCALED, STAGED, MMA, REST, MMA_REST,
            )  # fmt: skip
        i_n, i_m = place(i_tile, tiles_m, tiles_n, band)
        o_n = i_n * BN + gl.arange(0, BN, gl.SliceLayout(1, MMA))
        sharer, until = sharers(i_shared, steps, total, sharing, i_visit >= waves)
        came = come(counters, sharer, until, BN * BM, WARPS)
        if REST > 0:
            # sums and counters of the rest lie behind those of all programs' first parts
            p_rest = partial + 2 * gl.num_programs(0) * (BN * BM)
            c_rest = counters + gl.num_programs(0) * WARPS
            came_rest = come(c_rest, sharer, until, BN * REST, WARPS)
            tile, tile_rest = warpgroup_mma_wait(0, deps=[acc, acc_rest])
            tile_rest, whole_rest = sum_shares(
                tile_rest, p_rest, c_rest, came_rest, i_shared, steps, total, sharing, sharer, until, BN, REST, WARPS,
                MMA_REST,
            )  # fmt: skip
            if whole_rest:
                o_rest = i_n * BN + gl.arange(0, BN, gl.SliceLayout(1, MMA_REST))
                tile_rest = finish(tile_rest, bias, o_rest, N, BIAS, DTYPE, SCALED)
                store_tile(tile_rest, out, i_n * BN, i_m * (BM + REST) + BM, M, N, BN, REST, DTYPE, PART)
        else:
            tile = warpgroup_mma_wait(0, deps=[acc]) if SCALED else acc
        sent = False
        if STAGED:
            sent = sharer == until
            if PART > 0:
                sent &= i_m * BM + BM <= M  # rows that came twice must not be stored twice
            if sent:
                i_last = gl.where(i_stage == 0, STAGES - 1, i_stage - 1)
                s_tile = s_out.index(i_last * (128 // BN) if lends(BM) else 0)
                send_tile(finish(tile, bias, o_n, N, BIAS, DTYPE, SCALED), out_map, s_tile, i_n * BN, i_m * BM, DTYPE)
        if not sent:
            tile, whole = sum_shares(
                tile, partial, counters, came, i_shared, steps, total, sharing, sharer, until, BN, BM, WARPS, MMA
            )  # fmt: skip
            if whole:
                tile = finish(tile, bias, o_n, N, BIAS, DTYPE, SCALED)
                store_tile(tile, out, i_n * BN, i_m * (BM + REST), M, N, BN, BM, DTYPE, PART)
    if STAGED:
        tma_store_wait(0)


@gluon.jit(
    do_not_specialize=["M", "steps", "total", "waves", "sharing", "tiles_m", "tiles_n", "band", "CHUNKS_A_GROUP"]
)
def wide_kernel(
    x, words, scales, zeros, out_map, bias, out, partial, counters, M, N, steps, total, waves, sharing,
    tiles_m, tiles_n, band, CHUNKS_A_GROUP,
    BM: gl.constexpr, BN: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GROUPS: gl.constexpr, ASYM: gl.constexpr, BIAS: gl.constexpr, OVERLAP: gl.constexpr,
    SCALED: gl.constexpr, STAGED: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    s_words, s_x, s_scales, s_zeros = stages(x, words, scales, zeros, BM, BN, 1, STAGES, GROUPS, ASYM)
    u_words, u_x, u_scales, u_zeros = units(
        s_words, s_x, s_scales, s_zeros, BM, BN, STAGES, GROUPS, ASYM, zeros.block_shape[1]
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    s_parts = reinterpret(s_x, s_x.dtype, [2 * STAGES * BM // PART, 1, PART, 64], x.layout) if PART > 0 else s_x
    s_rest = s_parts
    u_rest = u_x
    if REST > 0:
        s_rest = gl.allocate_shared_memory(x.dtype, [2 * STAGES, 1, REST, 64], x.layout)
        u_rest = reinterpret(s_rest, x.dtype, [2 * STAGES, REST, 64], u_x.layout)
    s_blocks = reinterpret(s_words, gl.int32, [2 * STAGES, 1, BN // 16, 128], words.layout) if TAIL else s_words
    s_out = outputs(s_x, out_map, BM, BN, STAGES) if STAGED else u_words
    if OVERLAP:
        let_next_kernel_start()
    gl.warp_specialize(
        [
            (wide_worker, (u_words, u_x, u_rest, u_scales, u_zeros, s_out, out_map, bias, out, partial, counters, M, N,
                           steps, total, waves, sharing, tiles_m, tiles_n, band, BM, BN, PIECES, STAGES, WARPS, GROUPS,
                           ASYM, BIAS, OVERLAP, SCALED, STAGED, PART, TAIL, REST)),
            (loader, (x, words, scales, zeros, s_blocks, s_parts, s_rest, s_scales, s_zeros, full, M, steps, total,
                      waves, sharing, tiles_m, tiles_n, band, CHUNKS_A_GROUP, BM, BN, 1, STAGES, WARPS, GROUPS, ASYM,
                      OVERLAP, PART, TAIL, REST)),
            (messenger, (full, steps, total, waves, sharing, WARPS, STAGES)),
        ],
        [1, 1],
        [32 if GROUPS == 4 or PART > 0 else 24, 24],  # registers: there is more to ask for
    )  # fmt: skip
