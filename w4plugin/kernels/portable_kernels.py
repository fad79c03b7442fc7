"""The portable Triton kernels: weights become 16-bit floats only in registers, inside the multiplication.

    out[m, n] = sum_g scale[g, n] * sum_{k in g} x[m, k] * (q[k, n] - zero[g, n]) + bias[n]

The product is taken transposed, ``out^T [BN, BM] = W^T [BN, 64] x^T [64, BM]``: the words of :mod:`.fragments` load as
16 bytes a lane straight into the registers of the tensor core's first operand, and x streams through shared memory.

A program owns BN columns, BM rows of x and a share of K, in steps of UNROLL blocks of 64 rows. Words and scales of the
next step are on their way to registers while this step multiplies.
"""

import triton
import triton.language as tl

from w4plugin.kernels.portable_weights import BF16_HEADROOM, by_row, cast, per_group, slots, weights, zero_points


@triton.jit
def _load_words(ptr, block, blocks, o_j, n16, live, WHOLE_K: tl.constexpr, WHOLE_N: tl.constexpr):
    """int32 ``[J, 128]``: the words of one block of 64 rows, zeros outside of the weight, nothing unless ``live``."""
    at = ptr + block * (n16 * 128) + o_j * 128 + tl.arange(0, 128)[None, :]
    mask = live & (o_j >= 0)
    if not WHOLE_K:
        mask = mask & (block < blocks)
    if not WHOLE_N:
        mask = mask & (o_j < n16)
    return tl.load(at, mask=mask, other=0)


@triton.jit
def _load_step(ptr, step, blocks, o_j, n16, live, UNROLL: tl.constexpr, WHOLE_K: tl.constexpr, WHOLE_N: tl.constexpr):
    words = ()
    for u in tl.static_range(UNROLL):
        words = words + (_load_words(ptr, step * UNROLL + u, blocks, o_j, n16, live, WHOLE_K, WHOLE_N),)
    return words


@triton.jit
def _load_groups(
    scales_ptr,
    zeros_ptr,
    step,
    o_n,
    n,
    N,
    G,
    J: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ASYM: tl.constexpr,
    ON_SUM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Zero points and scales of a step, one tuple entry a segment of equal group: (z0, z1, s0, s1).

    z1 and s1 stay empty unless SPAN = 16; with ON_SUM s0 holds ``[BN]`` tensors.
    """
    z0, z1, s0, s1 = (), (), (), ()
    SEGMENT: tl.constexpr = SPAN // 64 if SPAN > 64 else 1
    for i in tl.static_range(UNROLL // SEGMENT):
        block = step * UNROLL + i * SEGMENT
        if ASYM:
            a, b = per_group(zeros_ptr, block, o_n, N, G, J, GROUP, SPAN, MASKED)
            z0 = z0 + (a,)
            if SPAN == 16:
                z1 = z1 + (b,)
        if ON_SUM:
            g = 0
            if GROUP:
                g = tl.minimum(block * 64 // GROUP, G - 1)
            if MASKED:
                s0 = s0 + (tl.load(scales_ptr + g * N + n, mask=n < N, other=0),)
            else:
                s0 = s0 + (tl.load(scales_ptr + g * N + n),)
        else:
            a, b = per_group(scales_ptr, block, o_n, N, G, J, GROUP, SPAN, MASKED)
            s0 = s0 + (a,)
            if SPAN == 16:
                s1 = s1 + (b,)
    return z0, z1, s0, s1


@triton.jit
def _multiply(
    acc,
    words,
    z0s,
    z1s,
    s0s,
    s1s,
    x_ptr,
    rows_ptr,
    scales_ptr,
    zeros_ptr,
    step,
    m,
    n,
    M,
    N,
    K,
    stride,
    BM: tl.constexpr,
    J: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ASYM: tl.constexpr,
    ON_SUM: tl.constexpr,
    BY_ROW: tl.constexpr,
    WHOLE_K: tl.constexpr,
    UNPACK: tl.constexpr,
    KW: tl.constexpr,
):
    """acc ``[BN, BM]`` plus one step of UNROLL blocks."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SEGMENT: tl.constexpr = SPAN // 64 if SPAN > 64 else 1
    PARTIAL: tl.constexpr = ON_SUM and GROUP != 0
    part = tl.zeros((J * 16, BM), tl.float32)
    for u in tl.static_range(UNROLL):
        k = (step * UNROLL + u) * 64 + tl.arange(0, 64)
        mask = (m < M)[:, None]
        if not WHOLE_K:
            mask = mask & (k < K)[None, :]
        x = tl.load(x_ptr + m.to(tl.int64)[:, None] * stride + k[None, :], mask=mask, other=0.0)
        if UNPACK == "interpreter" and DTYPE == tl.bfloat16:
            x = x.to(tl.float32)
        x = tl.trans(slots(x, BM, KW))
        if BY_ROW:
            none = tl.zeros((1, 1, 1, 1, 1), tl.int32)
            w = weights(words[u], none, none, none, none, J, DTYPE, False, UNPACK, KW)
            w = by_row(w, rows_ptr, scales_ptr, zeros_ptr, step * UNROLL + u, n, K, N, DTYPE, ASYM, UNPACK)
        else:
            if ASYM:
                z0 = z0s[u // SEGMENT].to(tl.int32)
                z1 = z0
                if SPAN == 16:
                    z1 = z1s[u // SEGMENT].to(tl.int32)
            else:
                z0 = tl.full((1, 1, 1, 1, 1), 8, tl.int32)
                z1 = z0
            if ON_SUM:
                w = weights(words[u], z0, z1, z0, z1, J, DTYPE, False, UNPACK, KW)
            elif SPAN == 16:
                w = weights(words[u], z0, z1, s0s[u // SEGMENT], s1s[u // SEGMENT], J, DTYPE, True, UNPACK, KW)
            else:
                w = weights(words[u], z0, z1, s0s[u // SEGMENT], s0s[u // SEGMENT], J, DTYPE, True, UNPACK, KW)
        if PARTIAL:
            part = tl.dot(w, x, part)
            if (u + 1) % SEGMENT == 0 or u + 1 == UNROLL:
                acc += part * s0s[u // SEGMENT].to(tl.float32)[:, None]
                part = tl.zeros((J * 16, BM), tl.float32)
        else:
            acc = tl.dot(w, x, acc)
    return acc


@triton.jit(do_not_specialize=["M", "G", "blocks"])
def matmul_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    rows_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    count_ptr,
    M,
    N,
    K,
    G,
    stride8,
    blocks,
    n16,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UNROLL: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ASYM: tl.constexpr,
    ON_SUM: tl.constexpr,
    BY_ROW: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE_K: tl.constexpr,
    WHOLE_N: tl.constexpr,
    UNPACK: tl.constexpr,
    KW: tl.constexpr,
):
    """out ``[M, N]`` = x ``[M, K]`` W + bias, one program a tile and a share of K.

    Args:
        words_ptr: int32 ``[blocks, n16, 128]``, fragment order.
        scales_ptr, zeros_ptr: ``[G, N]``; zeros uint8, read when ASYM.
        rows_ptr: int32 ``[K]``, the group of each row, read when BY_ROW.
        partial_ptr: float32 ``[tiles, SPLIT, BN, BM]``, never read before written.
        count_ptr: int32 ``[tiles]``, zero before and after.
        stride8: x's row stride in units of 8 elements (rows start at multiples of 16 bytes).
    """
    J: tl.constexpr = BN // 16
    pid_m, pid_n, pid_k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = pid_m * BM + tl.arange(0, BM)
    n = pid_n * BN + tl.arange(0, BN)
    o_j = pid_n * J + tl.arange(0, J)[:, None]
    o_n = o_j * 16 + tl.arange(0, 8)[None, :]
    stride = stride8 * 8
    steps = tl.cdiv(blocks, UNROLL)
    share = tl.cdiv(steps, SPLIT)
    first = pid_k * share
    last = tl.minimum(first + share, steps)
    STATIC: tl.constexpr = GROUP == 0 or BY_ROW  # nothing to load per step

    acc = tl.zeros((BN, BM), tl.float32)
    if BY_ROW:
        groups = ((), (), (), ())
    else:
        groups = _load_groups(
            scales_ptr, zeros_ptr, first, o_n, n, N, G, J, UNROLL, GROUP, SPAN, ASYM, ON_SUM, not WHOLE_N
        )
    if PREFETCH:
        words = _load_step(words_ptr, first, blocks, o_j, n16, first < last, UNROLL, WHOLE_K, WHOLE_N)
        for step in tl.range(first, last, num_stages=STAGES):
            ahead = step + 1
            next_words = _load_step(words_ptr, ahead, blocks, o_j, n16, ahead < last, UNROLL, WHOLE_K, WHOLE_N)
            if not STATIC:
                next_groups = _load_groups(
                    scales_ptr, zeros_ptr, tl.minimum(ahead, steps - 1), o_n, n, N, G,
                    J, UNROLL, GROUP, SPAN, ASYM, ON_SUM, not WHOLE_N,
                )  # fmt: skip
            acc = _multiply(
                acc, words, groups[0], groups[1], groups[2], groups[3], x_ptr, rows_ptr, scales_ptr, zeros_ptr,
                step, m, n, M, N, K, stride, BM, J, UNROLL, GROUP, SPAN, ASYM, ON_SUM, BY_ROW, WHOLE_K, UNPACK, KW,
            )  # fmt: skip
            words = next_words
            if not STATIC:
                groups = next_groups
    else:
        for step in tl.range(first, last, num_stages=STAGES):
            words = _load_step(words_ptr, step, blocks, o_j, n16, True, UNROLL, WHOLE_K, WHOLE_N)
            if not STATIC:
                groups = _load_groups(
                    scales_ptr, zeros_ptr, step, o_n, n, N, G, J, UNROLL, GROUP, SPAN, ASYM, ON_SUM, not WHOLE_N
                )
            acc = _multiply(
                acc, words, groups[0], groups[1], groups[2], groups[3], x_ptr, rows_ptr, scales_ptr, zeros_ptr,
                step, m, n, M, N, K, stride, BM, J, UNROLL, GROUP, SPAN, ASYM, ON_SUM, BY_ROW, WHOLE_K, UNPACK, KW,
            )  # fmt: skip

    if ON_SUM and GROUP == 0:
        acc = acc * groups[2][0].to(tl.float32)[:, None]
    if SPLIT == 1:
        _finish(acc, bias_ptr, out_ptr, m, n, M, N, ON_SUM, BIAS, UNPACK)
    else:
        tile = pid_n * tl.num_programs(0) + pid_m
        o_part = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        mine = partial_ptr + (tile * SPLIT + pid_k) * (BN * BM)
        tl.store(mine + o_part, acc)
        # Every thread's stores come before the count that thread 0 makes for all; whoever counts last sees them.
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            total = tl.zeros((BN, BM), tl.float32)
            for s in tl.static_range(SPLIT):
                part = partial_ptr + (tile * SPLIT + s) * (BN * BM)
                total += tl.load(part + o_part, cache_modifier=".cg")
            _finish(total, bias_ptr, out_ptr, m, n, M, N, ON_SUM, BIAS, UNPACK)
            tl.store(count_ptr + tile, 0)


@triton.jit
def _finish(acc, bias_ptr, out_ptr, m, n, M, N, ON_SUM: tl.constexpr, BIAS: tl.constexpr, UNPACK: tl.constexpr):
    """The sum ``[BN, BM]`` plus bias to out ``[M, N]``, rounded once."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if ON_SUM and DTYPE == tl.bfloat16:
        acc = acc * 2.0**BF16_HEADROOM
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, cast(acc, DTYPE, UNPACK), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["G", "start", "last"])
def dequantize_kernel(
    words_ptr,
    scales_ptr,
    zeros_ptr,
    rows_ptr,
    out_ptr,
    start,
    N,
    last,
    K,
    G,
    n16,
    J: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ASYM: tl.constexpr,
    BY_ROW: tl.constexpr,
    UNPACK: tl.constexpr,
):
    """Columns ``16 * start : last`` of W as rows, out ``[columns, K]``; a program takes 16 J columns, 64 rows of W."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    block, pid_n = tl.program_id(0), tl.program_id(1)
    local = pid_n * (16 * J) + tl.arange(0, 16 * J)
    n = start * 16 + local
    o_j = start + pid_n * J + tl.arange(0, J)[:, None]
    o_n = o_j * 16 + tl.arange(0, 8)[None, :]
    words = _load_words(words_ptr, block, block + 1, o_j, n16, True, True, False)
    if BY_ROW:
        none = tl.zeros((1, 1, 1, 1, 1), tl.int32)
        w = weights(words, none, none, none, none, J, DTYPE, False, UNPACK, 2)
        w = by_row(w, rows_ptr, scales_ptr, zeros_ptr, block, n, K, N, DTYPE, ASYM, UNPACK)
    else:
        z0, z1 = zero_points(zeros_ptr, block, o_n, N, G, J, GROUP, SPAN, True, ASYM)
        s0, s1 = per_group(scales_ptr, block, o_n, N, G, J, GROUP, SPAN, True)
        w = weights(words, z0, z1, s0, s1, J, DTYPE, True, UNPACK, 2)
    k = block * 64 + tl.arange(0, 64)
    tl.store(out_ptr + local.to(tl.int64)[:, None] * K + k[None, :], w, mask=(n < last)[:, None] & (k < K)[None, :])
