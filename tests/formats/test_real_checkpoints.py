"""Checkpoints that other tools wrote, against the weights that those tools compute, bit for bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from w4plugin import reference
from w4plugin.formats import Census, Layer, TensorHeader, find_modules, quantization_config, read_module, write_module
from w4plugin.formats.other_widths import dequantize
from w4plugin.packing import unpack
from w4plugin.quant_config import QuantConfig

CHECKPOINTS = sorted((Path(__file__).parent.parent / "data" / "checkpoints").iterdir())

FORMATS = {"aa_awq_gemm": "awq", "aa_awq_gemv_": "awq-gemv", "aa_awq_gemvfast": "awq-gemv-fast", "gm_awq": "awq"} | {
    "ar_autoawq": "awq",
    "ar_autoround": "auto-round",
    "lc_": "compressed-tensors",
    "gm_gptq_v2": "gptq_v2",
    "ar_autogptq": "gptq",
    "_gptq": "gptq",
}


def opened(folder: Path) -> tuple[dict[str, Tensor], Census, QuantConfig]:
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, framework="pt") as f:
        metadata = f.metadata()
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        headers = {n: TensorHeader(f.get_slice(n).get_dtype(), tuple(f.get_slice(n).get_shape())) for n in tensors}
    configs = {p.name: json.loads(p.read_text()) for p in folder.glob("*config.json")}
    config = QuantConfig.from_files(configs, metadata)
    return tensors, find_modules(headers, config), config


def sums(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "reference.json").read_text())
    return found


def digest(weight: Tensor) -> str:
    return hashlib.sha256((weight.contiguous() + 0.0).numpy().tobytes()).hexdigest()  # -0 and 0 are the same weight


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda p: p.name)
def test_weights_equal_the_tools_own(folder: Path) -> None:
    tensors, census, config = opened(folder)
    wanted = sums(folder)
    for module in census.modules:
        decoded = read_module(module, {s: tensors[t] for s, t in module.tensors.items()}, config)
        assert digest(decoded.weight.dequantize(torch.float16).T) == wanted.pop(module.name), module.name
        assert not [n for n in decoded.notes if n.level != "info"]
    for module in census.other_width:
        plain = dequantize(module, {s: tensors[t] for s, t in module.tensors.items()}, config, torch.float16)
        assert digest(plain.weight) == wanted.pop(module.name), module.name
    assert not wanted


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda p: p.name)
def test_headers_name_the_format_and_raise_no_conflict(folder: Path) -> None:
    _, census, _ = opened(folder)
    expected = next(name for part, name in FORMATS.items() if part in folder.name)
    assert {m.format for m in census.modules} == {expected}
    assert [n for n in census.notes if n.level != "info" and "matches no module" not in n.text] == []


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda p: p.name)
def test_reader_and_reference_agree(folder: Path) -> None:
    tensors, census, config = opened(folder)
    for module in census.modules:
        own = {s: tensors[t] for s, t in module.tensors.items()}
        decoded = read_module(module, own, config)
        weight = decoded.weight
        zeros = decoded.zero_rule if "gptq" in module.format or module.format == "auto-round" else None
        exact = reference.dequantize(
            module.format, {s: t.numpy() for s, t in own.items()}, weight.group_size, zeros=zeros
        )
        assert np.array_equal(unpack(weight.qweight, 0).numpy(), exact.q)
        assert np.array_equal(weight.full_zeros().numpy(), exact.z)
        assert np.array_equal(weight.groups().numpy(), exact.g)
        assert np.array_equal(weight.dequantize(torch.float64).numpy(), exact.weight())
        if exact.original is not None:
            assert exact.bound is not None
            assert bool((np.abs(exact.weight() - exact.original) <= exact.bound).all())


def test_group_sizes_and_shapes_from_headers() -> None:
    found = {}
    for folder in CHECKPOINTS:
        _, census, _ = opened(folder)
        for module in census.modules + census.other_width:
            found[folder.name, module.name] = (module.bits, module.K, module.N, module.group_size)
    down, k = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.k_proj"
    assert found["llama__aa_awq_gemm_g128", down] == (4, 512, 256, 128)
    assert found["llama__aa_awq_gemv_g64", down] == (4, 512, 256, 64)
    assert found["llama__aa_awq_gemvfast_g64", k] == (4, 256, 128, 64)
    assert found["llama__gm_gptq_sym_perchannel_actorder", down] == (4, 512, 256, 512)
    assert found["llama__lc_rtn_w4a16_asym_g32", k] == (4, 256, 128, 32)
    assert found["llama__gm_gptq_sym_g128_dynamic", "model.layers.1.mlp.down_proj"] == (8, 512, 256, 64)
    assert found["qwen2__gm_gptq_sym_g128_lmhead", "lm_head"] == (8, 256, 512, 32)


WRITABLE = [p for p in CHECKPOINTS if not any(part in p.name for part in ("gemv", "ar_autoround"))]


@pytest.mark.parametrize("folder", WRITABLE, ids=lambda p: p.name)
def test_what_is_written_back_is_what_the_tool_wrote(folder: Path) -> None:
    """Byte for byte, apart from a bias (the caller's) and the g_idx that AutoRound may leave out."""
    tensors, census, config = opened(folder)
    for module in census.modules:
        own = {s: tensors[t] for s, t in module.tensors.items()}
        again = write_module(module.format, read_module(module, own, config).weight)
        assert again.keys() - {"g_idx"} == own.keys() - {"bias", "g_idx"}
        for suffix in again.keys() & own.keys():
            assert again[suffix].dtype == own[suffix].dtype
            assert torch.equal(again[suffix], own[suffix]), f"{module.name}.{suffix}"


SAID = ("bits", "group_size", "sym", "checkpoint_format", "format", "quant_method", "method", "pack_dtype", "version")


@pytest.mark.parametrize("folder", [p for p in WRITABLE if "gm_" in p.name or "aa_" in p.name], ids=lambda p: p.name)
def test_config_says_what_the_tool_says(folder: Path) -> None:
    tensors, census, config = opened(folder)
    layers = [
        Layer.of(m.name, read_module(m, {s: tensors[t] for s, t in m.tensors.items()}, config).weight)
        for m in census.modules
    ]
    (name,) = {m.format for m in census.modules}
    written = quantization_config(name, layers, census.plain_layers)
    theirs = json.loads((folder / "config.json").read_text())["quantization_config"]
    for key in written.keys() & theirs.keys() & set(SAID):
        assert written[key] == theirs[key], key
    assert {"bits", "group_size", "quant_method"} <= written.keys() & theirs.keys()
    for module in census.modules:
        parsed = QuantConfig.from_dict(written).for_module(module.name)
        assert parsed.group_size == config.for_module(module.name).group_size


def test_act_order_in_the_written_config() -> None:
    for folder in WRITABLE:
        tensors, census, config = opened(folder)
        weights = [read_module(m, {s: tensors[t] for s, t in m.tensors.items()}, config).weight for m in census.modules]
        real = any(w.g_idx is not None for w in weights)
        assert real == ("actorder" in folder.name and "perchannel" not in folder.name)
        if census.modules[0].format.startswith("gptq"):
            layers = [Layer.of(m.name, w) for m, w in zip(census.modules, weights, strict=True)]
            assert quantization_config("gptq_v2", layers)["desc_act"] is real
