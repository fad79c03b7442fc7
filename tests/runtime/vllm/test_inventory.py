"""A checkpoint's modules under the names of vLLM's models, and the layers that they make up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from tests.runtime.vllm.checkpoints import FORMATS, Recipe, draw
from tests.runtime.vllm.layers import opened, rank_of, save
from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.runtime.vllm.config import W4Config

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def config(folder: Path, *names: str, plain: tuple[str, ...] = ()) -> W4Config:
    pack, spell = FORMATS["gptq_v2"]
    truth = draw(np.random.default_rng(0), 32, 64, Recipe("gptq_v2", group_size=32))
    modules = {name: pack(truth) for name in names} | {name: {"weight": torch.ones(32, 64)} for name in plain}
    return opened(save(folder, modules, spell(truth)), PACKED)


def test_names_follow_the_models_mapper(tmp_path: Path) -> None:
    """As a model with a vision tower renames its text model, a head among it, and fuses q, k and v."""
    made = config(tmp_path, "model.layers.0.self_attn.q_proj", "lm_head", plain=("visual.blocks.0.attn.qkv",))
    fuse = {".q_proj": (".qkv_proj", "q")}
    made.apply_vllm_mapper(
        WeightsMapper(
            orig_to_new_stacked=fuse,
            orig_to_new_prefix={
                "visual.": "visual.",
                "lm_head.": "language_model.lm_head.",
                "model.": "language_model.model.",
            },
        )
    )
    assert made.inventory is not None
    assert set(made.inventory.parts) == {
        "language_model.model.layers.0.self_attn.q_proj",
        "language_model.lm_head",
        "visual.blocks.0.attn.qkv",
    }
    (part,) = made.inventory.of_layer("language_model.lm_head", {})
    assert (part.name, part.kind) == ("lm_head", "int4")


def test_layer_of_several_weights(tmp_path: Path) -> None:
    at = "model.layers.0.self_attn"
    made = config(tmp_path, f"{at}.q_proj", f"{at}.k_proj", plain=(f"{at}.v_proj",))
    assert made.inventory is not None
    parts = made.inventory.of_layer(f"{at}.qkv_proj", PACKED)
    assert [(part.name.rpartition(".")[2], part.kind) for part in parts] == [
        ("q_proj", "int4"),
        ("k_proj", "int4"),
        ("v_proj", "plain"),
    ]
    assert made.inventory.of_layer("model.layers.1.self_attn.qkv_proj", PACKED) == []


@pytest.mark.parametrize("missing", ["q_proj", "k_proj"])
def test_layer_that_lacks_a_weight(missing: str, tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj") if n != missing]
    made = config(tmp_path, *names)
    with rank_of(0, 1), pytest.raises(CorruptError, match=missing):
        ReplicatedLinear(64, 96, bias=False, quant_config=made, prefix="model.layers.0.self_attn.qkv_proj")


def test_layer_that_the_other_blocks_have(tmp_path: Path) -> None:
    made = config(tmp_path, "model.layers.0.mlp.down_proj")
    with rank_of(0, 1):
        with pytest.raises(CorruptError, match=r"layers\.1\.mlp\.down_proj"):
            ReplicatedLinear(64, 32, bias=False, quant_config=made, prefix="model.layers.1.mlp.down_proj")
        ReplicatedLinear(64, 32, bias=False, quant_config=made, prefix="model.layers.1.mlp.router")


def test_packed_embedding_is_refused_by_name(tmp_path: Path) -> None:
    made = config(tmp_path, "model.embed_tokens")
    with rank_of(0, 1), pytest.raises(UnsupportedError, match=r"model\.embed_tokens"):
        VocabParallelEmbedding(64, 32, quant_config=made, prefix="model.embed_tokens")


def test_modules_beside_the_layers_are_not_counted_as_layers(tmp_path: Path) -> None:
    made = config(tmp_path, "model.layers.0.mlp.down_proj", "visual.layers.7.mlp.fc1")
    assert made.inventory is not None

    class Text:
        num_hidden_layers = 1

    made.inventory.refuse_what_cannot_be_served(Text())
