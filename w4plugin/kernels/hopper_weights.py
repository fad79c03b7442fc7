"""W4 weights in registers, for the Hopper kernels: words of fragment order to the left operand of the tensor cores.

See :mod:`.portable_weights` for why every step is exact: 1024 + q, 64 + q (after the division by 16) and 128 + q are
integers that their formats hold, and so is what remains after the zero point is taken off.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# In: word $8, constants $9 and $10, packed scale $11. Out: nibbles i and i + 4 as $i and $(i+4).
_HEAD_F16 = """
{
.reg .b32 t, a, b, c, d, h;
mov.b32 h, 0x2c002c00;
shr.u32 t, $8, 8;
lop3.b32 a, $8, 0x000f000f, 0x64006400, 0xea;
lop3.b32 b, $8, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 c, t, 0x000f000f, 0x64006400, 0xea;
lop3.b32 d, t, 0x00f000f0, 0x64006400, 0xea;
sub.rn.f16x2 a, a, $9;
fma.rn.f16x2 b, b, h, $10;
sub.rn.f16x2 c, c, $9;
fma.rn.f16x2 d, d, h, $10;
"""
_HEAD_BF16 = """
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
fma.rn.bf16x2 c, c, h, $9;
fma.rn.bf16x2 d, d, h, $9;
"""
_SCALE = """
mul.rn.TYPE a, a, $11;
mul.rn.TYPE b, b, $11;
mul.rn.TYPE c, c, $11;
mul.rn.TYPE d, d, $11;
"""
_TAIL = """
mov.b32 {$0, $4}, a;
mov.b32 {$1, $5}, b;
mov.b32 {$2, $6}, c;
mov.b32 {$3, $7}, d;
}
"""
# Unscaled bfloat16 weights carry 2^-20, which the epilogue takes back: without it 15 * K * |x| could leave float32's
# range where the scaled sum does not.
F16 = gl.constexpr(_HEAD_F16 + _TAIL)
F16_SCALED = gl.constexpr(_HEAD_F16 + _SCALE.replace("TYPE", "f16x2") + _TAIL)
BF16 = gl.constexpr(_HEAD_BF16.replace("UNIT", "0x35803580") + _TAIL)
BF16_SCALED = gl.constexpr(_HEAD_BF16.replace("UNIT", "0x3f803f80") + _SCALE.replace("TYPE", "bf16x2") + _TAIL)
OPERANDS = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r")


@gluon.constexpr_function
def block_layout(columns, warps):
    """How threads hold a block's words ``[columns / 16, 128]``: each lane four neighbours, each warp 16 columns."""
    registers = [[0, 1], [0, 2]]
    lanes = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
    steps = [[1 << i, 0] for i in range((columns // 16).bit_length() - 1)]
    held = warps.bit_length() - 1
    return gl.DistributedLinearLayout(registers + steps[held:], lanes, steps[:held], [], [columns // 16, 128])


@gluon.jit
def load_block(p_block, LAYOUT: gl.constexpr, BN: gl.constexpr):
    """A block's words as int32 [BN, 8]: column 2t + c holds rows 32c + 8i + 2t + l at nibble i + 4l."""
    b_words = gl.reshape(p_block.load(LAYOUT), [BN // 16, 8, 4, 2, 2])  # j r t c h
    return gl.reshape(gl.permute(b_words, (0, 4, 1, 2, 3)), [BN, 8])


@gluon.jit
def half_block(b_words, i_half: gl.constexpr, BN: gl.constexpr):
    """Rows 32 * i_half .. of a block: int32 [BN, 4]."""
    b_low, b_high = gl.split(gl.reshape(b_words, [BN, 4, 2]))
    return b_low if i_half == 0 else b_high


@gluon.jit
def unpack(
    b_words, b_c, b_d, b_scale, BN: gl.constexpr, HALVES: gl.constexpr, DTYPE: gl.constexpr, SCALED: gl.constexpr
):
    """int32 [BN, 4 * HALVES] words to DTYPE [BN, 32 * HALVES]: q - zero, times the scale if SCALED."""
    if gl.float16 == DTYPE:
        a0, a1, a2, a3, a4, a5, a6, a7 = gl.inline_asm_elementwise(
            F16_SCALED if SCALED else F16,
            OPERANDS,
            [b_words, b_c, b_d, b_scale],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        a0, a1, a2, a3, a4, a5, a6, a7 = gl.inline_asm_elementwise(
            BF16_SCALED if SCALED else BF16,
            OPERANDS,
            [b_words, b_c, b_d, b_scale],
            dtype=(
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
            ),
            is_pure=True,
            pack=1,
        )
    b_a = gl.join(gl.join(gl.join(a0, a2), gl.join(a1, a3)), gl.join(gl.join(a4, a6), gl.join(a5, a7)))
    b_a = gl.reshape(b_a, [BN, 4, HALVES, 2, 2, 2])  # t, half, bit 1 of i, bit 0 of i, l
    return gl.reshape(gl.permute(b_a, (0, 2, 3, 4, 1, 5)), [BN, 32 * HALVES])


@gluon.jit
def twice(b_bits):
    return b_bits | (b_bits << 16)


@gluon.jit
def factors(b_words, p_scale, p_zero, BN: gl.constexpr, DTYPE: gl.constexpr, ASYM: gl.constexpr, SCALED: gl.constexpr):
    """What takes the zero points off such words and what scales them: int32 [BN], 16 bits twice.

    Constants where there are no zero points, so they cost no register.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, b_words.type.layout)
    b_zero = gl.full([BN], 0x00080008, gl.int32, ROWS)
    if ASYM:
        b_zero = twice(p_zero.slice(0, BN).load(ROWS).to(gl.int32))
    if gl.float16 == DTYPE:
        b_c = b_zero | 0x64006400  # 1024 + z
        b_d = (b_zero << 4) | (-0x2BFF2C00)  # -(64 + z): 0xd400 | z << 4
    elif SCALED:
        b_c = b_zero | (-0x3CFF3D00)  # -(128 + z): 0xc300 | z
        b_d = b_c
    else:
        b_c = b_zero | (-0x46FF4700)  # -(128 + z) / 2^20: 0xb900 | z
        b_d = b_c
    b_scale = b_c
    if SCALED:
        b_scale = twice(p_scale.load(ROWS).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF)
    return b_c, b_d, b_scale


@gluon.jit
def operand(
    b_words,
    b_c,
    b_d,
    b_scale,
    BN: gl.constexpr,
    HALVES: gl.constexpr,
    DTYPE: gl.constexpr,
    SCALED: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Words and their :func:`factors` as the left operand of the tensor cores."""
    ROWS: gl.constexpr = gl.SliceLayout(1, b_words.type.layout)
    b_c, _ = gl.broadcast(gl.convert_layout(b_c, ROWS, assert_trivial=True)[:, None], b_words)
    b_d, _ = gl.broadcast(gl.convert_layout(b_d, ROWS, assert_trivial=True)[:, None], b_words)
    b_scale, _ = gl.broadcast(gl.convert_layout(b_scale, ROWS, assert_trivial=True)[:, None], b_words)
    b_a = unpack(b_words, b_c, b_d, b_scale, BN, HALVES, DTYPE, SCALED)
    return gl.convert_layout(b_a, LAYOUT, assert_trivial=True)
