"""Every format, through the host's own loader: the model is the dequantised one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, GPT2Config, LlamaForCausalLM, Qwen2Config

import w4plugin
import w4plugin.runtime.transformers as w4
from tests.runtime.transformers.models import TINY, Recipe, agree, edit, edit_config, greedy, logits, small, write

FORMATS = ("gptq_v2", "gptq", "awq", "auto-round", "compressed-tensors")


def packed(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, w4.W4Linear)]


def test_a_real_checkpoint_says_what_its_plain_form_says(plain_model: Any) -> None:
    model = w4.from_pretrained(TINY, dtype=torch.float32)
    assert len(packed(model)) == 14
    agree(model, plain_model)
    assert greedy(model, 64) == greedy(plain_model, 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(plain_model: Any, dtype: torch.dtype) -> None:
    model = w4.from_pretrained(TINY, dtype=dtype)
    assert model.dtype == dtype
    # activations are rounded between layers: a few units in the last place of the largest logit
    wanted = logits(plain_model)
    bound = 8 * torch.finfo(dtype).eps * float(wanted.abs().max())
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=bound)


def test_dtype_of_the_checkpoint_is_the_default() -> None:
    assert w4.from_pretrained(TINY).dtype == torch.float16


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sym", [False, True])
def test_formats(tmp_path: Path, name: str, sym: bool) -> None:
    reference = write(tmp_path / "m", Recipe(name, sym=sym))
    model = w4.from_pretrained(tmp_path / "m")
    assert len(packed(model)) == 14
    agree(model, reference)
    assert greedy(model) == greedy(reference)


@pytest.mark.parametrize("group_size", [-1, 16, 128])
def test_group_sizes_and_act_order(tmp_path: Path, group_size: int) -> None:
    reference = write(tmp_path / "m", Recipe(group_size=group_size, act_order=group_size == 16))
    agree(w4.from_pretrained(tmp_path / "m"), reference)


@pytest.mark.parametrize("backend", ["cpu", "plain"])
def test_backend_by_name(tmp_path: Path, backend: str) -> None:
    reference = write(tmp_path / "m", Recipe())
    model = w4.from_pretrained(tmp_path / "m", backend=backend)
    assert {m.backend for m in model.modules() if isinstance(m, w4.W4Linear)} == {backend}
    agree(model, reference)


def test_layers_that_stay_plain(tmp_path: Path) -> None:
    reference = write(tmp_path / "m", Recipe(skip=("v_proj", "down_proj")))
    model = w4.from_pretrained(tmp_path / "m")
    assert len(packed(model)) == 10
    agree(model, reference)


def test_biases_of_the_architecture(tmp_path: Path) -> None:
    config = small(Qwen2Config)
    reference = write(tmp_path / "m", Recipe(model=config))
    assert reference.model.layers[0].self_attn.q_proj.bias is not None
    model = w4.from_pretrained(tmp_path / "m")
    assert model.model.layers[0].self_attn.q_proj.bias is not None
    agree(model, reference)


def test_a_bias_that_the_architecture_lacks_is_kept_unless_it_is_zero(tmp_path: Path) -> None:
    reference = write(tmp_path / "random", Recipe(bias="random"))
    agree(w4.from_pretrained(tmp_path / "random"), reference)
    reference = write(tmp_path / "zero", Recipe(bias="zero"))
    model = w4.from_pretrained(tmp_path / "zero")
    assert model.model.layers[0].mlp.up_proj.bias is None
    agree(model, reference)


@pytest.mark.parametrize("tied", [False, True])
def test_packed_head(tmp_path: Path, tied: bool) -> None:
    reference = write(tmp_path / "m", Recipe(head=True, model=small(tie_word_embeddings=tied)))
    model = w4.from_pretrained(tmp_path / "m")
    assert isinstance(model.lm_head, w4.W4Linear)
    assert not model.config.tie_word_embeddings
    agree(model, reference)
    model.save_pretrained(tmp_path / "again")
    agree(w4.from_pretrained(tmp_path / "again"), reference)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    reference = write(tmp_path / "m", Recipe(model=small(tie_word_embeddings=True)))
    model = w4.from_pretrained(tmp_path / "m")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    agree(model, reference)


def test_conv1d_layers_of_gpt2(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=1)
    reference = write(tmp_path / "m", Recipe(model=config))
    assert "transformer.h.0.attn.c_attn.qweight" in w4plugin.open(tmp_path / "m").headers
    model = w4.from_pretrained(tmp_path / "m")
    assert len(packed(model)) == 8
    agree(model, reference)


def test_other_widths_become_plain(tmp_path: Path) -> None:
    """An 8-bit layer, as GPTQModel writes lm_head."""
    reference = write(tmp_path / "m", Recipe(skip=("down_proj",)))

    def eight_bits(tensors: dict[str, torch.Tensor]) -> None:
        for i in range(2):
            name = f"model.layers.{i}.mlp.down_proj"
            weight = tensors.pop(f"{name}.weight").t()
            scales = (weight.abs().amax(0, keepdim=True) / 127).half()
            codes = (weight / scales.float()).round().clamp(-128, 127)
            reference.get_submodule(name).weight.data = (codes * scales.float()).t().contiguous()
            bytes_ = (codes + 128).to(torch.uint8).unflatten(0, (-1, 4)).to(torch.int64)
            shifts = torch.tensor([0, 8, 16, 24]).view(1, 4, 1)
            words = (bytes_ << shifts).sum(1)
            tensors[f"{name}.qweight"] = words.to(torch.uint32).view(torch.int32)
            tensors[f"{name}.scales"] = scales
            tensors[f"{name}.qzeros"] = torch.full((1, 16), 0x80808080 - (1 << 32), dtype=torch.int32)
            tensors[f"{name}.g_idx"] = torch.zeros(128, dtype=torch.int32)

    edit(tmp_path / "m", eight_bits)
    edit_config(
        tmp_path / "m",
        lambda c: c["quantization_config"].update(
            dynamic={r"+:.*down_proj$": {"bits": 8, "group_size": -1}}, sym=False
        ),
    )
    model = w4.from_pretrained(tmp_path / "m")
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    agree(model, reference)
    model.save_pretrained(tmp_path / "again")
    agree(w4.from_pretrained(tmp_path / "again"), reference)


def test_names_and_configs_of_2023(tmp_path: Path, plain_model: Any) -> None:
    """AutoGPTQ's file name, and a config of its own beside a config.json that says nothing."""
    folder = tmp_path / "m"
    shutil.copytree(TINY, folder)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-64g.safetensors")
    edit_config(folder, lambda config: config.pop("quantization_config"))
    model = w4.from_pretrained(folder, dtype=torch.float32)
    agree(model, plain_model)
    model.save_pretrained(tmp_path / "again")
    assert "transformers_weights" not in json.loads((tmp_path / "again" / "config.json").read_text())
    agree(w4.from_pretrained(tmp_path / "again", dtype=torch.float32), plain_model)


def test_shards(tmp_path: Path, plain_model: Any) -> None:
    w4plugin.repack(TINY, w4plugin.Request(tmp_path / "m", max_shard_size="300KB"))
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    agree(w4.from_pretrained(tmp_path / "m", dtype=torch.float32), plain_model)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_device_map(plain_model: Any, device_map: Any) -> None:
    model = w4.from_pretrained(TINY, dtype=torch.float32, device_map=device_map)
    assert {str(m.qweight.device) for m in model.modules() if isinstance(m, w4.W4Linear)} == {"cpu"}
    agree(model, plain_model)


def test_loading_info_and_other_classes(plain_model: Any) -> None:
    model, info = w4.from_pretrained(TINY, auto_class=LlamaForCausalLM, output_loading_info=True)
    assert type(model) is LlamaForCausalLM
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    base = w4.from_pretrained(TINY, auto_class=AutoModel, dtype=torch.float32)
    assert packed(base)[0] == "layers.0.self_attn.q_proj"
    with torch.no_grad():
        hidden = base(torch.arange(7, 39)[None]).last_hidden_state
        agree(lambda ids: type("Out", (), {"logits": plain_model.lm_head(hidden)}), plain_model)
