"""The judge: what every format means, in NumPy, written apart from the code it judges.

Nothing here is fast or shared. Each format is the shortest formula that says what its bits mean, in the notation

    W[k, n] = (q[k, n] - z[g[k], n]) * s[g[k], n]

with K inputs, N outputs and G groups. Integers are exact; the product of a 4-bit difference and a float16 or bfloat16
scale is exact in float32, and that of a float32 scale in float64, so weights compare by equality.

NumPy has no bfloat16: pass such scales through :func:`widen_bfloat16` first, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4plugin.errors import UsageError

Array = NDArray[Any]
Tensors = Mapping[str, Array]

UNDO_AWQ = [0, 4, 1, 5, 2, 6, 3, 7]
"""AWQ GEMM: column 8c + j of a row sits in nibble UNDO_AWQ[j] of word c."""


@dataclass(frozen=True, eq=False)
class Exact:
    """A weight as the file's bits define it.

    Attributes:
        q: codes, int64 ``[K, N]``, 0..15.
        z: true zero points, int64 ``[G, N]``.
        s: scales, float32 or float64 ``[G, N]``.
        g: group of each row, int64 ``[K]``.
        original: ``[K, N]`` what the original kernel computes where the file stores rounded products instead of zero
            points; None where it stores the zero points themselves.
        bound: ``[K, N]`` how far ``weight()`` may be from ``original``; None as above.
    """

    q: Array
    z: Array
    s: Array
    g: Array
    original: Array | None = None
    bound: Array | None = None

    def weight(self) -> Array:
        """``[K, N]``, exact: float32, or float64 for float32 scales."""
        wide = np.float64 if self.s.dtype == np.float64 else np.float32
        product: Array = (self.q - self.z[self.g]).astype(wide) * self.s[self.g].astype(wide)
        return product


def dequantize(
    name: str,
    tensors: Tensors,
    group_size: int | None = None,
    *,
    zeros: str | None = None,
    columns: int | None = None,
    word_bits: int | None = None,
    stored: str | None = None,
) -> Exact:
    """What the tensors of one module mean.

    Args:
        name: a format of ``w4plugin formats``.
        tensors: the module's tensors by suffix.
        group_size: rows in a group (-1 or None: K / G). Needed where shapes do not tell: short last groups, GEMV.
        zeros: how zero points are stored in GPTQ tensors: "true", "minus-one", "minus-one-carry" or "symmetric"; None
            means "true" for gptq_v2 and auto-round, else "minus-one".
        columns: N, when the tensors are padded beyond it.
        word_bits: 32 for 32-bit words in a wider tensor.
        stored: "BF16" when scales and products are widened bfloat16, which sets the bound of formats that store
            products; None means the arrays' own dtype.

    Raises:
        UsageError: the name is no format.
    """
    if name not in _MEANINGS:
        raise UsageError("reference", got=repr(name), wanted=" | ".join(_MEANINGS))
    return _MEANINGS[name](tensors, _Options(group_size, zeros, columns, word_bits, stored))


@dataclass(frozen=True)
class _Options:
    group_size: int | None
    zeros: str | None
    columns: int | None
    word_bits: int | None
    stored: str | None


def widen_bfloat16(bits: Array) -> Array:
    """uint16 bit patterns as the float32 numbers they stand for."""
    widened: Array = (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return widened


def half_ulp(x: Array, significand: int, smallest: float) -> Array:
    """Half a unit in the last place of x in a float with so many significand bits and that smallest subnormal."""
    exponent = np.floor(np.log2(np.maximum(np.abs(x.astype(np.float64)), np.finfo(np.float64).tiny)))
    step: Array = np.maximum(2.0 ** (exponent - (significand - 1)), smallest) / 2
    return step


def nibbles(words: Array, word_bits: int | None = None) -> Array:
    """``[..., C]`` words -> ``[..., C, L]`` codes, lowest first; L is 8 for 32-bit words."""
    unsigned = np.ascontiguousarray(words).view(f"u{words.dtype.itemsize}").astype(np.uint64)
    bits = word_bits or 8 * words.dtype.itemsize
    shifts = np.arange(0, bits, 4, dtype=np.uint64)
    return ((unsigned[..., None] >> shifts) & np.uint64(15)).astype(np.int64)


def along_rows(words: Array, word_bits: int | None = None) -> Array:
    """``[R, C]`` words packed along the first axis -> ``[8R, C]`` codes."""
    codes = nibbles(words, word_bits)
    return codes.transpose(0, 2, 1).reshape(-1, words.shape[1])


def along_columns(words: Array, word_bits: int | None = None) -> Array:
    """``[R, C]`` words packed along the last axis -> ``[R, 8C]`` codes."""
    return nibbles(words, word_bits).reshape(words.shape[0], -1)


def sequential(K: int, G: int, group_size: int | None) -> Array:
    """Group of each row when groups follow each other."""
    size = K // G if group_size in (None, -1) else int(group_size or 0)
    return np.arange(K) // size


def _wide(scales: Array) -> Array:
    return scales.astype(np.float64 if scales.dtype in (np.float32, np.float64) else np.float32)


def _index(stored: Array | None, K: int, G: int, group_size: int | None, unset: int | None = None) -> Array:
    """g_idx with its placeholders resolved: all zero, or any ``unset``, means sequential; negatives count from G."""
    if stored is None or stored.size == 0 or (unset is not None and bool((stored == unset).any())):
        return sequential(K, G, group_size)
    index = stored.astype(np.int64)
    index = np.where(index < 0, index + G, index)
    return index if index.any() else sequential(K, G, group_size)


def _gptq(tensors: Tensors, o: _Options, default: str) -> Exact:
    s = _wide(tensors["scales"])
    N = o.columns or s.shape[1]
    q = along_rows(tensors["qweight"], o.word_bits)[:, :N]
    s = s[:, :N]
    rule = o.zeros or default
    words = tensors["qzeros"]
    if rule == "symmetric" or words.size == 0:
        z: Array = np.full(s.shape, 8)
    elif rule == "true":
        z = along_columns(words, o.word_bits)[:, :N]
    elif rule == "minus-one":
        z = (along_columns(words, o.word_bits)[:, :N] + 1) & 15
    elif rule == "minus-one-carry":
        unsigned = np.ascontiguousarray(words).view(f"u{words.dtype.itemsize}")
        ones = unsigned.dtype.type(0x1111111111111111 & ((1 << (8 * words.dtype.itemsize)) - 1))
        z = along_columns(unsigned + ones, o.word_bits)[:, :N]
    else:
        raise UsageError("reference: zeros", got=repr(rule), wanted="true | minus-one | minus-one-carry | symmetric")
    return Exact(q, z, s, _index(tensors.get("g_idx"), q.shape[0], s.shape[0], o.group_size))


def _awq(tensors: Tensors, o: _Options) -> Exact:
    s = _wide(tensors["scales"])
    q = nibbles(tensors["qweight"])[..., UNDO_AWQ].reshape(tensors["qweight"].shape[0], -1)
    z: Array = np.full(s.shape, 8)
    if tensors.get("qzeros") is not None and tensors["qzeros"].size:
        z = nibbles(tensors["qzeros"])[..., UNDO_AWQ].reshape(s.shape[0], -1)
    return Exact(q, z, s, sequential(q.shape[0], s.shape[0], o.group_size))


def _awq_gemv(tensors: Tensors, o: _Options) -> Exact:
    q = along_columns(tensors["qweight"]).T
    G = q.shape[0] // _stated(o, q.shape[0])
    z = along_columns(tensors["qzeros"])[:, :G].T
    return Exact(q, z, _wide(tensors["scales"])[:, :G].T, sequential(q.shape[0], G, None))


def _stated(o: _Options, K: int) -> int:
    if o.group_size is None:
        raise UsageError("reference", got="no group_size", wanted="one: padded shapes do not tell it")
    return K if o.group_size == -1 else o.group_size


def _awq_fast(tensors: Tensors, o: _Options) -> Exact:
    words = tensors["qweight"]
    quads, K = words.shape
    four = nibbles(words.reshape(quads, K // 64, 64))  # [quads, spans, 64 words, 4 codes]
    runs = four.reshape(quads, K // 64, 4, 64).transpose(0, 2, 1, 3).reshape(quads * 4, K // 32, 32)
    order = np.arange(32).reshape(4, 8).T.ravel()
    ordered = np.empty_like(runs)
    ordered[..., order] = runs
    q = ordered.reshape(quads * 4, K).T
    G = K // _stated(o, K)
    products = tensors["scaled_zeros" if "scaled_zeros" in tensors else "qzeros"]
    return _rounded(q, tensors["scales"][:G], products[:G].astype(np.float64), sequential(K, G, None), o.stored)


def _gptq_v0(tensors: Tensors, o: _Options) -> Exact:
    q = along_rows(tensors["qweight"])
    products = -tensors["zeros"].T.astype(np.float64)
    return _rounded(q, tensors["scales"].T, products, np.zeros(q.shape[0], np.int64), o.stored)


_FLOATS = {"F16": (11, 2.0**-24), "BF16": (8, 2.0**-133), "F32": (24, 2.0**-149)}
"""Significand bits and smallest subnormal."""


def _rounded(q: Array, scales: Array, products: Array, g: Array, stored: str | None) -> Exact:
    """Formats that store -(scale * zero): the zero point is the nearest whole quotient."""
    s = scales.astype(np.float64)
    z = np.rint(np.divide(-products, s, out=np.zeros_like(s), where=s != 0)).astype(np.int64)
    original = q * s[g] + products[g]
    bound = half_ulp(s * z, *_FLOATS[stored or f"F{8 * scales.dtype.itemsize}"])[g]
    return Exact(q, z, _wide(scales), g, original, bound)


def _compressed_tensors(tensors: Tensors, o: _Options) -> Exact:
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    N, G = scale.shape
    K = int(tensors["weight_shape"][-1]) if "weight_shape" in tensors else 8 * packed.shape[1]
    q = along_columns(packed)[:, :K].T
    stored = tensors.get("weight_zero_point")
    if stored is None:
        z = np.full((G, N), 8)
    elif stored.dtype == np.int32 and stored.shape[0] == (N + 7) // 8:
        z = along_rows(stored)[:N].T
    else:
        z = stored.astype(np.int64).T
        z = z if z.max() > 7 else z + 8
    g = _index(tensors.get("weight_g_idx"), K, G, o.group_size, unset=-1)
    return Exact(q, z, _wide(scale).T, g)


def _marlin(tensors: Tensors, o: _Options) -> Exact:
    packed = tensors["B"] if "B" in tensors else tensors["qweight"]
    stored = tensors["s"] if "s" in tensors else tensors["scales"]
    K, (G, N) = packed.shape[0] * 16, stored.shape
    places: list[int] = []
    for i in range(32):
        row = [2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4) + 8, 2 * (i % 4) + 9]
        block = [16 * r + i // 4 + 8 * half for half in (0, 1) for r in row]
        for j in range(4):
            places += [e + 256 * j for e in block]
    slots = np.array(places).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
    runs = nibbles(packed).reshape(-1, 1024)
    tiles = np.empty_like(runs)
    tiles[:, slots] = runs
    q = tiles.reshape(K // 16, N // 16, 16, 16).transpose(0, 2, 1, 3).reshape(K, N)
    if G > 1:
        columns = np.arange(64).reshape(8, 8).T.ravel()
    else:
        columns = np.array([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])
    flat = _wide(stored).reshape(-1, len(columns))
    s = np.empty_like(flat)
    s[:, columns] = flat
    return Exact(q, np.full((G, N), 8), s.reshape(G, N), sequential(K, G, o.group_size))


_MEANINGS: dict[str, Callable[[Tensors, _Options], Exact]] = {
    "gptq": lambda tensors, o: _gptq(tensors, o, "minus-one"),
    "gptq_v2": lambda tensors, o: _gptq(tensors, o, "true"),
    "auto-round": lambda tensors, o: _gptq(tensors, o, "true"),
    "awq": _awq,
    "awq-gemv": _awq_gemv,
    "awq-gemv-fast": _awq_fast,
    "llm-awq": _awq_fast,
    "awq-marlin": _marlin,
    "gptq-marlin": _marlin,
    "gptq-v0": _gptq_v0,
    "compressed-tensors": _compressed_tensors,
}
