"""W4 weights in registers: words of fragment order to the 16-bit floats that a tensor core multiplies.

Exactness. Codes are read by their bits, never converted: a 4-bit code q put into the mantissa of 1024 (float16, where
one unit in the last place is 1) or of 128 (bfloat16, likewise) *is* 1024 + q or 128 + q; four bits higher it is
1024 + 16 q, and an exact division by 16 leaves 64 + q. Subtracting 1024 + z, 64 + z or 128 + z leaves q - z, an integer
of at most 15, without rounding. The scale never enters these constants: 1032 * s would round to half a scale.

Where scales go onto the sum, the only roundings are those of the float32 accumulation and of the final cast; where they
go onto the weights, each weight is the exact product rounded once to x's dtype, as ``W4Tensor.dequantize`` gives it.
Unscaled bfloat16 weights carry a factor 2^-20 (a power of two: still exact) that the epilogue takes back: without it
15 * K * |x| could leave float32's range where the scaled sum does not.

GROUP is the group size, 0 when one group spans K; SPAN the rows that share a scale inside a step, a power of two: 16
and 32 cut a block of 64 rows.
"""

import triton
import triton.language as tl

# In: word $8; what the first and the last two pairs lose; the scales of these halves; everything twice in 32 bits.
# Out: nibbles i and i + 4 leave as $i and $(i+4).
_F16_HEAD = """
{
.reg .b32 u, a, b, c, d, h;
mov.b32 h, 0x2c002c00;
shr.u32 u, $8, 8;
lop3.b32 a, $8, 0x000f000f, 0x64006400, 0xea;
lop3.b32 b, $8, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 c, u, 0x000f000f, 0x64006400, 0xea;
lop3.b32 d, u, 0x00f000f0, 0x64006400, 0xea;
sub.f16x2 a, a, $9;
fma.rn.f16x2 b, b, h, $10;
sub.f16x2 c, c, $11;
fma.rn.f16x2 d, d, h, $12;
"""
_F16_SCALE = """
mul.f16x2 a, a, $13;
mul.f16x2 b, b, $13;
mul.f16x2 c, c, $14;
mul.f16x2 d, d, $14;
"""
_BF16_HEAD = """
{
.reg .b32 t, u, v, a, b, c, d, h;
mov.b32 h, UNIT;
shr.u32 t, $8, 4;
shr.u32 u, $8, 8;
shr.u32 v, $8, 12;
lop3.b32 a, $8, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, t, 0x000f000f, 0x43004300, 0xea;
lop3.b32 c, u, 0x000f000f, 0x43004300, 0xea;
lop3.b32 d, v, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 a, a, h, $9;
fma.rn.bf16x2 b, b, h, $9;
fma.rn.bf16x2 c, c, h, $10;
fma.rn.bf16x2 d, d, h, $10;
"""
# sm_80 multiplies pairs of bfloat16 only by fma; adding -0 keeps the sign of a zero product.
_BF16_SCALE = """
mov.b32 t, 0x80008000;
fma.rn.bf16x2 a, a, $11, t;
fma.rn.bf16x2 b, b, $11, t;
fma.rn.bf16x2 c, c, $12, t;
fma.rn.bf16x2 d, d, $12, t;
"""
_TAIL = """
mov.b32 {$0, $4}, a;
mov.b32 {$1, $5}, b;
mov.b32 {$2, $6}, c;
mov.b32 {$3, $7}, d;
}
"""
F16 = tl.constexpr(_F16_HEAD + _TAIL)
F16_SCALED = tl.constexpr(_F16_HEAD + _F16_SCALE + _TAIL)
BF16 = tl.constexpr(_BF16_HEAD.replace("UNIT", "0x35803580") + _TAIL)  # 2^-20
BF16_SCALED = tl.constexpr(_BF16_HEAD.replace("UNIT", "0x3f803f80") + _BF16_SCALE + _TAIL)  # 1
BF16_HEADROOM = tl.constexpr(20)


@triton.jit
def _twice(half):
    """int32 with the low 16 bits of ``half`` in both halves."""
    return half | (half << 16)


@triton.jit
def _bits(value):
    """The bits of a 16-bit float in both halves of an int32."""
    return _twice(value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


@triton.jit
def _asm_float16(p, z0, z1, s0, s1, SCALED: tl.constexpr):
    a, b = _twice(z0 | 0x6400), _twice((z0 << 4) | 0xD400)
    c, d = _twice(z1 | 0x6400), _twice((z1 << 4) | 0xD400)
    if SCALED:
        return tl.inline_asm_elementwise(
            F16_SCALED,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r",
            [p, a, b, c, d, _bits(s0), _bits(s1)],
            dtype=[tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16],
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            F16,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r",
            [p, a, b, c, d],
            dtype=[tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16],
            is_pure=True,
            pack=1,
        )


@triton.jit
def _asm_bfloat16(p, z0, z1, s0, s1, SCALED: tl.constexpr):
    if SCALED:
        a, c = _twice(z0 | 0xC300), _twice(z1 | 0xC300)
        return tl.inline_asm_elementwise(
            BF16_SCALED,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r",
            [p, a, c, _bits(s0), _bits(s1)],
            dtype=[
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ],
            is_pure=True,
            pack=1,
        )
    else:
        a, c = _twice(z0 | 0xB900), _twice(z1 | 0xB900)  # -(128 + z) * 2^-20
        return tl.inline_asm_elementwise(
            BF16,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [p, a, c],
            dtype=[
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ],
            is_pure=True,
            pack=1,
        )


@triton.jit
def cast(value, DTYPE: tl.constexpr, UNPACK: tl.constexpr):
    """float32 rounded to DTYPE.

    Triton's interpreter keeps bfloat16 as integers: its casts cut bits off and its dot multiplies the integers. There
    the value is rounded by hand and stays float32.
    """
    if UNPACK == "interpreter" and DTYPE == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(value == value, even.to(tl.float32, bitcast=True), value)
    return value.to(DTYPE)


@triton.jit
def _code(p, z, s, NIBBLE: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr, UNPACK: tl.constexpr):
    """One nibble's weights by shift and mask, for targets without the instructions above."""
    w = (((p >> (4 * NIBBLE)) & 15) - z).to(tl.float32)
    if SCALED:
        w = w * s.to(tl.float32)
    elif DTYPE == tl.bfloat16:
        w = w * 0.5**BF16_HEADROOM
    return cast(w, DTYPE, UNPACK)


@triton.jit
def _eight(p, z0, z1, s0, s1, DTYPE: tl.constexpr, SCALED: tl.constexpr, UNPACK: tl.constexpr):
    """The weights of nibbles 0..7: q - z, times s when SCALED; 0, 1, 4, 5 belong to a block's rows 0..15 of 32."""
    if UNPACK == "asm":
        if DTYPE == tl.float16:
            return _asm_float16(p, z0, z1, s0, s1, SCALED)
        else:
            return _asm_bfloat16(p, z0, z1, s0, s1, SCALED)
    else:
        a0 = _code(p, z0, s0, 0, DTYPE, SCALED, UNPACK)
        a1 = _code(p, z0, s0, 1, DTYPE, SCALED, UNPACK)
        a2 = _code(p, z1, s1, 2, DTYPE, SCALED, UNPACK)
        a3 = _code(p, z1, s1, 3, DTYPE, SCALED, UNPACK)
        a4 = _code(p, z0, s0, 4, DTYPE, SCALED, UNPACK)
        a5 = _code(p, z0, s0, 5, DTYPE, SCALED, UNPACK)
        a6 = _code(p, z1, s1, 6, DTYPE, SCALED, UNPACK)
        a7 = _code(p, z1, s1, 7, DTYPE, SCALED, UNPACK)
        return a0, a1, a2, a3, a4, a5, a6, a7


@triton.jit
def _rescale(a, s, DTYPE: tl.constexpr, UNPACK: tl.constexpr):
    """Weights times a scale of another dtype, in float32 and rounded once."""
    w = a.to(tl.float32) * s.to(tl.float32)
    if DTYPE == tl.bfloat16:
        w = w * 2.0**BF16_HEADROOM
    return cast(w, DTYPE, UNPACK)


@triton.jit
def weights(
    p,
    z0,
    z1,
    s0,
    s1,
    J: tl.constexpr,
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,
    UNPACK: tl.constexpr,
    KW: tl.constexpr,
):
    """W^T ``[16 J, 64]`` of words p ``[J, 128]``.

    Args:
        p: int32 ``[J, 128]``, one block of 64 rows.
        z0, z1: int32, zero points that broadcast to ``[J, 8, 4, 2, 2]``, for rows 0..15 and 16..31 of each 32.
        s0, s1: scales likewise; read when SCALED.
        KW: K slots that a thread holds in a row where the compiler puts the dot operand (2, 4 or 8). K is put into the
            slot order under which a word stays in its thread; :func:`slots` does the same to x.
    """
    p = tl.reshape(p, [J, 8, 4, 2, 2])
    SAME: tl.constexpr = SCALED and s0.dtype == DTYPE
    a0, a1, a2, a3, a4, a5, a6, a7 = _eight(p, z0, z1, s0, s1, DTYPE, SAME, UNPACK)
    if SCALED and not SAME:
        a0, a1 = _rescale(a0, s0, DTYPE, UNPACK), _rescale(a1, s0, DTYPE, UNPACK)
        a2, a3 = _rescale(a2, s1, DTYPE, UNPACK), _rescale(a3, s1, DTYPE, UNPACK)
        a4, a5 = _rescale(a4, s0, DTYPE, UNPACK), _rescale(a5, s0, DTYPE, UNPACK)
        a6, a7 = _rescale(a6, s1, DTYPE, UNPACK), _rescale(a7, s1, DTYPE, UNPACK)
    # [j, r, t, c, h, i1, i0, l]
    a = tl.join(tl.join(tl.join(a0, a2), tl.join(a1, a3)), tl.join(tl.join(a4, a6), tl.join(a5, a7)))
    if KW == 2:
        a = tl.permute(a, (0, 4, 1, 3, 5, 6, 2, 7))
    elif KW == 4:
        a = tl.permute(a, (0, 4, 1, 3, 5, 2, 6, 7))
    else:
        a = tl.permute(a, (0, 4, 1, 3, 2, 5, 6, 7))
    return tl.reshape(a, [J * 16, 64])


@triton.jit
def slots(x, BM: tl.constexpr, KW: tl.constexpr):
    """x ``[BM, 64]`` with K in the slot order of :func:`weights`."""
    if KW != 2:
        x = tl.reshape(x, [BM, 2, 2, 2, 4, 2])  # [m, c, i1, i0, t, l]
        if KW == 4:
            x = tl.permute(x, (0, 1, 2, 4, 3, 5))
        else:
            x = tl.permute(x, (0, 1, 4, 2, 3, 5))
        x = tl.reshape(x, [BM, 64])
    return x


@triton.jit
def _per_column(ptr, row, o_n, N, J: tl.constexpr, MASKED: tl.constexpr):
    """Values of one group for the columns of a block, as ``[J, 8, 1, 1, 2]``."""
    at = ptr + row * N + o_n
    if MASKED:
        low = tl.load(at, mask=o_n < N, other=0)
        high = tl.load(at + 8, mask=o_n + 8 < N, other=0)
    else:
        low, high = tl.load(at), tl.load(at + 8)
    return tl.reshape(tl.join(low, high), [J, 8, 1, 1, 2])


@triton.jit
def _per_half(ptr, row0, row1, o_n, N, J: tl.constexpr, MASKED: tl.constexpr):
    """Values of the groups of a block's rows 0..31 and 32..63, as ``[J, 8, 1, 2, 2]``."""
    first = tl.reshape(_per_column(ptr, row0, o_n, N, J, MASKED), [J, 8, 1, 2])
    last = tl.reshape(_per_column(ptr, row1, o_n, N, J, MASKED), [J, 8, 1, 2])
    return tl.permute(tl.join(first, last), (0, 1, 2, 4, 3))


@triton.jit
def per_group(ptr, block, o_n, N, G, J: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, MASKED: tl.constexpr):
    """What :func:`weights` takes for z0 and z1 (or s0 and s1), for the block of 64 rows ``block``.

    Padded rows past the last group read the last group: their weights are 0 under its zero point.
    """
    row = block * 64
    if SPAN >= 64:
        g = 0
        if GROUP:
            g = tl.minimum(row // GROUP, G - 1)
        v = _per_column(ptr, g, o_n, N, J, MASKED)
        return v, v
    elif SPAN == 32:
        v = _per_half(ptr, tl.minimum(row // GROUP, G - 1), tl.minimum((row + 32) // GROUP, G - 1), o_n, N, J, MASKED)
        return v, v
    else:
        a = tl.minimum(row // GROUP, G - 1)
        b = tl.minimum((row + 16) // GROUP, G - 1)
        c = tl.minimum((row + 32) // GROUP, G - 1)
        d = tl.minimum((row + 48) // GROUP, G - 1)
        return _per_half(ptr, a, c, o_n, N, J, MASKED), _per_half(ptr, b, d, o_n, N, J, MASKED)


@triton.jit
def zero_points(
    ptr,
    block,
    o_n,
    N,
    G,
    J: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    MASKED: tl.constexpr,
    ASYM: tl.constexpr,
):
    if ASYM:
        z0, z1 = per_group(ptr, block, o_n, N, G, J, GROUP, SPAN, MASKED)
        return z0.to(tl.int32), z1.to(tl.int32)
    else:
        z = tl.full((1, 1, 1, 1, 1), 8, tl.int32)
        return z, z


@triton.jit
def by_row(
    a, rows_ptr, scales_ptr, zeros_ptr, block, n, K, N, DTYPE: tl.constexpr, ASYM: tl.constexpr, UNPACK: tl.constexpr
):
    """Codes ``[BN, 64]`` in natural K order to weights where every row names its own group."""
    k = block * 64 + tl.arange(0, 64)
    g = tl.load(rows_ptr + k, mask=k < K, other=0)
    at = g[None, :] * N + n[:, None]
    inside = (k < K)[None, :] & (n < N)[:, None]
    w = a.to(tl.float32)
    if DTYPE == tl.bfloat16:
        w = w * 2.0**BF16_HEADROOM
    if ASYM:
        w -= tl.load(zeros_ptr + at, mask=inside, other=0).to(tl.float32)
    else:
        w -= 8.0
    return cast(w * tl.load(scales_ptr + at, mask=inside, other=0).to(tl.float32), DTYPE, UNPACK)
