"""The end of a tile of a Hopper kernel: its sums become the output."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from w4plugin.kernels import hopper_tiles
from w4plugin.kernels.gluon_names import fence_async_shared, reinterpret, tma_store, tma_store_wait
from w4plugin.kernels.hopper_loader import first_row

# Two blocks of 8 x 8, rows n and n + 8 of out^T: $2 and $3 hold neighbouring columns of both. movmatrix makes them
# neighbouring rows; lanes of the lower half then swap a word with those of the upper half, so that eight lanes hold 16
# neighbours, a whole sector of memory: $0 those of the first four columns of a block, $1 of the others.
_TRANSPOSE = gl.constexpr("""
{
.reg .pred upper;
.reg .b32 lane, a, b, give, take;
prmt.b32 a, $2, $3, 0x5410;
prmt.b32 b, $2, $3, 0x7632;
movmatrix.sync.aligned.m8n8.trans.b16 a, a;
movmatrix.sync.aligned.m8n8.trans.b16 b, b;
mov.u32 lane, %laneid;
setp.ge.u32 upper, lane, 16;
selp.b32 give, a, b, upper;
shfl.sync.bfly.b32 take, give, 16, 31, -1;
selp.b32 $0, take, a, upper;
selp.b32 $1, b, take, upper;
}
""")


@gluon.jit
def finish(acc, bias, o_n, N, BIAS: gl.constexpr, DTYPE: gl.constexpr, SCALED: gl.constexpr):
    """Bias, and what unpacking left out of the sums."""
    if gl.bfloat16 == DTYPE and not SCALED:
        acc = acc * 1048576.0  # 2^20, see hopper_weights
    if BIAS:
        acc += gl.load(bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def store_tile(tile, out, i_n, i_m, M, N, BN: gl.constexpr, BM: gl.constexpr, DTYPE: gl.constexpr, PART: gl.constexpr):
    """Stores a tile ``[BN, BM]`` of out^T: columns ``i_n ..``, rows ``i_m ..``. No warp waits for another.

    Where x was loaded in parts of PART rows each may start earlier, with rows of the part before.
    """
    b_low, b_high = gl.split(gl.reshape(tile.to(DTYPE), [BN, BM // 2, 2]))
    # pack=2: rows n and n + 8, which a lane holds one after the other
    b_out = gl.inline_asm_elementwise(
        _TRANSPOSE,
        "=r,=r,r,r",
        [b_low.to(gl.int16, bitcast=True), b_high.to(gl.int16, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )
    o_row = gl.arange(0, BN, gl.SliceLayout(1, b_out.type.layout))[:, None]
    o_pair = gl.arange(0, BM // 2, gl.SliceLayout(0, b_out.type.layout))[None, :]
    o_n = i_n + (o_row & -16) + 2 * (o_row & 4) + 2 * (o_pair & 3)
    o_m = i_m + 8 * (o_pair >> 2) + (o_row & 3) + ((o_row >> 1) & 4)
    if PART > 0:
        o_begin = i_m + (8 * (o_pair >> 2) & -PART)
        o_m += first_row(o_begin, M, PART) - o_begin
        taken = o_m >= o_begin
    else:
        taken = o_m < M
    p_out = out.to(gl.pointer_type(gl.int32), bitcast=True) + (o_m.to(gl.int64) * (N // 2) + (o_n >> 1))
    gl.store(p_out, b_out, mask=taken & (o_n < N))


@gluon.jit
def wait_until_sent():
    """Until what this thread sent has been read. Gluon's own wait has all warps wait for each other too."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group.read 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


lends = gluon.constexpr_function(hopper_tiles.lends)


@gluon.jit
def outputs(s_x, out_map, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for whole tiles, ``[.., BM, BN]``: their own, in place 0; or of the stages of x.

    A stage holds 128 columns of x, so as many of the output; ``128 // BN`` tiles lie in one.
    """
    if lends(BM):
        s_out = reinterpret(s_x, out_map.dtype, [STAGES * 128 // BN, BM, BN], out_map.layout)
    else:
        s_out = gl.allocate_shared_memory(out_map.dtype, [1, BM, BN], out_map.layout)
    return s_out


@gluon.jit
def send_tile(tile, out_map, s_out, i_n, i_m, DTYPE: gl.constexpr):
    """As :func:`store_tile`, through shared memory and by TMA: the program goes on while the tile is written."""
    tma_store_wait(0)  # the tile before has been read
    s_out.permute((1, 0)).store(tile.to(DTYPE))
    fence_async_shared()
    tma_store(out_map, [i_m, i_n], s_out)
