"""GPTQ-for-LLaMa before 20 March 2023 ("v0"): one float32 scale an output, zero points as products.

    qweight int32 [K/8, N]    sequential, as today
    scales  float32 [N, 1]
    zeros   float32 [N, 1]    scale * zero, already multiplied
    bias    float [N]         always present

``W = q * scale - zeros``; the integer zero is ``rint(zeros / scale)``. The product is rounded to float32, so the weight
may differ from ``(q - z) * s`` by half a unit in the last place of ``s * z``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from w4plugin.errors import CorruptError
from w4plugin.formats.awq_fast import integer_zeros
from w4plugin.formats.decoding import finish, floats, need, words
from w4plugin.formats.format import Candidate, Decoded, Found, Module, RowShard
from w4plugin.formats.grouping import Parts
from w4plugin.formats.words import to_int32
from w4plugin.packing import NIBBLES
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import SYMMETRIC_ZERO

SUFFIXES = frozenset({"qweight", "scales", "zeros"})


def detect(candidate: Candidate) -> Found | None:
    """K and N of a v0 module."""
    h = candidate.headers
    if not {"qweight", "scales", "zeros"} <= h.keys() or "qzeros" in h:
        return None
    qweight, scales, zeros = h["qweight"], h["scales"], h["zeros"]
    if qweight.dtype != "I32" or len(qweight.shape) != 2 or scales.dtype != "F32" or zeros.dtype != "F32":
        return None
    K, N = qweight.shape[0] * NIBBLES, qweight.shape[1]
    if scales.shape != (N, 1) or zeros.shape != (N, 1) or K == 0:
        return None
    return Found(4, K, N, K)


def read(module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, shard: RowShard | None) -> Decoded:
    """A v0 module.

    Raises:
        CorruptError: shapes contradict each other, or zeros are no multiples of the scales.
    """
    name = module.name
    stored, products, scales = need(module, tensors, "qweight", "zeros", "scales")
    scales, products = floats(module, "scales", scales), floats(module, "zeros", products)
    qweight = to_int32(words(module, "qweight", stored), -2, 32, f"{name}.qweight")
    if qweight.ndim != 2 or scales.shape != (qweight.shape[1], 1) or products.shape != scales.shape:
        raise CorruptError(
            name,
            got=f"qweight {list(qweight.shape)}, zeros {list(products.shape)}, scales {list(scales.shape)}",
            wanted="[K/8, N] and [N, 1] twice",
        )
    zeros = integer_zeros(f"{name}.zeros", -products, scales).mT.contiguous()
    symmetric = bool((zeros == SYMMETRIC_ZERO).all())
    parts = Parts(qweight, scales.mT.contiguous(), None if symmetric else zeros)
    return finish(module, parts, tensors, config, shard, "rounded-product")
