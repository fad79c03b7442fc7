"""One chunk of K in the kernel with wgmma: PIECES products, each operand unpacked while the product before it runs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from w4plugin.kernels.gluon_names import warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from w4plugin.kernels.hopper_hand_over import FIRST_BARRIER, release, tell, wait_for_stage
from w4plugin.kernels.hopper_output import lends, wait_until_sent
from w4plugin.kernels.hopper_weights import block_layout, factors, half_block, load_block, operand


@gluon.constexpr_function
def _wait(count):
    return f"wgmma.wait_group.sync.aligned {count}; mov.u32 $0, 0;"


@gluon.jit
def wait_for_products_before(COUNT: gl.constexpr):
    """Until only the COUNT products issued last are in flight.

    Gluon's own wait hands the sums through, and ptxas takes that for a change of them: it then lets no product fly
    across it (C7514). This one names no register, so nothing may read the sums before Gluon's wait for all.
    """
    ASM: gl.constexpr = _wait(COUNT)
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


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
def piece(s_x, i_stage, H: gl.constexpr, PIECES: gl.constexpr):
    """x of the H-th of a chunk's PIECES products, as the right operand."""
    p_x = s_x.index(2 * i_stage + H * 2 // PIECES)
    if PIECES == 4:
        p_x = p_x.slice(32 * (H % 2), 32, dim=1)
    return p_x.permute((1, 0))


@gluon.jit
def multiply_chunk(
    acc, acc_rest, b_first, b_second, b_part, b_c, b_d, b_f, b_a, zero, s_words, s_x, s_rest, s_scales, s_zeros, i,
    begin, count, i_stage,
    BM: gl.constexpr, BN: gl.constexpr, PIECES: gl.constexpr, PRODUCTS: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, GROUPS: gl.constexpr, ASYM: gl.constexpr, SCALED: gl.constexpr, STAGED: gl.constexpr,
    MMA: gl.constexpr, REST: gl.constexpr, MMA_REST: gl.constexpr,
):  # fmt: skip
    """The first PRODUCTS of a chunk's PIECES products, and what the chunk after it starts with.

    With REST each operand is multiplied by BM rows of x and by as many more.
    """
    DTYPE: gl.constexpr = s_x.dtype
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = block_layout(BN, WARPS)
    HALVES: gl.constexpr = 4 // PIECES
    A_GROUP: gl.constexpr = PIECES // GROUPS  # products that share a scale
    # how many products before a chunk's first its words are asked for; of two, that is too early for what is loading
    AHEAD: gl.constexpr = 1 if SCALED and PIECES == 4 else 0
    # the product of a tile's first chunk with which the stage before is given back, whose x may still be being sent;
    # the next stage, which is the same one where there are two, is waited for thereafter
    SENT: gl.constexpr = PIECES - 1 - AHEAD if STAGED and lends(BM) else 0
    n_stage = gl.where(i_stage + 1 == STAGES, 0, i_stage + 1)
    for h in gl.static_range(PRODUCTS):
        p_x = piece(s_x, i_stage, h, PIECES)
        if SCALED:
            acc = warpgroup_mma(b_a, p_x, acc, is_async=True)
            if REST > 0:
                p_rest = piece(s_rest, i_stage, h, PIECES)
                b_same = gl.convert_layout(b_a, gl.DotOperandLayout(0, MMA_REST, 2), assert_trivial=True)
                acc_rest = warpgroup_mma(b_same, p_rest, acc_rest, is_async=True)
            wait_for_products_before(2 if REST > 0 else 1)
            if h == 0 or h == SENT:
                # the products that are done were made of everything that was loaded from the stage before
                after = 0 if SENT == 0 else begin
                if ((i > after) if h == 0 else (i == after)) & (i > 0) & (i + STAGES <= count):
                    if h > 0:
                        wait_until_sent()
                    done_with = gl.where(i_stage == 0, STAGES - 1, i_stage - 1)
                    tell(FIRST_BARRIER + STAGES * (WARPS // 4) + done_with, 32 * WARPS + 32)
        elif h % A_GROUP == 0:
            dot = warpgroup_mma(b_a, p_x, warpgroup_mma_init(zero), use_acc=False, is_async=True)
        else:
            dot = warpgroup_mma(b_a, p_x, dot, is_async=True)
        # the operand after this one, while the product runs
        n = h + 1 if h + 1 < PRODUCTS else 0
        if AHEAD == 0 and n == 0:
            b_first, b_c, b_d, b_f = next_chunk(
                b_part, s_words, s_scales, s_zeros, n_stage, i + 1 < count,
                BN, WARPS, GROUPS, DTYPE, ASYM, SCALED,
            )  # fmt: skip
        b_words = b_first if n * 2 < PIECES else b_second
        b_part = b_words if PIECES == 2 else half_block(b_words, n % 2, BN)
        if n > 0 and n * GROUPS % PIECES == 0:
            group = i_stage * GROUPS + n * GROUPS // PIECES
            b_c, b_d, b_f = factors(b_part, s_scales.index(group), s_zeros.index(group), BN, DTYPE, ASYM, SCALED)
        b_next = operand(b_part, b_c, b_d, b_f, BN, HALVES, DTYPE, SCALED, LEFT)
        if not SCALED and h % A_GROUP == A_GROUP - 1:
            done = warpgroup_mma_wait(0, deps=[dot])
            p_scale = s_scales.index(i_stage * GROUPS + h * GROUPS // PIECES)
            acc += done * p_scale.load(gl.SliceLayout(1, MMA)).to(gl.float32)[:, None]
        if AHEAD > 0 and h == PRODUCTS - 1 - AHEAD:
            b_first, b_c, b_d, b_f = next_chunk(
                b_part, s_words, s_scales, s_zeros, n_stage, i + 1 < count,
                BN, WARPS, GROUPS, DTYPE, ASYM, SCALED,
            )  # fmt: skip
        if n == 0:
            b_second = load_block(s_words.index(2 * n_stage + 1), WORDS, BN)
        b_a = b_next
    if not SCALED and i + STAGES < count:
        release(FIRST_BARRIER + STAGES * (WARPS // 4) + i_stage, 32 * WARPS + 32)
    return acc, acc_rest, b_first, b_second, b_part, b_c, b_d, b_f, b_a, n_stage
