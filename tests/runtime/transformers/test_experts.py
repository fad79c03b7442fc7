"""Mixtures of experts: packed experts take the place of the host's 3-D parameters and compute what these compute."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen2MoeConfig

import w4plugin.runtime.transformers as w4
from tests.runtime.transformers.models import edit, logits, small
from w4plugin.checkpoint.dequantize import dequantize
from w4plugin.errors import CorruptError, UnsupportedError, W4Error
from w4plugin.formats.format import Layer
from w4plugin.formats.registry import quantization_config, write_module
from w4plugin.quantize import quantize
from w4plugin.runtime.transformers.experts import W4Experts
from w4plugin.tensor import W4Tensor

MODELS = Path(__file__).parents[2] / "data" / "models"
NAMES = ("mixtral__aa_awq_gemm_g64", "qwen2moe__gm_gptq_sym_g64")
EXACT = 2e-5
"""Of logits of about 10 in float32: sums over four experts of 256 products, in another order."""


def experts_of(model: Any) -> list[W4Experts]:
    return [module for module in model.modules() if isinstance(module, W4Experts)]


@pytest.mark.parametrize("name", NAMES)
def test_what_other_tools_quantised(name: str, tmp_path: Path) -> None:
    """The same logits as the dequantised checkpoint; saved, loaded again and made plain, still the same."""
    model = w4.from_pretrained(MODELS / name, dtype=torch.float32)
    assert len(experts_of(model)) == 1
    dequantize(MODELS / name, tmp_path / "plain", dtype="float32")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    wanted = logits(model)
    assert float((wanted - logits(plain)).abs().max()) <= EXACT
    model.save_pretrained(tmp_path / "saved")
    again = w4.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(logits(again), wanted)
    unpacked = model.dequantize()
    assert not experts_of(unpacked)
    assert float((logits(unpacked) - wanted).abs().max()) <= EXACT


@pytest.mark.parametrize("name", NAMES)
def test_saved_codes_are_the_loaded_ones(name: str, tmp_path: Path) -> None:
    """By their weights: each projection of each expert dequantises to the same numbers before and after."""
    model = w4.from_pretrained(MODELS / name, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    for folder, out in ((MODELS / name, "a"), (tmp_path / "saved", "b")):
        dequantize(folder, tmp_path / out, dtype="float32")
    before, after = (load_file(tmp_path / out / "model.safetensors") for out in "ab")
    experts = {key for key in before if ".experts." in key}
    assert len(experts) == 12
    renamed = {
        re.sub(r"\.mlp\.experts\.(\d+)\.w", r".block_sparse_moe.experts.\1.w", key): t for key, t in after.items()
    }
    for key in experts:
        assert torch.equal(before[key], renamed[key]), key


def write(folder: Path, config: Any, words: tuple[str, str, str], *, orders: str = "shared") -> Any:
    """A random mixture with packed experts and plain layers otherwise; returns the plain model it stands for.

    ``orders``: an act-order "shared" by an expert's gate and up, or its "own" for each.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors, layers = {}, []
    for name, tensor in model.state_dict().items():
        layer, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or tensor.ndim != 3:
            tensors[name] = tensor.detach().clone()
            continue
        chunks = tensor.chunk(2, 1) if last == "gate_up_proj" else (tensor,)
        for e in range(tensor.shape[0]):
            order = torch.randperm(tensor.shape[2])
            for word, chunk in zip(words[:2] if len(chunks) == 2 else words[2:], chunks, strict=True):
                weight = quantize(chunk[e].t(), 32)
                order = torch.randperm(weight.K) if orders == "own" else order
                g_idx = weight.groups()[order].to(torch.int32)
                weight = W4Tensor(weight.qweight, weight.scales, weight.zeros, g_idx, weight.group_size)
                chunk[e].copy_(weight.dequantize(torch.float32).t())
                own = f"{layer}.{e}.{word}"
                tensors |= {f"{own}.{suffix}": t for suffix, t in write_module("gptq_v2", weight).items()}
                layers.append(Layer.of(own, weight))
    folder.mkdir(parents=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    stated = {**config.to_dict(), "architectures": [type(model).__name__], "dtype": "float32"}
    stated["quantization_config"] = quantization_config("gptq_v2", layers, [])
    (folder / "config.json").write_text(json.dumps(stated))
    return model


MIXTRAL = (small(MixtralConfig, num_local_experts=4), ("w1", "w3", "w2"))
QWEN2_MOE = (
    small(Qwen2MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, hidden_act="gelu"),
    ("gate_proj", "up_proj", "down_proj"),
)


@pytest.mark.parametrize(("config", "words"), [MIXTRAL, QWEN2_MOE], ids=["mixtral", "qwen2_moe"])
def test_act_order_of_its_own_in_every_expert(config: Any, words: tuple[str, str, str], tmp_path: Path) -> None:
    plain = write(tmp_path / "m", config, words)
    model = w4.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert len(experts_of(model)) == 2
    assert float((logits(model) - logits(plain)).abs().max()) <= EXACT
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(w4.from_pretrained(tmp_path / "saved", dtype=torch.float32)), logits(model))


def test_another_dtype_keeps_the_codes(tmp_path: Path) -> None:
    write(tmp_path / "m", *MIXTRAL)
    model = w4.from_pretrained(tmp_path / "m", dtype=torch.float32)
    before = [w.qweight for layer in experts_of(model) for w in layer.packed_weights()]
    exact = logits(model)
    model = model.to(torch.bfloat16)
    after = [w.qweight for layer in experts_of(model) for w in layer.packed_weights()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert float((logits(model) - exact).abs().max()) <= 0.1  # bfloat16's 2**-8 of logits of about 1


def test_adapters_are_not_offered_where_no_gradient_passes(tmp_path: Path) -> None:
    write(tmp_path / "m", *MIXTRAL)
    model = w4.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert not model.hf_quantizer.is_trainable


AT = r"layers\.1\.mlp\.experts"


def _without(pattern: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if re.search(pattern, n)]:
            del tensors[name]

    return change


def _plain(tensors: dict[str, torch.Tensor]) -> None:
    _without(rf"{AT}\.2\.w1\.")(tensors)
    tensors["model.layers.1.mlp.experts.2.w1.weight"] = torch.zeros(128, 64)


def _biased(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.2.w1.bias"] = torch.ones(128)


def _stacked(tensors: dict[str, torch.Tensor]) -> None:
    for i in range(2):
        for word in ("w1", "w2", "w3"):
            for suffix in ("qweight", "qzeros", "scales", "g_idx"):
                each = [tensors.pop(f"model.layers.{i}.mlp.experts.{e}.{word}.{suffix}") for e in range(4)]
                tensors[f"model.layers.{i}.mlp.experts.{word}.{suffix}"] = torch.stack(each)


CASES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], type[W4Error], str]] = {
    "a missing expert": (_without(rf"{AT}\.3\."), CorruptError, rf"{AT}\.3: got no tensors"),
    "a missing projection": (_without(rf"{AT}\.3\.w3"), CorruptError, rf"{AT}\.3: got no up"),
    "a plain expert among packed ones": (_plain, UnsupportedError, rf"{AT}\.2\.w1: got a plain weight.*dequantize"),
    "a bias that is not zero": (_biased, UnsupportedError, rf"{AT}\.2\.w1\.bias"),
    "stacks": (_stacked, UnsupportedError, r"packed as stacks.*dequantize"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    change, error, message = CASES[name]
    write(tmp_path / "m", *MIXTRAL)
    with pytest.raises(error, match=message):
        w4.from_pretrained(edit(tmp_path / "m", change), dtype=torch.float32)


def test_gate_and_up_with_different_act_order_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m", *MIXTRAL, orders="own")
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.experts.*g_idx"):
        w4.from_pretrained(tmp_path / "m", dtype=torch.float32)


def test_experts_that_compute_more_are_refused() -> None:
    config = small(GptOssConfig, num_local_experts=2, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config)
    plain = model.model.layers[0].mlp.experts
    with pytest.raises(UnsupportedError, match=r"experts: got packed experts of a GptOssExperts"):
        W4Experts(plain, ("gate_proj", "up_proj", "down_proj"), dtype=torch.float32, where="experts")
