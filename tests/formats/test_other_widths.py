"""GPTQ modules of other widths become plain weights exactly."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.formats.samples import Array, census, checkpoint, gptq_config, pack_gptq, tensor, truth
from w4plugin.errors import CorruptError, UnsupportedError, W4Error
from w4plugin.formats import Module, read_module
from w4plugin.formats.conformance import DAMAGES
from w4plugin.formats.other_widths import bit_planes, bit_stream, dequantize
from w4plugin.quant_config import QuantConfig


def stream(codes: Array, bits: int, axis: int) -> Array:
    """Codes as one stream of bits along an axis, as a Python integer a row."""
    rows = np.moveaxis(codes, axis, -1).reshape(-1, codes.shape[axis])
    count = -(-codes.shape[axis] * bits // 32)
    out = np.zeros((rows.shape[0], count), np.uint32)
    for i, row in enumerate(rows):
        value = sum(int(c) << (bits * j) for j, c in enumerate(row))
        out[i] = [(value >> (32 * j)) & 0xFFFFFFFF for j in range(count)]
    return np.moveaxis(out.view(np.int32), -1, axis)


def layer(bits: int, *, sym: bool = False, seed: int = 0, K: int = 64, N: int = 64) -> tuple[dict[str, Tensor], Array]:
    """v1 tensors and the exact weight [N, K]."""
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 1 << bits, (K, N))
    z = np.full((2, N), 1 << (bits - 1)) if sym else rng.integers(1, 1 << bits, (2, N))
    s = torch.from_numpy(rng.uniform(0.001, 0.1, (2, N))).half()
    g = np.arange(K) // (K // 2)
    tensors = {
        "qweight": tensor(stream(q, bits, 0)),
        "qzeros": tensor(stream(z - 1, bits, 1)),
        "scales": s,
        "g_idx": tensor(g.astype(np.int32)),
    }
    return tensors, ((q - z[g]) * s.double().numpy()[g]).T


def found(tensors: dict[str, Tensor], config: dict[str, object]) -> tuple[Module, QuantConfig]:
    (module,) = census(checkpoint(layer=tensors), config).other_width
    return module, QuantConfig.from_dict(config)


CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("sym", [False, True])
def test_plain_weight_is_exact(bits: int, sym: bool) -> None:
    tensors, wanted = layer(bits, sym=sym)
    module, config = found(tensors, {**CONFIG, "sym": sym})
    assert module.bits == bits
    plain = dequantize(module, tensors, config, torch.float64)
    assert np.array_equal(plain.weight.numpy(), wanted)
    assert torch.equal(dequantize(module, tensors, config).weight, torch.from_numpy(wanted).half())


def test_columns_beyond_one_piece() -> None:
    tensors, wanted = layer(8, N=4160)
    module, config = found(tensors, CONFIG)
    assert np.array_equal(dequantize(module, tensors, config, torch.float64).weight.numpy(), wanted)


def test_true_zeros_and_act_order() -> None:
    tensors, _ = layer(8)
    module, config = found(tensors, {**CONFIG, "checkpoint_format": "gptq_v2"})
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    shuffled = {**tensors, "g_idx": tensors["g_idx"][order]}
    q = bit_stream(tensors["qweight"].mT, 8, 64)
    z = bit_stream(tensors["qzeros"], 8, 64)
    g = shuffled["g_idx"].long()
    wanted = (q.T - z[g]) * tensors["scales"].double()[g]
    assert torch.equal(dequantize(module, shuffled, config, torch.float64).weight, wanted.T)


def test_symmetric_values_decide_against_the_label() -> None:
    tensors, wanted = layer(8, sym=True)
    module, config = found(tensors, {**CONFIG, "sym": True, "checkpoint_format": "gptq_v2"})
    plain = dequantize(module, tensors, config, torch.float64)
    assert np.array_equal(plain.weight.numpy(), wanted)
    assert [n.level for n in plain.notes] == ["conflict"]


@pytest.mark.parametrize("bits", [2, 8])
def test_borrowed_zero_points(bits: int) -> None:
    tensors, _ = layer(bits)
    z = np.random.default_rng(1).integers(0, 1 << bits, (2, 64))
    z[0, :3] = 0
    ones = np.uint32(sum(1 << (bits * i) for i in range(32 // bits)))
    tensors["qzeros"] = tensor((stream(z, bits, 1).view(np.uint32) - ones).view(np.int32))
    module, config = found(tensors, {**CONFIG, "meta": {"quantizer": "gptqmodel:7.0"}})
    q = bit_stream(tensors["qweight"].mT, bits, 64).numpy()
    g = np.arange(64) // 32
    wanted = (q.T - z[g]) * tensors["scales"].double().numpy()[g]
    assert np.array_equal(dequantize(module, tensors, config, torch.float64).weight.numpy(), wanted.T)


def test_four_bits_agree_with_the_w4_reader() -> None:
    t = truth(3, K=96, N=40, size=32, order="act", lowest=1)
    (module,) = census(checkpoint(layer=pack_gptq(t)), gptq_config(t)).modules
    config = QuantConfig.from_dict(gptq_config(t))
    plain = dequantize(module, pack_gptq(t), config).weight
    assert torch.equal(plain, read_module(module, pack_gptq(t), config).weight.dequantize().T)


@pytest.mark.parametrize("planes", [(2, 1), (4, 1), (4, 2), (4, 2, 1)])
def test_planes(planes: tuple[int, ...]) -> None:
    bits = sum(planes)
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (5, 96))
    blocks = []
    for start in range(0, 96, 32):
        low = 0
        for width in planes:
            blocks.append(stream((codes[:, start : start + 32] >> low) & ((1 << width) - 1), width, 1))
            low += width
    assert np.array_equal(bit_planes(tensor(np.concatenate(blocks, 1)), planes, 96).numpy(), codes)


def test_read_module_names_the_width() -> None:
    tensors, _ = layer(8)
    module, config = found(tensors, CONFIG)
    with pytest.raises(UnsupportedError, match="8-bit codes"):
        read_module(module, tensors, config)


def test_layouts_other_than_gptq_are_refused() -> None:
    tensors, _ = layer(8)
    module, config = found(tensors, CONFIG)
    other = Module("layer", "awq", 8, 64, 64, 32, module.tensors)
    with pytest.raises(UnsupportedError, match="GPTQ's layout"):
        dequantize(other, tensors, config)


@pytest.mark.parametrize("damage", ["short", "nan", "index", "rows", "range"])
def test_damage(damage: str) -> None:
    tensors, _ = layer(8)
    module, config = found(tensors, CONFIG)
    dtype = None
    if damage == "short":
        tensors["qweight"] = tensors["qweight"][:-1]
    elif damage == "nan":
        tensors["scales"][0, 0] = float("nan")
    elif damage == "index":
        tensors["g_idx"][0] = 2
    elif damage == "rows":
        tensors["qzeros"] = tensors["qzeros"][:1]
    else:
        tensors["scales"] = tensors["scales"].float() * 1e6
        dtype = torch.float16
    with pytest.raises(UnsupportedError if damage == "range" else CorruptError):
        dequantize(module, tensors, config, dtype)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([2, 3, 8]), st.randoms(use_true_random=False))
def test_random_damage_is_a_weight_or_one_of_our_errors(bits: int, random: Random) -> None:
    tensors, _ = layer(bits)
    module, config = found(tensors, CONFIG)
    for _ in range(random.randint(1, 2)):
        suffix = random.choice(sorted(tensors))
        tensors[suffix] = random.choice(DAMAGES)(tensors[suffix], random)
    try:
        plain = dequantize(module, tensors, config)
    except W4Error:
        return
    assert plain.weight.shape[1] == 64
    assert bool(torch.isfinite(plain.weight).all())
