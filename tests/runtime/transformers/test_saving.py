"""save_pretrained writes a GPTQ v2 checkpoint; state_dict speaks it; nothing changes a code or a scale on the way."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import w4plugin
import w4plugin.runtime.transformers as w4
from tests.runtime.transformers.models import TINY, Recipe, agree, logits, write
from w4plugin.errors import UsageError
from w4plugin.quantize import quantize


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  not a dict
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in ((one[n], other[n]) for n in one)
    )


def test_what_was_loaded_is_saved(tmp_path: Path) -> None:
    """GPTQModel's own v2 tensors come back bit for bit, act-order and zero points included."""
    w4.from_pretrained(TINY).save_pretrained(tmp_path / "again")
    assert equal(tensors(tmp_path / "again"), tensors(TINY))
    assert w4plugin.verify(TINY, tmp_path / "again")["ok"]
    config = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    stated = {
        key: config[key] for key in ("quant_method", "checkpoint_format", "bits", "group_size", "desc_act", "sym")
    }
    assert stated == {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": 4,
        "group_size": 64,
        "desc_act": True,
        "sym": False,
    }


@pytest.mark.parametrize("name", ["gptq", "awq", "auto-round", "compressed-tensors"])
@pytest.mark.parametrize("backend", ["cpu", "plain"])
def test_other_formats_are_saved_as_gptq_v2(tmp_path: Path, name: str, backend: str) -> None:
    reference = write(tmp_path / "m", Recipe(name, skip=("v_proj",)))
    w4.from_pretrained(tmp_path / "m", backend=backend).save_pretrained(tmp_path / "again", max_shard_size="50KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    assert w4plugin.verify(tmp_path / "m", tmp_path / "again")["ok"]
    assert {m.format for m in w4plugin.open(tmp_path / "again").census.modules} == {"gptq_v2"}
    w4.register()
    agree(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), reference)


def test_saving_twice(tmp_path: Path) -> None:
    write(tmp_path / "m", Recipe(act_order=True, bias="random"))
    w4.from_pretrained(tmp_path / "m").save_pretrained(tmp_path / "a")
    w4.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert equal(tensors(tmp_path / "a"), tensors(tmp_path / "b"))
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()


def test_state_dict_round_trip(tmp_path: Path) -> None:
    write(tmp_path / "m", Recipe(act_order=True, bias="random"))
    write(tmp_path / "other", Recipe(group_size=16, bias="zero"))
    model, other = w4.from_pretrained(tmp_path / "m"), w4.from_pretrained(tmp_path / "other")
    for module in other.modules():
        if isinstance(module, w4.W4Linear):  # a module takes a bias only if it has one
            module.bias = torch.nn.Parameter(torch.zeros(module.out_features), requires_grad=False)
    state = model.state_dict()
    assert set(state) == set(tensors(tmp_path / "m"))
    assert not other.load_state_dict(state).missing_keys
    assert torch.equal(logits(other), logits(model))


def test_state_dict_says_what_is_missing_and_what_is_surplus(tmp_path: Path) -> None:
    model = w4.from_pretrained(TINY)
    state = model.state_dict()
    name = "model.layers.0.mlp.up_proj"
    del state[f"{name}.scales"]
    state[f"{name}.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*up_proj\.scales.*Unexpected.*up_proj\.weight"):
        model.load_state_dict(state)
    state = model.state_dict()
    state[f"{name}.qweight"] = state[f"{name}.qweight"][:, :-8]
    with pytest.raises(RuntimeError, match=r"up_proj"):
        model.load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_and_copying_keep_the_weights(plain_model: Any, dtype: torch.dtype) -> None:
    model = copy.deepcopy(w4.from_pretrained(TINY, dtype=torch.float32)).to(dtype)
    assert model.dtype == dtype
    for module in model.modules():
        if isinstance(module, w4.W4Linear):
            assert module.packed_weight().scales.dtype == torch.float16
    bound = 8 * torch.finfo(dtype).eps * float(logits(plain_model).abs().max())
    torch.testing.assert_close(logits(model), logits(plain_model), rtol=0, atol=bound)
    state = model.state_dict()
    assert all(torch.equal(state[n], t) for n, t in tensors(TINY).items() if t.dtype == torch.int32)


def test_dequantize(tmp_path: Path, plain_model: Any) -> None:
    model = w4.from_pretrained(TINY, dtype=torch.float32).dequantize()
    assert not any(isinstance(module, w4.W4Linear) for module in model.modules())
    assert torch.equal(logits(model), logits(plain_model))
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), logits(plain_model))


def test_dequantize_after_saving(tmp_path: Path) -> None:
    model = w4.from_pretrained(TINY)
    model.save_pretrained(tmp_path / "again")  # which leaves the name of a dtype in the model's config
    assert model.dequantize().model.layers[0].mlp.up_proj.weight.dtype == torch.float16


def test_module_of_a_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(64, 48, generator=generator), 32)
    bias = torch.randn(48, generator=generator)
    module = w4.W4Linear.of(weight, bias, dtype=torch.float32)
    x = torch.randn(3, 5, 64, generator=generator)
    wanted = (x.double() @ weight.dequantize(torch.float64) + bias.double()).float()
    torch.testing.assert_close(module(x), wanted, rtol=0, atol=64 / 2**24 * float(wanted.abs().max()) * 8)
    plain = module.plain_linear()
    torch.testing.assert_close(plain(x), wanted, rtol=0, atol=64 / 2**24 * float(wanted.abs().max()) * 8)
    assert not hasattr(module, "weight")
    with pytest.raises(AttributeError, match="stays packed"):
        _ = module.weight
    again = module.packed_weight()
    assert torch.equal(again.qweight, weight.qweight)
    assert torch.equal(again.scales, weight.scales)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype == torch.bfloat16
    with pytest.raises(UsageError, match="no weight yet"):
        w4.W4Linear(64, 48, dtype=torch.float32).packed_weight()
