"""AWQ GEMV_FAST and llm-awq v2: sixteen-bit words interleaved for a GEMV kernel, zero points as rounded products.

    qweight int16 [N/4, K]                     see below
    scales  float16 (llm-awq: or bfloat16) [8 W, N]    from G on 0
    qzeros | scaled_zeros  like scales         -(scale * zero), rounded to the dtype
    bias    float [N]                          optional

Four outputs share a row. In each 64 inputs of a row, 16 words belong to each of the four outputs; of those, 8 words
hold 32 inputs, nibble b of word a being input ``8b + a``.

The integer zero is ``rint(-stored / scale)``: rounding moves the quotient by at most 0.0073 (float16) or 0.054
(bfloat16), so it is recovered exactly. The stored product is rounded, though, so the original kernel's weight may
differ from ``(q - z) * s`` by half a unit in the last place of ``s * z``.

Written by AutoAWQ and GPTQModel (``version: gemv_fast``) and by llm-awq since February 2024 (``*-v2.pt``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats.awq_padding import PAD, size_from_padding, true_groups
from w4plugin.formats.decoding import finish, floats, need
from w4plugin.formats.format import Candidate, Decoded, Found, Module, RowShard
from w4plugin.formats.grouping import Parts
from w4plugin.packing import NIBBLES
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import SYMMETRIC_ZERO

SUFFIXES = frozenset({"qweight", "qzeros", "scales"})
LLM_AWQ_SUFFIXES = frozenset({"qweight", "scaled_zeros", "scales"})

INTERLEAVED = 4
SPAN = 64
"""Inputs in which the words of four outputs lie side by side."""

FURTHEST = 0.25
"""A quotient further from a whole number than this is no rounded zero point."""


def detect(candidate: Candidate) -> Found | None:
    """N and K of a GEMV_FAST module."""
    return _detect(candidate, "qzeros")


def detect_llm_awq(candidate: Candidate) -> Found | None:
    """N and K of an llm-awq v2 module."""
    return _detect(candidate, "scaled_zeros")


def _detect(candidate: Candidate, zeros_name: str) -> Found | None:
    h = candidate.headers
    if not {"qweight", zeros_name, "scales"} <= h.keys():
        return None
    qweight, zeros, scales = h["qweight"], h[zeros_name], h["scales"]
    if qweight.dtype not in ("I16", "U16") or len(qweight.shape) != 2 or len(scales.shape) != 2:
        return None
    if not zeros.dtype.startswith(("F", "BF")) or not scales.dtype.startswith(("F", "BF")):
        return None
    N, K = qweight.shape[0] * INTERLEAVED, qweight.shape[1]
    if zeros.shape != scales.shape or scales.shape[1] != N or scales.shape[0] % PAD or K % SPAN or 0 in scales.shape:
        return None
    W = scales.shape[0] // PAD
    return Found(4, K, N, size_from_padding(K, W, candidate.config.for_module(candidate.name)))


def read(module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, shard: RowShard | None) -> Decoded:
    """A GEMV_FAST or llm-awq v2 module. Of a row shard, scales and zeros must be whole.

    Raises:
        CorruptError: tensors contradict each other, or the zeros are no rounded products.
        UnsupportedError: a scale of 0 has a product that is not, which no integer zero can express.
    """
    name = module.name
    zeros_name = "scaled_zeros" if "scaled_zeros" in tensors else "qzeros"
    qweight, products, scales = need(module, tensors, "qweight", zeros_name, "scales")
    scales, products = floats(module, "scales", scales), floats(module, zeros_name, products)
    N = scales.shape[-1]
    if (
        qweight.dtype not in (torch.int16, torch.uint16)
        or qweight.ndim != 2
        or qweight.shape[0] * INTERLEAVED != N
        or qweight.shape[1] % SPAN
        or products.shape != scales.shape
    ):
        raise CorruptError(
            name,
            got=f"qweight {qweight.dtype} {list(qweight.shape)}, {zeros_name} {list(products.shape)}, "
            f"scales {list(scales.shape)}",
            wanted="int16 [N/4, K] with K % 64 = 0, and [8 W, N] twice",
        )
    K = qweight.shape[1] if shard is None else shard.total
    G = true_groups(f"{name}.scales", scales, K, config.for_module(name))
    zeros = integer_zeros(f"{name}.{zeros_name}", products[:G], scales[:G])
    symmetric = bool((zeros == SYMMETRIC_ZERO).all())
    parts = Parts(sequential_words(qweight), scales[:G].contiguous(), None if symmetric else zeros)
    return finish(module, parts, tensors, config, shard, "rounded-product")


def sequential_words(qweight: Tensor) -> Tensor:
    """int16 ``[N/4, K]`` as int32 ``[K/8, N]``."""
    quads, K = qweight.shape
    # [quads, spans, output of four, run of 32 inputs, word a]
    halves = qweight.view(torch.int16).to(torch.int32).view(quads, K // SPAN, INTERLEAVED, 2, NIBBLES)
    out = halves.new_zeros(quads, INTERLEAVED, K // SPAN, 2, 4)
    for a in range(NIBBLES):
        word = halves[..., a].transpose(1, 2)
        for b in range(4):
            out[..., b] |= ((word >> (4 * b)) & 15) << (4 * a)
    return out.reshape(quads * INTERLEAVED, K // NIBBLES).mT.contiguous()


def integer_zeros(where: str, products: Tensor, scales: Tensor) -> Tensor:
    """uint8 zero points behind ``-(scale * zero)``.

    Raises:
        CorruptError: a quotient is no rounded whole number in 0..15.
        UnsupportedError: a scale of 0 has a product that is not 0.
    """
    exact = torch.float64  # a quotient of subnormal float32 numbers must not lose bits of its own
    some = scales != 0
    if bool((products[~some] != 0).any()):
        raise UnsupportedError(where, got="a product beside a scale of 0", wanted="(q - zero) * scale for every weight")
    quotient = torch.where(some, -products.to(exact) / torch.where(some, scales, 1).to(exact), 0.0)
    zeros = quotient.round()
    if not bool(torch.isfinite(quotient).all()) or bool(((zeros < 0) | (zeros > 15)).any()):
        worst = quotient.flatten()[int((quotient - 7.5).abs().nan_to_num(float("inf")).argmax())]
        raise CorruptError(where, got=f"a zero point of {float(worst):.3g}", wanted="0..15")
    off = float((quotient - zeros).abs().max())
    if off > FURTHEST:
        raise CorruptError(where, got=f"products {off:.2f} away from a whole zero point", wanted="-(scale * zero)")
    return zeros.to(torch.uint8)
