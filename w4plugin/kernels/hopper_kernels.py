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
every time. A whole tile leaves through shared memory, by TMA, where STAGED.

``narrow_kernel`` multiplies with mma.sync (few rows of x), ``wide_kernel`` with wgmma. A chunk is 128 rows of W: two
blocks of 64. Units of a stage: UNROLL chunks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from w4plugin.kernels.gluon_names import (
    mbarrier,
    mma_v2,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from w4plugin.kernels.hopper_hand_over import (
    FIRST_BARRIER,
    messenger,
    release,
    tell,
    wait_for_stage,
)
from w4plugin.kernels.hopper_loader import let_next_kernel_start, loader, stages, units, wait_for_kernel_in_front
from w4plugin.kernels.hopper_output import finish, lends, outputs, send_tile, store_tile, wait_until_sent
from w4plugin.kernels.hopper_shares import place, share, visit, visits
from w4plugin.kernels.hopper_sums import come, sharers, sum_shares
from w4plugin.kernels.hopper_weights import block_layout, factors, half_block, load_block, operand


@gluon.jit
def wait_for_product_before():
    """Until only the product issued last is in flight.

    Gluon's own wait hands the sums through, and ptxas takes that for a change of them: it then lets no product fly
    across it (C7514). This one names no register, so nothing may read the sums before Gluon's wait for all.
    """
    gl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 1; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# ------------------------------------------------------------------------------------------------------ mma.sync


@gluon.jit
def narrow_worker(
    s_words, s_x, s_scales, s_zeros, bias, out, partial, counters, M, N, steps, total, waves, sharing,
    tiles_m, tiles_n, band,
    BM: gl.constexpr, BN: gl.constexpr, UNROLL: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GROUPS: gl.constexpr, ASYM: gl.constexpr, BIAS: gl.constexpr, OVERLAP: gl.constexpr,
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
                            p_x = p_x.slice(32 * c, 32, dim=1)
                            b_part = half_block(b_words, c, BN)
                        b_c, b_d, b_f = factors(
                            b_part, s_scales.index(group), s_zeros.index(group), BN, DTYPE, ASYM, False
                        )
                        b_a = operand(b_part, b_c, b_d, b_f, BN, 1 if GROUPS == 4 else 2, DTYPE, False, LEFT)
                        dot = mma_v2(b_a, p_x.permute((1, 0)).load(RIGHT), dot)
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
            store_tile(acc, out, i_n * BN, i_m * BM, M, N, BN, BM, DTYPE)


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
    SCALED: gl.constexpr,
):  # fmt: skip
    s_words, s_x, s_scales, s_zeros = stages(x, words, scales, zeros, BM, BN, UNROLL, STAGES, GROUPS, ASYM)
    u_words, u_x, u_scales, u_zeros = units(
        s_words, s_x, s_scales, s_zeros, BM, BN, STAGES * UNROLL, GROUPS, ASYM, zeros.block_shape[1]
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
                             OVERLAP)),
            (loader, (x, words, scales, zeros, s_words, s_x, s_scales, s_zeros, full, steps, total, waves, sharing,
                      tiles_m, tiles_n, band, CHUNKS_A_GROUP, BM, BN, UNROLL, STAGES, WARPS, GROUPS, ASYM, OVERLAP)),
            (messenger, (full, steps, total, waves, sharing, WARPS, STAGES)),
        ],
        [1, 1],
        [32 if GROUPS == 4 else 24, 24],  # registers: four groups a chunk are more to ask for
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- wgmma


@gluon.jit
def next_chunk(
    b_like, s_words, s_scales, s_zeros, i_stage, comes, BN: gl.constexpr, WARPS: gl.constexpr, GROUPS: gl.constexpr,
    DTYPE: gl.constexpr, ASYM: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """What the chunk in a stage starts with: its first block's words, the factors of its first group."""
    if comes:
        wait_for_stage(i_stage, WARPS // 4)
    b_words = load_block(s_words.index(2 * i_stage), block_layout(BN, WARPS), BN)
    group = i_stage * GROUPS
    b_c, b_d, b_f = factors(b_like, s_scales.index(group), s_zeros.index(group), BN, DTYPE, ASYM, SCALED)
    return b_words, b_c, b_d, b_f


@gluon.jit
def wide_worker(
    s_words, s_x, s_scales, s_zeros, s_out, out_map, bias, out, partial, counters, M, N, steps, total, waves, sharing,
    tiles_m, tiles_n, band,
    BM: gl.constexpr, BN: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GROUPS: gl.constexpr, ASYM: gl.constexpr, BIAS: gl.constexpr, OVERLAP: gl.constexpr,
    SCALED: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """PIECES products a chunk; each operand is unpacked while the product before it runs."""
    DTYPE: gl.constexpr = s_x.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = block_layout(BN, WARPS)
    HALVES: gl.constexpr = 4 // PIECES
    A_GROUP: gl.constexpr = PIECES // GROUPS  # products that share a scale
    gl.static_assert(SCALED or not STAGED, "where scales meet sums a stage is given back before its tile is done")
    # how many products before a chunk's first its words are asked for; of two, that is too early for what is loading
    AHEAD: gl.constexpr = 1 if SCALED and PIECES == 4 else 0
    # the product of a tile's first chunk with which the stage before is given back, whose x may still be being sent;
    # the next stage, which is the same one where there are two, is waited for thereafter
    SENT: gl.constexpr = PIECES - 1 - AHEAD if STAGED and lends(BM) else 0
    first, last, count = share(steps, total, waves, sharing)
    i_stage = 0
    zero = gl.zeros([BN, BM], gl.float32, MMA)
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
        for i in range(begin, end):
            n_stage = gl.where(i_stage + 1 == STAGES, 0, i_stage + 1)
            for h in gl.static_range(PIECES):
                p_x = s_x.index(2 * i_stage + h * 2 // PIECES)
                if PIECES == 4:
                    p_x = p_x.slice(32 * (h % 2), 32, dim=1)
                if SCALED:
                    acc = warpgroup_mma(b_a, p_x.permute((1, 0)), acc, is_async=True)
                    wait_for_product_before()
                    if h == 0 or h == SENT:
                        # the products that are done were made of everything that was loaded from the stage before
                        after = 0 if SENT == 0 else begin
                        if ((i > after) if h == 0 else (i == after)) & (i > 0) & (i + STAGES <= count):
                            if h > 0:
                                wait_until_sent()
                            done_with = gl.where(i_stage == 0, STAGES - 1, i_stage - 1)
                            tell(FIRST_BARRIER + STAGES * (WARPS // 4) + done_with, 32 * WARPS + 32)
                elif h % A_GROUP == 0:
                    dot = warpgroup_mma(
                        b_a, p_x.permute((1, 0)), warpgroup_mma_init(zero), use_acc=False, is_async=True
                    )
                else:
                    dot = warpgroup_mma(b_a, p_x.permute((1, 0)), dot, is_async=True)
                # the operand after this one, while the product runs
                n = h + 1 if h + 1 < PIECES else 0
                if AHEAD == 0 and n == 0:
                    b_first, b_c, b_d, b_f = next_chunk(
                        b_part, s_words, s_scales, s_zeros, n_stage, i + 1 < count,
                        BN, WARPS, GROUPS, DTYPE, ASYM, SCALED,
                    )  # fmt: skip
                b_words = b_first if n * 2 < PIECES else b_second
                b_part = b_words if PIECES == 2 else half_block(b_words, n % 2, BN)
                if n > 0 and n * GROUPS % PIECES == 0:
                    group = i_stage * GROUPS + n * GROUPS // PIECES
                    b_c, b_d, b_f = factors(
                        b_part, s_scales.index(group), s_zeros.index(group), BN, DTYPE, ASYM, SCALED
                    )
                b_next = operand(b_part, b_c, b_d, b_f, BN, HALVES, DTYPE, SCALED, LEFT)
                if not SCALED and h % A_GROUP == A_GROUP - 1:
                    done = warpgroup_mma_wait(0, deps=[dot])
                    p_scale = s_scales.index(i_stage * GROUPS + h * GROUPS // PIECES)
                    acc += done * p_scale.load(gl.SliceLayout(1, MMA)).to(gl.float32)[:, None]
                if AHEAD > 0 and h == PIECES - 1 - AHEAD:
                    b_first, b_c, b_d, b_f = next_chunk(
                        b_part, s_words, s_scales, s_zeros, n_stage, i + 1 < count,
                        BN, WARPS, GROUPS, DTYPE, ASYM, SCALED,
                    )  # fmt: skip
                if n == 0:
                    b_second = load_block(s_words.index(2 * n_stage + 1), WORDS, BN)
                b_a = b_next
            if not SCALED and i + STAGES < count:
                release(FIRST_BARRIER + STAGES * (WARPS // 4) + i_stage, 32 * WARPS + 32)
            i_stage = n_stage
        i_n, i_m = place(i_tile, tiles_m, tiles_n, band)
        o_n = i_n * BN + gl.arange(0, BN, gl.SliceLayout(1, MMA))
        sharer, until = sharers(i_shared, steps, total, sharing, i_visit >= waves)
        came = come(counters, sharer, until, BN * BM, WARPS)
        tile = warpgroup_mma_wait(0, deps=[acc]) if SCALED else acc
        sent = False
        if STAGED:
            sent = sharer == until
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
                store_tile(tile, out, i_n * BN, i_m * BM, M, N, BN, BM, DTYPE)
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
    SCALED: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    s_words, s_x, s_scales, s_zeros = stages(x, words, scales, zeros, BM, BN, 1, STAGES, GROUPS, ASYM)
    u_words, u_x, u_scales, u_zeros = units(
        s_words, s_x, s_scales, s_zeros, BM, BN, STAGES, GROUPS, ASYM, zeros.block_shape[1]
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    s_out = outputs(s_x, out_map, BM, BN, STAGES) if STAGED else u_words
    if OVERLAP:
        let_next_kernel_start()
    gl.warp_specialize(
        [
            (wide_worker, (u_words, u_x, u_scales, u_zeros, s_out, out_map, bias, out, partial, counters, M, N, steps,
                           total, waves, sharing, tiles_m, tiles_n, band, BM, BN, PIECES, STAGES, WARPS, GROUPS, ASYM,
                           BIAS, OVERLAP, SCALED, STAGED)),
            (loader, (x, words, scales, zeros, s_words, s_x, s_scales, s_zeros, full, steps, total, waves, sharing,
                      tiles_m, tiles_n, band, CHUNKS_A_GROUP, BM, BN, 1, STAGES, WARPS, GROUPS, ASYM, OVERLAP)),
            (messenger, (full, steps, total, waves, sharing, WARPS, STAGES)),
        ],
        [1, 1],
        [32 if GROUPS == 4 else 24, 24],  # registers: four groups a chunk are more to ask for
    )  # fmt: skip
