"""Grouped Triton kernels of a layer of experts.

    h[p]  = activation(x[t] W_gate[e]) * (x[t] W_up[e])        pair p: token t = p // topk, e = its p % topk-th expert
    y[p]  = weight[p] * h[p] W_down[e]
    out[t] = y[t, 0] + y[t, 1] + ...

Both products are :mod:`w4plugin.kernels.portable_kernels`' inner loop with an expert's weight and a list of rows. A
program takes BM pairs of one expert. Who they are it finds out in one of three ways (PAIRS). 0: many pairs were sorted
beforehand into blocks of BM slots by :func:`place_kernel`, every expert's in the order of the pairs. A power of two: so
few that each program compares them all; there is one program a pair, and all but the first of every BM of an expert
leave. 1: so few that hardly two are of one expert; each program takes its own. None asks the host, and no sum depends
on who came first.

Words: ``known`` experts of the model, ``held`` ones here; ``P`` pairs, also the number that stands for "no pair".
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from w4plugin.kernels.portable_kernels import _load_groups, _load_step, _multiply
from w4plugin.kernels.portable_weights import BF16_HEADROOM, cast


@triton.jit
def local_expert(ids_ptr, map_ptr, pair, P, known, held, MAPPED: tl.constexpr):
    """Place of each pair's expert here, -1 for none: -1, out of range, mapped away, or no pair at all."""
    name = tl.load(ids_ptr + pair, mask=pair < P, other=-1)
    inside = (name >= 0) & (name < known)
    e = tl.where(inside, name, 0).to(tl.int32)
    if MAPPED:
        e = tl.load(map_ptr + e, mask=inside, other=-1)
        inside = inside & (e >= 0) & (e < held)
    return tl.where(inside, e, -1)


# ---------------------------------------------------------------------------------------------------- routing


@triton.jit(do_not_specialize=["P", "known", "held"])
def count_kernel(
    ids_ptr, map_ptr, counts_ptr, P, known, held, CHUNK: tl.constexpr, E: tl.constexpr, MAPPED: tl.constexpr
):
    """counts int32 ``[chunks, E]``: pairs of each expert in each chunk of pairs; E is a power of two over ``held``."""
    pid = tl.program_id(0)
    pair = pid * CHUNK + tl.arange(0, CHUNK)
    e = local_expert(ids_ptr, map_ptr, pair, P, known, held, MAPPED)
    counts = tl.histogram(tl.where(e >= 0, e, E - 1), E)
    tl.store(counts_ptr + pid * E + tl.arange(0, E), counts)


@triton.jit(do_not_specialize=["P", "known", "held", "chunks", "most"])
def place_kernel(
    ids_ptr,
    map_ptr,
    counts_ptr,
    slots_ptr,
    experts_ptr,
    P,
    known,
    held,
    chunks,
    most,
    CHUNK: tl.constexpr,
    E: tl.constexpr,
    BM: tl.constexpr,
    BLOCKS: tl.constexpr,
    COUNTED: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pairs into slots: blocks of BM slots hold one expert each, experts in order, pairs of an expert in order.

    Program 0 .. chunks - 1 places its chunk's pairs; the others write BLOCKS blocks' experts (-1 where a block has
    none) and P into slots that no pair fills. With one chunk nobody counted before (COUNTED): each program counts
    itself.

    Args:
        counts_ptr: of :func:`count_kernel`, read when COUNTED, else None.
        slots_ptr: int32 ``[most * BM]``.
        experts_ptr: int32 ``[most]``.
    """
    pid = tl.program_id(0)
    o_e = tl.arange(0, E)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((E,), tl.int32)
    before = tl.zeros((E,), tl.int32)
    if not COUNTED:
        all_of = local_expert(ids_ptr, map_ptr, tl.arange(0, CHUNK), P, known, held, MAPPED)
        total += tl.histogram(tl.where(all_of >= 0, all_of, E - 1), E)
    else:
        o_c = tl.arange(0, 16)
        for c in tl.range(0, chunks, 16):
            at = counts_ptr + (c + o_c)[:, None] * E + o_e[None, :]
            counts = tl.load(at, mask=(c + o_c < chunks)[:, None], other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((c + o_c < pid)[:, None], counts, 0), 0)
    total = tl.where(o_e < held, total, 0)
    padded = (total + BM - 1) // BM * BM
    end = tl.cumsum(padded, 0)
    start = end - padded
    if pid < chunks:
        o_p = tl.arange(0, CHUNK)
        pair = pid * CHUNK + o_p
        e = local_expert(ids_ptr, map_ptr, pair, P, known, held, MAPPED)
        base = tl.gather(start + before, tl.maximum(e, 0), 0)
        # each pair's rank among its expert's in this chunk, by comparing it with the ones before it
        rank = tl.zeros((CHUNK,), tl.int32)
        for j in tl.range(0, CHUNK, 32):
            o_j = j + tl.arange(0, 32)
            other = local_expert(ids_ptr, map_ptr, pid * CHUNK + o_j, P, known, held, MAPPED)
            same = (other[None, :] == e[:, None]) & (o_j[None, :] < o_p[:, None])
            rank += tl.sum(same.to(tl.int32), 1)
        tl.store(slots_ptr + base + rank, pair, mask=e >= 0)
    else:
        block = (pid - chunks) * BLOCKS + tl.arange(0, BLOCKS)
        owner = tl.sum((end[None, :] <= (block * BM)[:, None]).to(tl.int32), 1)
        used = block * BM < tl.max(end, 0)
        tl.store(experts_ptr + block, tl.where(used, owner, -1), mask=block < most)
        filled = tl.gather(start + total, tl.where(used, owner, 0), 0)
        slot = (block * BM)[:, None] + tl.arange(0, BM)[None, :]
        empty = used[:, None] & (slot >= filled[:, None]) & (block < most)[:, None]
        tl.store(slots_ptr + slot, tl.zeros((BLOCKS, BM), tl.int32) + P, mask=empty)


@triton.jit
def _rank(ids_ptr, map_ptr, pid, mine, P, known, held, PAIRS: tl.constexpr, MAPPED: tl.constexpr):
    """(experts of all pairs, how many pairs before ``pid`` are of its expert ``mine``)."""
    o_p = tl.arange(0, PAIRS)
    e = local_expert(ids_ptr, map_ptr, o_p, P, known, held, MAPPED)
    return e, tl.sum(((e == mine) & (o_p < pid)).to(tl.int32), 0)


@triton.jit
def _rows(e, mine, first, P, BM: tl.constexpr, PAIRS: tl.constexpr):
    """The ``first``-th and next pairs of expert ``mine``, ``[BM]``, P where there are no more."""
    o_p = tl.arange(0, PAIRS)
    same = (e == mine).to(tl.int32)
    rank = tl.cumsum(same, 0) - 1
    hit = (rank[None, :] == (first + tl.arange(0, BM))[:, None]) & (same[None, :] != 0)
    return tl.minimum(tl.min(tl.where(hit, o_p[None, :], 2147483647), 1), P)


# ---------------------------------------------------------------------------------------------------- products


@triton.jit
def _activate(gate, ACT: tl.constexpr):
    if ACT == "silu":
        return gate / (1.0 + tl.exp(-gate))
    elif ACT == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACT == "gelu_tanh":  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        tl.static_assert(ACT == "relu2")
        return tl.where(gate > 0, gate * gate, gate * 0.0)


@triton.jit(do_not_specialize=["P", "known", "held", "G", "blocks"])
def product_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    ids_ptr,
    map_ptr,
    slots_ptr,
    experts_ptr,
    weights_ptr,
    out_ptr,
    P,
    known,
    held,
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
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ASYM: tl.constexpr,
    ON_SUM: tl.constexpr,
    AWAIT: tl.constexpr,
    WHOLE_K: tl.constexpr,
    WHOLE_N: tl.constexpr,
    UNPACK: tl.constexpr,
    KW: tl.constexpr,
    PAIRS: tl.constexpr,
    MAPPED: tl.constexpr,
    SHARE: tl.constexpr,
    SWIZZLE: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """One of the two products, a program BM pairs of one expert and BN columns.

    Args:
        words_ptr: int32 ``[held, blocks, n16, 128]``, fragment order.
        scales_ptr, zeros_ptr: ``[held, G, N]``; zeros uint8, read when ASYM.
        ids_ptr: ``[P]``, read when PAIRS; map_ptr: int32 ``[known]``, read when MAPPED.
        slots_ptr, experts_ptr: of :func:`place_kernel`, read unless PAIRS.
        weights_ptr: float32 ``[P]``, read when WEIGHTED.
        out_ptr: FIRST: ``[P, N / 2]`` (``[P, N]`` without a gate); else float32 ``[P, N]``.
        stride8: x's row stride in units of 8 elements (rows start at multiples of 16 bytes).
        SHARE: pairs that read one row of x: topk, or 1.
        SWIZZLE: blocks of pairs that neighbouring programs go through before the next columns; 0: all of them.
        PDL: the kernel may start before the one ahead of it in the stream has ended. The second product then knows
            that routing is done (the first had to wait for it) and loads weights before it waits.
        Others as in ``portable_kernels.matmul_kernel``.
    """
    J: tl.constexpr = BN // 16
    R: tl.constexpr = J * K_WARPS
    STATIC: tl.constexpr = GROUP == 0
    STREAM: tl.constexpr = BM <= 16
    MASKED: tl.constexpr = not WHOLE_N
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    if SWIZZLE:  # programs that run together share rows of x and columns of weights
        pid = pid_n * tl.num_programs(0) + pid_m
        width = SWIZZLE * tl.num_programs(1)
        first_m = pid // width * SWIZZLE
        high = tl.minimum(tl.num_programs(0) - first_m, SWIZZLE)
        pid_m = first_m + pid % width % high
        pid_n = pid % width // high
    if PDL and FIRST:
        gdc_wait()
        gdc_launch_dependents()
    if PAIRS:
        e = local_expert(ids_ptr, map_ptr, pid_m, P, known, held, MAPPED)
    else:
        e = tl.load(experts_ptr + pid_m)
        pairs = tl.load(slots_ptr + pid_m * BM + tl.arange(0, BM))
    if e < 0:
        return
    if PAIRS > 1:
        all_of, rank = _rank(ids_ptr, map_ptr, pid_m, e, P, known, held, PAIRS, MAPPED)
        if rank % BM != 0:  # the program of an earlier pair takes this one too
            return
    words_ptr += e.to(tl.int64) * blocks * n16 * 128
    scales_ptr += e.to(tl.int64) * G * N
    if ASYM:
        zeros_ptr += e.to(tl.int64) * G * N
    n = pid_n * BN + tl.arange(0, BN)
    r = tl.arange(0, R)[:, None]
    if K_WARPS == 1:
        o_j, o_k = pid_n * J + r, 0
    else:
        o_j, o_k = pid_n * J + r // K_WARPS, r % K_WARPS
    o_n = o_j * 16 + tl.arange(0, 8)[None, :]
    stride = stride8 * 8
    steps = tl.cdiv(blocks, UNROLL * K_WARPS)

    if K_WARPS == 1:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((K_WARPS, BN, BM), tl.float32)
    one = tl.where(K > 0, 1.0, 0.0)
    groups = ((), (), (), ())
    if PREFETCH or STATIC:
        groups = _load_groups(
            scales_ptr, zeros_ptr, 0, o_n, o_k, n, N, G, R, UNROLL, K_WARPS, GROUP, SPAN, ASYM, ON_SUM, MASKED
        )
    if PREFETCH:
        words = _load_step(words_ptr, 0, blocks, o_j, o_k, n16, steps > 0, UNROLL, K_WARPS, STREAM, WHOLE_K, WHOLE_N)
    if PAIRS == 1:
        pairs = tl.where(tl.arange(0, BM) == 0, pid_m, P)
    elif PAIRS:  # while weights are on their way
        pairs = _rows(all_of, e, rank, P, BM, PAIRS)
    m = tl.where(pairs < P, pairs // SHARE, P)  # P rows of x at most: P is outside
    if PDL and not FIRST:
        gdc_wait()
        gdc_launch_dependents()
    if PREFETCH:
        for step in tl.range(0, steps, num_stages=STAGES):
            ahead = step + 1
            next_words = _load_step(
                words_ptr, ahead, blocks, o_j, o_k, n16, ahead < steps, UNROLL, K_WARPS, STREAM, WHOLE_K, WHOLE_N
            )
            if not STATIC:
                next_groups = _load_groups(
                    scales_ptr, zeros_ptr, ahead, o_n, o_k, n, N, G,
                    R, UNROLL, K_WARPS, GROUP, SPAN, ASYM, ON_SUM, MASKED,
                )  # fmt: skip
            acc = _multiply(
                acc, one, words, groups, x_ptr, x_ptr, scales_ptr, zeros_ptr, step, m, n, P, N, K, stride,
                BM, J, UNROLL, K_WARPS, GROUP, SPAN, ASYM, ON_SUM, False, AWAIT, WHOLE_K, UNPACK, KW,
            )  # fmt: skip
            words = next_words
            if not STATIC:
                groups = next_groups
    else:
        for step in tl.range(0, steps, num_stages=STAGES):
            words = _load_step(
                words_ptr, step, blocks, o_j, o_k, n16, step < steps, UNROLL, K_WARPS, STREAM, WHOLE_K, WHOLE_N
            )
            if STATIC:
                now = groups
            else:
                now = _load_groups(
                    scales_ptr, zeros_ptr, step, o_n, o_k, n, N, G,
                    R, UNROLL, K_WARPS, GROUP, SPAN, ASYM, ON_SUM, MASKED,
                )  # fmt: skip
            acc = _multiply(
                acc, one, words, now, x_ptr, x_ptr, scales_ptr, zeros_ptr, step, m, n, P, N, K, stride,
                BM, J, UNROLL, K_WARPS, GROUP, SPAN, ASYM, ON_SUM, False, AWAIT, WHOLE_K, UNPACK, KW,
            )  # fmt: skip

    if K_WARPS > 1:
        acc = tl.sum(acc, axis=0)
    if ON_SUM and x_ptr.dtype.element_ty == tl.bfloat16:
        acc = acc * 2.0**BF16_HEADROOM
    inside = pairs < P
    if WEIGHTED:
        acc = acc * tl.load(weights_ptr + pairs, mask=inside, other=0.0)[None, :]
    if FIRST:
        width = N
        if GATED:
            halves = tl.permute(tl.reshape(acc, [J, 2, 8, BM]), (0, 2, 3, 1))
            gate, up = tl.split(halves)
            acc = tl.reshape(_activate(gate, ACT) * up, [J * 8, BM])
            n = pid_n * (J * 8) + tl.arange(0, J * 8)
            width = N // 2
        else:
            acc = _activate(acc, ACT)
        at = out_ptr + pairs.to(tl.int64)[None, :] * width + n[:, None]
        tl.store(at, cast(acc, out_ptr.dtype.element_ty, UNPACK), mask=inside[None, :] & (n < width)[:, None])
    else:
        at = out_ptr + pairs.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(at, acc, mask=inside[None, :] & (n < N)[:, None])


# ---------------------------------------------------------------------------------------------------- around them


@triton.jit(do_not_specialize=["P", "known", "held", "stride"])
def gather_kernel(
    x_ptr, order_ptr, ids_ptr, map_ptr, out_ptr, P, known, held, K, stride,
    SHARE: tl.constexpr, BK: tl.constexpr, MAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out ``[P, K]``: x's row of each pair in the row order of its expert (int32 ``[held, K]``, -1 for padding: 0)."""
    pair = tl.program_id(0)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = local_expert(ids_ptr, map_ptr, pair, P, known, held, MAPPED)
    if e < 0:
        return
    row = tl.load(order_ptr + e.to(tl.int64) * K + k, mask=k < K, other=-1)
    x = tl.load(x_ptr + (pair // SHARE).to(tl.int64) * stride + row, mask=row >= 0, other=0.0)
    tl.store(out_ptr + pair.to(tl.int64) * K + k, x, mask=k < K)


@triton.jit(do_not_specialize=["P", "known", "held"])
def sum_kernel(
    y_ptr, ids_ptr, map_ptr, out_ptr, P, known, held, H,
    TOPK: tl.constexpr, BH: tl.constexpr, MAPPED: tl.constexpr, PDL: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """out ``[T, H]``: the rows of y of each token's present pairs, added in order, rounded once."""
    token = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BH,), tl.float32)
    for k in tl.static_range(TOPK):
        pair = token * TOPK + k
        e = local_expert(ids_ptr, map_ptr, pair, P, known, held, MAPPED)
        acc += tl.load(y_ptr + pair.to(tl.int64) * H + h, mask=(h < H) & (e >= 0), other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * H + h, cast(acc, out_ptr.dtype.element_ty, UNPACK), mask=h < H)
