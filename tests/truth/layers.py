"""Random layers, and this project's reader and writer as a producer's file would meet them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from w4plugin.formats import Decoded, Layer, find_modules, quantization_config, read_module, write_module
from w4plugin.formats.conformance import headers
from w4plugin.packing import pack
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import W4Tensor

NAME = "model.layers.0.mlp.down_proj"


def draw(
    seed: int, K: int, N: int, size: int, *, sym: bool, dtype: torch.dtype = torch.float16, lowest: int = 0
) -> W4Tensor:
    """A random weight with sequential groups; ``size`` -1 is one group."""
    g = torch.Generator().manual_seed(seed)
    size = K if size == -1 else size
    q = torch.randint(0, 16, (K, N), generator=g, dtype=torch.uint8)
    z = torch.randint(lowest, 16, (K // size, N), generator=g, dtype=torch.uint8)
    z[0, 0] = 3  # never all 8 by chance
    s = (torch.rand(K // size, N, generator=g) * 0.05 + 1e-4).to(dtype)
    return W4Tensor(pack(q, 0), s, None if sym else z, None, size)


def read(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Decoded:
    """A producer's tensors by suffix, under a producer's config."""
    parsed = QuantConfig.from_dict(config)
    (module,) = find_modules({f"{NAME}.{s}": h for s, h in headers(tensors).items()}, parsed).modules
    return read_module(module, tensors, parsed)


def write(to: str, weight: W4Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by suffix, and the config of a checkpoint that holds them."""
    return write_module(to, weight), quantization_config(to, [Layer.of(NAME, weight)])


def same(found: W4Tensor, wanted: W4Tensor) -> None:
    """Assert equal codes, zero points, scales and groups."""
    assert torch.equal(found.qweight, wanted.qweight)
    assert torch.equal(found.full_zeros(), wanted.full_zeros())
    assert found.scales.dtype == wanted.scales.dtype
    assert torch.equal(found.scales, wanted.scales)
    assert torch.equal(found.groups(), wanted.groups())
