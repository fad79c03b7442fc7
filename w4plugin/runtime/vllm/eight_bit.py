"""Eight-bit GPTQ modules among four-bit ones, such as the head that GPTQModel's ``lm_head=True`` writes.

This project has no eight-bit kernel: such a module is served as a plain weight, twice its size. In the file, byte j of
word r along K is the code of row 4r + j, zeros are packed likewise along N:

    W[k, n] = (q[k, n] - zero[g, n]) * scale[g, n]        zero = stored + 1 in gptq, stored in gptq_v2
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats.format import Module
from w4plugin.quant_config import QuantConfig

BYTES = 4
SYMMETRIC_ZERO = 128


def read(module: Module, tensors: Mapping[str, Tensor], config: QuantConfig) -> Tensor:
    """The plain weight of an eight-bit GPTQ module.

    Args:
        module: as the census found it.
        tensors: ``qweight`` int32 ``[K/4, N]``, ``scales`` ``[G, N]``, ``qzeros`` int32 ``[G, N/4]``, ``g_idx`` ``[K]``
            or none.
        config: of the checkpoint.

    Returns:
        float32 ``[N, K]``: exact for 16-bit scales.

    Raises:
        UnsupportedError: another layout, which has no such tensors.
        CorruptError: shapes contradict each other.
    """
    if module.bits != 8 or not {"qweight", "scales"} <= tensors.keys() or tensors["qweight"].dtype != torch.int32:
        raise UnsupportedError(
            module.name,
            got=f"{module.bits} bits in {module.format}",
            wanted="4 bits, or 8 bits in GPTQ's layout",
            todo="serve it with vLLM's own method, or quantise this module to 4 bits",
        )
    codes = _bytes(tensors["qweight"]).transpose(1, 2).flatten(0, 1)
    scales = tensors["scales"].float()
    (k, n), groups = codes.shape, scales.shape[0]
    g_idx = _groups(module, tensors, k, groups)
    zeros = _zeros(module, tensors, config, groups, n)
    weight = codes.float()
    weight -= zeros[g_idx] if isinstance(zeros, Tensor) else zeros
    weight *= scales[g_idx]
    return weight.t()


def _bytes(words: Tensor) -> Tensor:
    """int32 ``[R, C]`` -> uint8 ``[R, C, 4]``, lowest byte first."""
    return torch.stack([((words >> (8 * j)) & 255).to(torch.uint8) for j in range(BYTES)], -1)


def _groups(module: Module, tensors: Mapping[str, Tensor], k: int, groups: int) -> Tensor:
    g_idx = tensors.get("g_idx")
    if g_idx is None:
        size = module.group_size or -(-k // groups)
        g_idx = torch.arange(k, device=tensors["qweight"].device) // size
    if g_idx.shape != (k,) or int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        raise CorruptError(
            f"{module.name}.g_idx", got=f"{list(g_idx.shape)}", wanted=f"[{k}] with values below {groups}"
        )
    return g_idx.long()


def _zeros(module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, groups: int, n: int) -> Tensor | int:
    qzeros = tensors.get("qzeros")
    if qzeros is None or not qzeros.numel():
        return SYMMETRIC_ZERO
    stored = _bytes(qzeros).flatten(1, 2)
    if stored.shape[0] != groups or stored.shape[1] < n:
        raise CorruptError(f"{module.name}.qzeros", got=f"{list(qzeros.shape)}", wanted=f"[{groups}, {-(-n // BYTES)}]")
    stored = stored[:, :n].float()
    for zero in (SYMMETRIC_ZERO, SYMMETRIC_ZERO - 1):  # either convention's symmetric zero is recognised by value
        if bool((stored == zero).all()):
            return SYMMETRIC_ZERO
    return stored if config.layout == "gptq_v2" else (stored + 1) % 256
