"""AWQ GEMV: output-major, codes packed along K, zero points along the groups; also llm-awq's "v1" files.

    qweight int32 [N, K/8]     nibble j of word c is input 8c + j
    qzeros  int32 [N, W]       nibble j of word c is group 8c + j, true zeros
    scales  float16 [N, 8 W]   group g in column g; from G on 0
    bias    float [N]          optional

W and the padding are :mod:`w4plugin.formats.awq_padding`'s. Written by AutoAWQ (``version: gemv``) and by llm-awq
between September 2023 and February 2024.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from w4plugin.errors import CorruptError
from w4plugin.formats.awq_padding import PAD, size_from_padding, true_groups
from w4plugin.formats.decoding import finish, floats, need, words
from w4plugin.formats.format import Candidate, Decoded, Found, Module, RowShard
from w4plugin.formats.grouping import Parts
from w4plugin.formats.words import to_int32
from w4plugin.packing import NIBBLES, unpack
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import SYMMETRIC_ZERO

SUFFIXES = frozenset({"qweight", "qzeros", "scales"})


def detect(candidate: Candidate) -> Found | None:
    """N and K of a GEMV module.

    Shapes alone cannot tell some of them (K = 256 in groups of 32) from a GPTQ layer with groups of 8, which nobody
    writes: the config's ``version`` breaks the tie.
    """
    h = candidate.headers
    if not {"qweight", "qzeros", "scales"} <= h.keys() or "g_idx" in h:
        return None
    qweight, qzeros, scales = h["qweight"], h["qzeros"], h["scales"]
    if any(len(t.shape) != 2 or 0 in t.shape for t in (qweight, qzeros, scales)) or qweight.dtype not in ("I32", "I64"):
        return None
    (N, columns), W = qweight.shape, qzeros.shape[1]
    if qzeros.dtype not in ("I32", "I64") or not scales.dtype.startswith(("F", "BF")):
        return None
    if qzeros.shape[0] != N or scales.shape != (N, PAD * W):
        return None
    if columns == scales.shape[1] and candidate.config.method in ("gptq", "auto-round"):
        return None
    K = columns * NIBBLES
    return Found(4, K, N, size_from_padding(K, W, candidate.config.for_module(candidate.name)))


def read(module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, shard: RowShard | None) -> Decoded:
    """An AWQ GEMV module. Of a row shard, scales and zeros must be whole.

    Raises:
        CorruptError: tensors contradict each other, or no group size fits the padding.
    """
    name = module.name
    stored, stored_zeros, scales = need(module, tensors, "qweight", "qzeros", "scales")
    scales = floats(module, "scales", scales)
    packed = to_int32(words(module, "qweight", stored), -1, 32, f"{name}.qweight")
    zero_words = to_int32(words(module, "qzeros", stored_zeros), -1, 32, f"{name}.qzeros")
    N = scales.shape[0]
    if packed.ndim != 2 or packed.shape[0] != N or zero_words.shape != (N, scales.shape[1] // PAD):
        raise CorruptError(
            name,
            got=f"qweight {list(packed.shape)}, qzeros {list(zero_words.shape)}, scales {list(scales.shape)}",
            wanted="[N, K/8], [N, W] and [N, 8 W]",
        )
    K = packed.shape[1] * NIBBLES if shard is None else shard.total
    G = true_groups(f"{name}.scales", scales.mT, K, config.for_module(name))
    zeros: Tensor | None = unpack(zero_words, -1)[:, :G].mT.contiguous()
    if zeros is not None and bool((zeros == SYMMETRIC_ZERO).all()):
        zeros = None
    parts = Parts(packed.mT.contiguous(), scales[:, :G].mT.contiguous(), zeros)
    return finish(module, parts, tensors, config, shard, "true")
