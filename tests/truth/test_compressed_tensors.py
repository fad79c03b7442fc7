"""compressed-tensors packs what is read here, and unpacks what is written here; its AWQ conversion gives our bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Theirs
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from torch import Tensor

from tests.truth.layers import NAME, draw, read, same, write
from w4plugin.formats import registry
from w4plugin.packing import unpack
from w4plugin.tensor import W4Tensor

symmetries = pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
sizes = pytest.mark.parametrize(
    ("K", "N", "size"), [(256, 40, 32), (512, 33, 128), (64, 8, -1), (2048, 12, 128), (128, 100, 16)]
)


def scheme(weight: W4Tensor) -> QuantizationScheme:
    channel = weight.G == 1
    args = QuantizationArgs(
        num_bits=4,
        symmetric=weight.symmetric,
        strategy="channel" if channel else "group",
        group_size=None if channel else weight.group_size,
    )
    return QuantizationScheme(targets=["Linear"], weights=args)


def compressed(weight: W4Tensor) -> dict[str, Tensor]:
    """Their tensors of a weight: quantised by them from its values, where that gives the codes back."""
    state: dict[str, Tensor] = {
        "weight": weight.dequantize(torch.float32).mT.contiguous(),
        "weight_scale": weight.scales.mT.contiguous(),
        "weight_zero_point": (weight.full_zeros().to(torch.int8) - 8).mT.contiguous(),
    }
    made: dict[str, Tensor] = Theirs.compress(state, scheme(weight))
    return made


def config(weight: W4Tensor) -> dict[str, Any]:
    groups = {"group_0": scheme(weight)}
    whole = QuantizationConfig(config_groups=groups, format="pack-quantized", quantization_status="compressed")
    return {"quant_method": "compressed-tensors", **whole.model_dump(mode="json")}


@symmetries
@sizes
@dtypes
def test_their_tensors_under_their_config(K: int, N: int, size: int, sym: bool, dtype: torch.dtype) -> None:
    weight = draw(K + N, K, N, size, sym=sym, dtype=dtype)
    theirs = compressed(weight)
    found = read(theirs, config(weight))
    codes = unpack_from_int32(theirs["weight_packed"], 4, torch.Size([N, K])).to(torch.int16) + 8
    assert torch.equal(unpack(found.weight.qweight, 0).to(torch.int16), codes.T)
    same(found.weight, weight)
    assert found.notes == ()
    assert torch.equal(Theirs.decompress(theirs, scheme(weight))["weight"], found.weight.dequantize(dtype).mT)


@symmetries
@sizes
@dtypes
def test_our_tensors_are_theirs_byte_for_byte(K: int, N: int, size: int, sym: bool, dtype: torch.dtype) -> None:
    weight = draw(K + N + 1, K, N, size, sym=sym, dtype=dtype)
    ours, _ = write("compressed-tensors", weight)
    theirs = compressed(weight)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@symmetries
@sizes
@dtypes
def test_our_tensors_under_our_config(K: int, N: int, size: int, sym: bool, dtype: torch.dtype) -> None:
    weight = draw(K + N + 2, K, N, size, sym=sym, dtype=dtype)
    ours, stated = write("compressed-tensors", weight)
    parsed = QuantizationConfig.model_validate({k: v for k, v in stated.items() if k != "quant_method"})
    (only,) = parsed.config_groups.values()
    assert torch.equal(Theirs.decompress(ours, only)["weight"], weight.dequantize(dtype).mT)


@symmetries
@sizes
@dtypes
def test_stacks_of_experts(K: int, N: int, size: int, sym: bool, dtype: torch.dtype) -> None:
    parts = [draw(seed, K, N, size, sym=sym, dtype=dtype) for seed in range(3)]
    stack = W4Tensor.stack_experts(parts)
    packed = pack_to_int32((unpack(stack.qweight, -2).to(torch.int8) - 8).mT.contiguous(), 4)
    ours, _ = write("compressed-tensors", stack)
    assert torch.equal(ours["weight_packed"], packed)
    if not sym:
        zeros = (stack.full_zeros().to(torch.int8) - 8).mT.contiguous()
        assert torch.equal(ours["weight_zero_point"], pack_to_int32(zeros, 4, packed_dim=0))


@symmetries
def test_act_order_is_refused_as_the_formats_limits_say(sym: bool) -> None:
    """When this fails, compressed-tensors reads act-order again, and ``limits`` in the registry says too much."""
    weight = draw(1, 256, 16, 32, sym=sym)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(2))
    _, stated = write("compressed-tensors", replace(weight, g_idx=weight.groups()[order].int()))
    with pytest.raises(ValueError, match="has been removed"):
        QuantizationConfig.model_validate({k: v for k, v in stated.items() if k != "quant_method"})
    assert "0.19.0" in registry.get("compressed-tensors").limits


@symmetries
@pytest.mark.parametrize(("K", "N", "size"), [(256, 40, 32), (64, 8, -1), (384, 96, 128), (128, 104, 16)])
def test_their_conversion_of_awq(K: int, N: int, size: int, sym: bool) -> None:
    weight = draw(K + N + 3, K, N, size, sym=sym)
    awq, stated = write("awq", weight)
    ours, _ = write("compressed-tensors", read(awq, stated).weight)
    converter = AutoAWQConverter(group_size=weight.group_size, zero_point=not sym)
    theirs = converter.process({f"{NAME}.{suffix}": t for suffix, t in awq.items()})
    assert theirs.keys() == {f"{NAME}.{suffix}" for suffix in ours}
    for suffix, tensor in ours.items():
        assert torch.equal(tensor, theirs[f"{NAME}.{suffix}"]), suffix
