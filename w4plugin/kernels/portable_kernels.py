"""The portable Triton kernels: weights become 16-bit floats only in registers, inside the multiplication.

    out[m, n] = sum_g scale[g, n] * sum_{k in g} x[m, k] * (q[k, n] - zero[g, n]) + bias[n]

The product is taken transposed, ``out^T [BN, BM] = W^T [BN, 64] x^T [64, BM]``: the words of :mod:`.fragments` load as
16 bytes a lane straight into the registers of the tensor core's first operand, and x streams through shared memory.

A program owns BN columns, BM rows of x and a share of K. Its warps share the columns (K_WARPS = 1, the form that wgmma
and tcgen05 want), or each takes its own part of K for all columns (K_WARPS = warps, a batched product summed over warps
at the end: enough bytes in flight for few columns, and no reduction through memory). In a step each part of K moves on
by UNROLL blocks of 64 rows; words and scales of the next step are on their way to registers while this one multiplies.

``p_`` words as loaded, ``o_`` offsets, ``r`` rows of the word tile: one a block of 16 columns (and part of K).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from w4plugin.kernels.portable_weights import BF16_HEADROOM, by_row, cast, per_group, slots, weights, zero_points


@triton.jit
def _load_words(ptr, block, blocks, o_j, n16, live, STREAM: tl.constexpr, WHOLE_K: tl.constexpr, WHOLE_N: tl.constexpr):
    """int32 ``[R, 128]``: the words of blocks of 64 rows, zeros outside of the weight, nothing unless ``live``."""
    at = ptr + block * (n16 * 128) + o_j * 128 + tl.arange(0, 128)[None, :]
    mask = live & (o_j >= 0)
    if not WHOLE_K:
        mask = mask & (block < blocks)
    if not WHOLE_N:
        mask = mask & (o_j < n16)
    if STREAM:  # read once: leave the cache to x and scales
        return tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=mask, other=0)


@triton.jit
def _load_step(
    ptr,
    step,
    blocks,
    o_j,
    o_k,
    n16,
    live,
    UNROLL: tl.constexpr,
    K_WARPS: tl.constexpr,
    STREAM: tl.constexpr,
    WHOLE_K: tl.constexpr,
    WHOLE_N: tl.constexpr,
):
    """A tuple of UNROLL word tiles."""
    words = ()
    for u in tl.static_range(UNROLL):
        block = (step * K_WARPS + o_k) * UNROLL + u
        words = words + (_load_words(ptr, block, blocks, o_j, n16, live, STREAM, WHOLE_K, WHOLE_N),)
    return words


@triton.jit
def _load_groups(
    scales_ptr,
    zeros_ptr,
    step,
    o_n,
    o_k,
    n,
    N,
    G,
    R: tl.constexpr,
    UNROLL: tl.constexpr,
    K_WARPS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ASYM: tl.constexpr,
    ON_SUM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Zero points and scales of a step, one tuple entry a segment of equal group: (z0, z1, s0, s1).

    z1 and s1 stay empty unless SPAN = 16; with ON_SUM s0 holds ``[BN]`` (``[K_WARPS, BN]``) tensors.
    """
    z0, z1, s0, s1 = (), (), (), ()
    SEGMENT: tl.constexpr = SPAN // 64 if SPAN > 64 else 1
    for i in tl.static_range(UNROLL // SEGMENT):
        block = (step * K_WARPS + o_k) * UNROLL + i * SEGMENT
        if ASYM:
            a, b = per_group(zeros_ptr, block, o_n, N, G, R, GROUP, SPAN, MASKED)
            z0 = z0 + (a,)
            if SPAN == 16:
                z1 = z1 + (b,)
        if ON_SUM:
            if K_WARPS == 1 or GROUP == 0:  # one scale for all parts of K
                g = 0
                if GROUP:
                    g = tl.minimum(block * 64 // GROUP, G - 1)
                at, inside = scales_ptr + g * N + n, n < N
            else:
                rows = ((step * K_WARPS + tl.arange(0, K_WARPS)) * UNROLL + i * SEGMENT) * 64
                g = tl.minimum(rows // GROUP, G - 1)
                at, inside = scales_ptr + g[:, None] * N + n[None, :], (n < N)[None, :] & (g >= 0)[:, None]
            if MASKED:
                s0 = s0 + (tl.load(at, mask=inside, other=0),)
            else:
                s0 = s0 + (tl.load(at),)
        else:
            a, b = per_group(scales_ptr, block, o_n, N, G, R, GROUP, SPAN, MASKED)
            s0 = s0 + (a,)
            if SPAN == 16:
                s1 = s1 + (b,)
    return z0, z1, s0, s1


@triton.jit
def _load_x(
    x_ptr,
    step,
    u,
    m,
    M,
    K,
    stride,
    BM: tl.constexpr,
    UNROLL: tl.constexpr,
    K_WARPS: tl.constexpr,
    WHOLE_K: tl.constexpr,
    UNPACK: tl.constexpr,
    KW: tl.constexpr,
):
    """x^T ``[64, BM]`` (``[K_WARPS, 64, BM]``) in the slot order of the weights, zeros outside."""
    o_m = m.to(tl.int64) * stride
    if K_WARPS == 1:
        k = (step * UNROLL + u) * 64 + tl.arange(0, 64)
        at, mask, inside = x_ptr + o_m[:, None] + k[None, :], (m < M)[:, None], (k < K)[None, :]
    else:
        k = ((step * K_WARPS + tl.arange(0, K_WARPS)) * UNROLL + u)[:, None] * 64 + tl.arange(0, 64)[None, :]
        at, mask, inside = x_ptr + o_m[None, :, None] + k[:, None, :], (m < M)[None, :, None], (k < K)[:, None, :]
    if not WHOLE_K:
        mask = mask & inside
    x = tl.load(at, mask=mask, other=0.0)
    if UNPACK == "interpreter" and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    if K_WARPS == 1:
        return tl.trans(slots(x, BM, KW))
    else:
        x = tl.reshape(slots(tl.reshape(x, [K_WARPS * BM, 64]), K_WARPS * BM, KW), [K_WARPS, BM, 64])
        return tl.permute(x, (0, 2, 1))


@triton.jit
def _multiply(
    acc,
    one,
    words,
    groups,
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
    K_WARPS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ASYM: tl.constexpr,
    ON_SUM: tl.constexpr,
    BY_ROW: tl.constexpr,
    AWAIT: tl.constexpr,
    WHOLE_K: tl.constexpr,
    UNPACK: tl.constexpr,
    KW: tl.constexpr,
):
    """acc ``[BN, BM]`` (``[K_WARPS, BN, BM]``) plus one step.

    A sum that is used at once is awaited at once. A product carried round the loop instead stays in flight on Hopper,
    and Triton (3.6) lets the next step overwrite the registers that it still reads its weights from: wrong results,
    seen on an H200. So with AWAIT scaled weights go through a sum of their own too; ``one`` (1.0, which the compiler
    cannot know) keeps it from folding that back.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SEGMENT: tl.constexpr = SPAN // 64 if SPAN > 64 else 1
    R: tl.constexpr = J * K_WARPS
    z0s, z1s, s0s, s1s = groups
    part = tl.zeros_like(acc)
    for u in tl.static_range(UNROLL):
        x = _load_x(x_ptr, step, u, m, M, K, stride, BM, UNROLL, K_WARPS, WHOLE_K, UNPACK, KW)
        if BY_ROW:
            none = tl.zeros((1, 1, 1, 1, 1), tl.int32)
            w = weights(words[u], none, none, none, none, R, DTYPE, False, UNPACK, KW)
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
                w = weights(words[u], z0, z1, z0, z1, R, DTYPE, False, UNPACK, KW)
            elif SPAN == 16:
                w = weights(words[u], z0, z1, s0s[u // SEGMENT], s1s[u // SEGMENT], R, DTYPE, True, UNPACK, KW)
            else:
                w = weights(words[u], z0, z1, s0s[u // SEGMENT], s0s[u // SEGMENT], R, DTYPE, True, UNPACK, KW)
        if K_WARPS > 1:  # rows of the word tile are (j, part of K)
            w = tl.permute(tl.reshape(w, [J, K_WARPS, 16, 64]), (1, 0, 2, 3))
            w = tl.reshape(w, [K_WARPS, J * 16, 64])
        if ON_SUM:
            part = tl.dot(w, x, part)
            if (u + 1) % SEGMENT == 0 or u + 1 == UNROLL:
                acc += part * tl.expand_dims(s0s[u // SEGMENT].to(tl.float32), -1)
                part = tl.zeros_like(acc)
        elif AWAIT:
            acc += tl.dot(w, x, part) * one
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
    K_WARPS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ASYM: tl.constexpr,
    ON_SUM: tl.constexpr,
    BY_ROW: tl.constexpr,
    AWAIT: tl.constexpr,
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
        AWAIT: as :func:`_multiply` says.
        PDL: the kernel may start before the one ahead of it in the stream has ended; only the weight is read till then.
    """
    J: tl.constexpr = BN // 16
    R: tl.constexpr = J * K_WARPS
    STATIC: tl.constexpr = GROUP == 0 or BY_ROW  # no scales to load per step
    STREAM: tl.constexpr = BM <= 16
    MASKED: tl.constexpr = not WHOLE_N
    pid_m, pid_n, pid_k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = pid_m * BM + tl.arange(0, BM)
    n = pid_n * BN + tl.arange(0, BN)
    r = tl.arange(0, R)[:, None]
    if K_WARPS == 1:
        o_j, o_k = pid_n * J + r, 0
    else:
        o_j, o_k = pid_n * J + r // K_WARPS, r % K_WARPS
    o_n = o_j * 16 + tl.arange(0, 8)[None, :]
    stride = stride8 * 8
    steps = tl.cdiv(blocks, UNROLL * K_WARPS)
    share = tl.cdiv(steps, SPLIT)
    first = pid_k * share
    last = tl.minimum(first + share, steps)

    if K_WARPS == 1:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((K_WARPS, BN, BM), tl.float32)
    one = tl.where(K > 0, 1.0, 0.0)
    groups = ((), (), (), ())
    if not BY_ROW and (PREFETCH or STATIC):
        groups = _load_groups(
            scales_ptr, zeros_ptr, first, o_n, o_k, n, N, G, R, UNROLL, K_WARPS, GROUP, SPAN, ASYM, ON_SUM, MASKED
        )
    if PREFETCH:
        words = _load_step(
            words_ptr, first, blocks, o_j, o_k, n16, first < last, UNROLL, K_WARPS, STREAM, WHOLE_K, WHOLE_N
        )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if PREFETCH:
        for step in tl.range(first, last, num_stages=STAGES):
            ahead = step + 1
            next_words = _load_step(
                words_ptr, ahead, blocks, o_j, o_k, n16, ahead < last, UNROLL, K_WARPS, STREAM, WHOLE_K, WHOLE_N
            )
            if not STATIC:
                next_groups = _load_groups(
                    scales_ptr, zeros_ptr, ahead, o_n, o_k, n, N, G,
                    R, UNROLL, K_WARPS, GROUP, SPAN, ASYM, ON_SUM, MASKED,
                )  # fmt: skip
            acc = _multiply(
                acc, one, words, groups, x_ptr, rows_ptr, scales_ptr, zeros_ptr, step, m, n, M, N, K, stride,
                BM, J, UNROLL, K_WARPS, GROUP, SPAN, ASYM, ON_SUM, BY_ROW, AWAIT, WHOLE_K, UNPACK, KW,
            )  # fmt: skip
            words = next_words
            if not STATIC:
                groups = next_groups
    else:
        for step in tl.range(first, last, num_stages=STAGES):
            words = _load_step(
                words_ptr, step, blocks, o_j, o_k, n16, step < last, UNROLL, K_WARPS, STREAM, WHOLE_K, WHOLE_N
            )
            if STATIC:
                now = groups
            else:
                now = _load_groups(
                    scales_ptr, zeros_ptr, step, o_n, o_k, n, N, G,
                    R, UNROLL, K_WARPS, GROUP, SPAN, ASYM, ON_SUM, MASKED,
                )  # fmt: skip
            acc = _multiply(
                acc, one, words, now, x_ptr, rows_ptr, scales_ptr, zeros_ptr, step, m, n, M, N, K, stride,
                BM, J, UNROLL, K_WARPS, GROUP, SPAN, ASYM, ON_SUM, BY_ROW, AWAIT, WHOLE_K, UNPACK, KW,
            )  # fmt: skip

    if K_WARPS > 1:
        acc = tl.sum(acc, axis=0)
    if SPLIT == 1:
        _finish(acc, bias_ptr, out_ptr, m, n, M, N, ON_SUM, BIAS, UNPACK)
    else:
        tile = pid_n * tl.num_programs(0) + pid_m
        o_part = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        mask = (m < M)[None, :] & (n < N)[:, None]
        tl.store(partial_ptr + (tile * SPLIT + pid_k) * (BN * BM) + o_part, acc, mask=mask)
        # Every thread's stores come before the count that thread 0 makes for all; whoever counts last sees them.
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            total = tl.zeros((BN, BM), tl.float32)
            for s in tl.static_range(SPLIT):
                part = partial_ptr + (tile * SPLIT + s) * (BN * BM)
                total += tl.load(part + o_part, mask=mask, other=0.0, cache_modifier=".cg")
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
    words = _load_words(words_ptr, block, block + 1, o_j, n16, block >= 0, True, True, False)
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
