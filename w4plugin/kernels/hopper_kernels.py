"""W4A16 kernels for sm_90, in Gluon.

    out[m, n] = sum_k x[m, k] * (q[k, n] - zero[g, n]) * scale[g, n] + bias[n]

Both compute out^T = W^T x^T, so that W^T, unpacked in registers, is the left operand of the tensor cores and is never
written anywhere. Words come in the fragment order of :mod:`.fragments`: what one lane reads is what it multiplies.

One warp keeps STAGES stages of words, scales, zeros and x on their way by TMA, one says when a stage has arrived; the
other warps unpack and multiply. Each of the P programs takes a whole tile of each of the first ``waves`` times P tiles:
programs that run together then read the same rows of x and columns of W, from the L2. Of the T steps of the tiles
that are left it walks the share ``pid * T / P .. (pid + 1) * T / P`` (stream-K), so any shape fills the device evenly.
A tile that several programs share is summed in the order of those programs, by whichever arrives last: the same bits
every time.

``narrow_kernel`` multiplies with mma.sync (few rows of x), ``wide_kernel`` with wgmma. A chunk is 128 rows of W: two
blocks of 64. Units of a stage: UNROLL chunks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from w4plugin.kernels.gluon_names import (
    barrier,
    mbarrier,
    mma_v2,
    tma_load,
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
    wait_to_be_told,
)
from w4plugin.kernels.hopper_shares import first_step, next_step, share, visit, visits
from w4plugin.kernels.hopper_weights import block_layout, half_block, load_block, operand


@gluon.jit
def wait_for_kernel_in_front():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_kernel_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_device():
    gl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_product_before():
    """Until only the product issued last is in flight.

    Gluon's own wait hands the sums through, and ptxas takes that for a change of them: it then lets no product fly
    across it (C7514). This one names no register, so nothing may read the sums before Gluon's wait for all.
    """
    gl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 1; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# ------------------------------------------------------------------------------------------------------- loading


@gluon.jit
def load_weight(
    words, scales, zeros, full, s_words, s_scales, s_zeros, i_stage, i_n, i_step, N, blocks_n, CHUNKS_A_GROUP,
    BN: gl.constexpr, UNROLL: gl.constexpr, GROUPS: gl.constexpr, ASYM: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Asks for the words, scales and zeros of a stage. What lies past the end arrives as 0 or is never stored."""
    mbarrier.expect(full, BYTES)
    for i in gl.static_range(UNROLL):
        chunk = i_step * UNROLL + i
        unit = i_stage * UNROLL + i
        for b in gl.static_range(2):
            row = (2 * chunk + b) * blocks_n + i_n * (BN // 16)
            tma_load(words, [row, 0], full, s_words.index(2 * unit + b))
        for g in gl.static_range(GROUPS):
            group = chunk * GROUPS + g if GROUPS > 1 else chunk // CHUNKS_A_GROUP
            tma_load(scales, [group * N + i_n * BN], full, s_scales.index(unit * GROUPS + g))
            if ASYM:
                tma_load(zeros, [group * N + i_n * BN], full, s_zeros.index(unit * GROUPS + g))


@gluon.jit
def loader(
    x, words, scales, zeros, s_words, s_x, s_scales, s_zeros, full, N, blocks_n, steps, total, waves, tiles_m,
    CHUNKS_A_GROUP, BM: gl.constexpr, BN: gl.constexpr, UNROLL: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, GROUPS: gl.constexpr, ASYM: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """One warp: everything a program reads, STAGES stages ahead."""
    SCALE_BYTES: gl.constexpr = BN * scales.dtype.primitive_bitwidth // 8 + (zeros.block_shape[0] if ASYM else 0)
    BYTES: gl.constexpr = UNROLL * (BN * 64 + BM * 256 + GROUPS * SCALE_BYTES)
    begin, _, count = share(steps, total, waves)
    i_tile, i_step = first_step(begin, steps, waves)
    if OVERLAP:
        # the weight is constant: its first stages may fly before the kernel in front, which made x, has finished
        for i in gl.static_range(STAGES):
            if i < count:
                load_weight(
                    words, scales, zeros, full.index(i), s_words, s_scales, s_zeros, i, i_tile // tiles_m, i_step, N,
                    blocks_n, CHUNKS_A_GROUP, BN, UNROLL, GROUPS, ASYM, BYTES,
                )  # fmt: skip
                i_tile, i_step = next_step(i_tile, i_step, begin, steps, waves)
        wait_for_kernel_in_front()
        i_tile, i_step = first_step(begin, steps, waves)
    i_stage = 0
    for i in range(count):
        ready = full.index(i_stage)
        if i >= STAGES:
            wait_to_be_told(FIRST_BARRIER + STAGES * (WARPS // 4) + i_stage, 32 * WARPS + 32)
        if not OVERLAP or i >= STAGES:
            load_weight(
                words, scales, zeros, ready, s_words, s_scales, s_zeros, i_stage, i_tile // tiles_m, i_step, N,
                blocks_n, CHUNKS_A_GROUP, BN, UNROLL, GROUPS, ASYM, BYTES,
            )  # fmt: skip
        for b in gl.static_range(2 * UNROLL):
            o_x = [(i_tile % tiles_m) * BM, (i_step * 2 * UNROLL + b) * 64]
            tma_load(x, o_x, ready, s_x.index(i_stage * 2 * UNROLL + b))
        i_tile, i_step = next_step(i_tile, i_step, begin, steps, waves)
        i_stage = gl.where(i_stage + 1 == STAGES, 0, i_stage + 1)


# -------------------------------------------------------------------------------------------------- sums of shares


@gluon.jit
def sum_shares(
    acc, partial, counters, i_tile, steps, total, shared, BN: gl.constexpr, BM: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The whole sum of a tile, of those that are ``shared`` the ``i_tile``-th, and whether this program holds it."""
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    begin = i_tile * steps
    first = 0
    last = 0
    if shared:
        first = ((begin + 1) * programs - 1) // total
        last = ((begin + steps) * programs - 1) // total
    whole = True
    if first != last:
        o_rows = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))[:, None] * BM
        o_partial = o_rows + gl.arange(0, BM, gl.SliceLayout(0, LAYOUT))[None, :]
        # a program shares at most the tile it starts in and the tile it ends in
        mine = 2 * pid + ((pid * total // programs) // steps != i_tile).to(gl.int32)
        gl.store(partial + mine * (BN * BM) + o_partial, acc, cache_modifier=".cg")
        fence_device()
        barrier()
        # one program is the first of at most one shared tile, so its number names the counter
        arrived = gl.atomic_add(counters + first, 1, sem="acq_rel")
        whole = arrived == last - first
        if whole:
            fence_device()
            acc = gl.zeros([BN, BM], gl.float32, LAYOUT)
            for i in range(first, last + 1):
                share = 2 * i + ((i * total // programs) // steps != i_tile).to(gl.int32)
                acc += gl.load(partial + share * (BN * BM) + o_partial, cache_modifier=".cg")
            gl.atomic_xchg(counters + first, 0, sem="relaxed")
    return acc, whole


@gluon.jit
def finish(acc, bias, o_n, N, BIAS: gl.constexpr, DTYPE: gl.constexpr, SCALED: gl.constexpr):
    if gl.bfloat16 == DTYPE and not SCALED:
        acc = acc * 1048576.0  # 2^20, see BF16
    if BIAS:
        acc += gl.load(bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def store_tile(tile, out, i_n, i_m, M, N, BN: gl.constexpr, BM: gl.constexpr, DTYPE: gl.constexpr):
    """Stores a tile ``[BN, BM]`` of out^T: columns ``i_n ..``, rows ``i_m ..``.

    A lane holds two neighbouring rows of a column, where memory wants neighbouring columns. Transposing 8 x 8 blocks
    inside each warp makes them that, and no warp waits for another.
    """
    b_low, b_high = gl.split(gl.reshape(tile.to(DTYPE), [BN, BM // 2, 2]))
    b_out = gl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.b32 t, {$1, $2}; movmatrix.sync.aligned.m8n8.trans.b16 $0, t; }",
        "=r,h,h",
        [b_low.to(gl.int16, bitcast=True), b_high.to(gl.int16, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    o_column = gl.arange(0, BN, gl.SliceLayout(1, b_out.type.layout))[:, None]
    o_pair = gl.arange(0, BM // 2, gl.SliceLayout(0, b_out.type.layout))[None, :]
    o_n = i_n + (o_column & -8) + 2 * (o_pair & 3)
    o_m = i_m + (o_column & 7) + 8 * (o_pair >> 2)
    p_out = out.to(gl.pointer_type(gl.int32), bitcast=True) + (o_m.to(gl.int64) * (N // 2) + (o_n >> 1))
    gl.store(p_out, b_out, mask=(o_m < M) & (o_n < N))


# ------------------------------------------------------------------------------------------------------ mma.sync


@gluon.jit
def narrow_worker(
    s_words, s_x, s_scales, s_zeros, bias, out, partial, counters, M, N, steps, total, waves, tiles_m,
    BM: gl.constexpr, BN: gl.constexpr, UNROLL: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GROUPS: gl.constexpr, ASYM: gl.constexpr, BIAS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = s_x.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = block_layout(BN, WARPS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    first, last, count = share(steps, total, waves)
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
                        b_a = operand(
                            b_part, s_scales.index(group), s_zeros.index(group), BN, 1 if GROUPS == 4 else 2, DTYPE,
                            ASYM, False, LEFT,
                        )  # fmt: skip
                        dot = mma_v2(b_a, p_x.permute((1, 0)).load(RIGHT), dot)
                        if GROUPS > 1 or b == 1:
                            # the scale meets the float32 sum of its group: it rounds nothing and is never narrowed
                            b_scale = s_scales.index(group).load(gl.SliceLayout(1, MMA)).to(gl.float32)
                            acc += dot * b_scale[:, None]
                            dot = gl.zeros([BN, BM], gl.float32, MMA)
            if i_chunk + STAGES < count:
                release(FIRST_BARRIER + STAGES * (WARPS // 4) + i_stage, 32 * WARPS + 32)
            i_stage = gl.where(i_stage + 1 == STAGES, 0, i_stage + 1)
        acc, whole = sum_shares(acc, partial, counters, i_shared, steps, total, i_visit >= waves, BN, BM, MMA)
        if whole:
            o_n = (i_tile // tiles_m) * BN + gl.arange(0, BN, gl.SliceLayout(1, MMA))
            acc = finish(acc, bias, o_n, N, BIAS, DTYPE, False)
            store_tile(acc, out, (i_tile // tiles_m) * BN, (i_tile % tiles_m) * BM, M, N, BN, BM, DTYPE)


@gluon.jit(do_not_specialize=["M", "N", "blocks_n", "steps", "total", "waves", "tiles_m", "CHUNKS_A_GROUP"])
def narrow_kernel(
    x, words, scales, zeros, bias, out, partial, counters, M, N, blocks_n, steps, total, waves, tiles_m,
    CHUNKS_A_GROUP,
    BM: gl.constexpr, BN: gl.constexpr, UNROLL: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GROUPS: gl.constexpr, ASYM: gl.constexpr, BIAS: gl.constexpr, OVERLAP: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    UNITS: gl.constexpr = STAGES * UNROLL
    s_words = gl.allocate_shared_memory(gl.int32, [2 * UNITS, BN // 16, 128], words.layout)
    s_x = gl.allocate_shared_memory(x.dtype, [2 * UNITS, BM, 64], x.layout)
    s_scales = gl.allocate_shared_memory(scales.dtype, [UNITS * GROUPS, BN], scales.layout)
    s_zeros = (
        gl.allocate_shared_memory(gl.uint8, [UNITS * GROUPS, zeros.block_shape[0]], zeros.layout) if ASYM else s_scales
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    if OVERLAP:
        let_next_kernel_start()
    gl.warp_specialize(
        [
            (narrow_worker, (s_words, s_x, s_scales, s_zeros, bias, out, partial, counters, M, N, steps,
                             total, waves, tiles_m, BM, BN, UNROLL, STAGES, WARPS, GROUPS, ASYM, BIAS, OVERLAP)),
            (loader, (x, words, scales, zeros, s_words, s_x, s_scales, s_zeros, full, N, blocks_n, steps, total, waves,
                      tiles_m, CHUNKS_A_GROUP, BM, BN, UNROLL, STAGES, WARPS, GROUPS, ASYM, OVERLAP)),
            (messenger, (full, steps, total, waves, WARPS, STAGES)),
        ],
        [1, 1],
        [32 if GROUPS == 4 else 24, 24],  # registers: four groups a chunk are more to ask for
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- wgmma


@gluon.jit
def wide_worker(
    s_words, s_x, s_scales, s_zeros, bias, out, partial, counters, M, N, steps, total, waves, tiles_m,
    BM: gl.constexpr, BN: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GROUPS: gl.constexpr, ASYM: gl.constexpr, BIAS: gl.constexpr, OVERLAP: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    """PIECES products a chunk; each operand is unpacked while the product before it runs."""
    DTYPE: gl.constexpr = s_x.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = block_layout(BN, WARPS)
    HALVES: gl.constexpr = 4 // PIECES
    A_GROUP: gl.constexpr = PIECES // GROUPS  # products that share a scale
    first, last, count = share(steps, total, waves)
    i_stage = 0
    zero = gl.zeros([BN, BM], gl.float32, MMA)
    if OVERLAP:
        wait_for_kernel_in_front()
    wait_for_stage(0, WARPS // 4)
    b_first = load_block(s_words.index(0), WORDS, BN)
    b_second = load_block(s_words.index(1), WORDS, BN)
    b_part = b_first if PIECES == 2 else half_block(b_first, 0, BN)
    b_a = operand(b_part, s_scales.index(0), s_zeros.index(0), BN, HALVES, DTYPE, ASYM, SCALED, LEFT)
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
                    if (h == 0) & (i > 0) & (i + STAGES <= count):
                        # the products that are done were made of everything that was loaded from that stage
                        done_with = gl.where(i_stage == 0, STAGES - 1, i_stage - 1)
                        tell(FIRST_BARRIER + STAGES * (WARPS // 4) + done_with, 32 * WARPS + 32)
                elif h % A_GROUP == 0:
                    dot = warpgroup_mma(
                        b_a, p_x.permute((1, 0)), warpgroup_mma_init(zero), use_acc=False, is_async=True
                    )
                else:
                    dot = warpgroup_mma(b_a, p_x.permute((1, 0)), dot, is_async=True)
                # the operand after this one
                n = h + 1 if h + 1 < PIECES else 0
                if n == 0:
                    if i + 1 < count:
                        wait_for_stage(n_stage, WARPS // 4)
                    b_first = load_block(s_words.index(2 * n_stage), WORDS, BN)
                    group = n_stage * GROUPS
                else:
                    group = i_stage * GROUPS + n * GROUPS // PIECES
                b_words = b_first if n * 2 < PIECES else b_second
                b_part = b_words if PIECES == 2 else half_block(b_words, n % 2, BN)
                b_next = operand(
                    b_part, s_scales.index(group), s_zeros.index(group), BN, HALVES, DTYPE, ASYM, SCALED, LEFT
                )
                if not SCALED and h % A_GROUP == A_GROUP - 1:
                    done = warpgroup_mma_wait(0, deps=[dot])
                    p_scale = s_scales.index(i_stage * GROUPS + h * GROUPS // PIECES)
                    acc += done * p_scale.load(gl.SliceLayout(1, MMA)).to(gl.float32)[:, None]
                if n == 0:
                    b_second = load_block(s_words.index(2 * n_stage + 1), WORDS, BN)
                b_a = b_next
            if not SCALED and i + STAGES < count:
                release(FIRST_BARRIER + STAGES * (WARPS // 4) + i_stage, 32 * WARPS + 32)
            i_stage = n_stage
        tile = warpgroup_mma_wait(0, deps=[acc]) if SCALED else acc
        tile, whole = sum_shares(tile, partial, counters, i_shared, steps, total, i_visit >= waves, BN, BM, MMA)
        if whole:
            o_n = (i_tile // tiles_m) * BN + gl.arange(0, BN, gl.SliceLayout(1, MMA))
            tile = finish(tile, bias, o_n, N, BIAS, DTYPE, SCALED)
            store_tile(tile, out, (i_tile // tiles_m) * BN, (i_tile % tiles_m) * BM, M, N, BN, BM, DTYPE)


@gluon.jit(do_not_specialize=["M", "blocks_n", "steps", "total", "waves", "tiles_m", "CHUNKS_A_GROUP"])
def wide_kernel(
    x, words, scales, zeros, bias, out, partial, counters, M, N, blocks_n, steps, total, waves, tiles_m,
    CHUNKS_A_GROUP,
    BM: gl.constexpr, BN: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GROUPS: gl.constexpr, ASYM: gl.constexpr, BIAS: gl.constexpr, OVERLAP: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    s_words = gl.allocate_shared_memory(gl.int32, [2 * STAGES, BN // 16, 128], words.layout)
    s_x = gl.allocate_shared_memory(x.dtype, [2 * STAGES, BM, 64], x.layout)
    s_scales = gl.allocate_shared_memory(scales.dtype, [STAGES * GROUPS, BN], scales.layout)
    s_zeros = (
        gl.allocate_shared_memory(gl.uint8, [STAGES * GROUPS, zeros.block_shape[0]], zeros.layout) if ASYM else s_scales
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    if OVERLAP:
        let_next_kernel_start()
    gl.warp_specialize(
        [
            (wide_worker, (s_words, s_x, s_scales, s_zeros, bias, out, partial, counters, M, N, steps,
                           total, waves, tiles_m, BM, BN, PIECES, STAGES, WARPS, GROUPS, ASYM, BIAS, OVERLAP, SCALED)),
            (loader, (x, words, scales, zeros, s_words, s_x, s_scales, s_zeros, full, N, blocks_n, steps, total, waves,
                      tiles_m, CHUNKS_A_GROUP, BM, BN, 1, STAGES, WARPS, GROUPS, ASYM, OVERLAP)),
            (messenger, (full, steps, total, waves, WARPS, STAGES)),
        ],
        [1, 1],
        [32 if GROUPS == 4 else 24, 24],  # registers: four groups a chunk are more to ask for
    )  # fmt: skip
