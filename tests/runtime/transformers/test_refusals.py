"""What does not fit is one of our errors, before any weight is loaded where headers tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import w4plugin.runtime.transformers as w4
from tests.runtime.transformers.models import TINY, Recipe, edit, edit_config, small, write
from w4plugin.errors import CorruptError, UnsafeError, UnsupportedError, UsageError


def test_a_module_that_the_architecture_lacks(tmp_path: Path) -> None:
    write(tmp_path / "m", Recipe())

    def fused(tensors: dict[str, torch.Tensor]) -> None:
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            tensors[f"model.layers.0.self_attn.qkv_proj.{suffix}"] = tensors[
                f"model.layers.0.mlp.up_proj.{suffix}"
            ].clone()

    with pytest.raises(CorruptError, match="qkv_proj"):
        w4.from_pretrained(edit(tmp_path / "m", fused))


def test_a_layer_without_tensors(tmp_path: Path) -> None:
    write(tmp_path / "m", Recipe())
    edit_config(tmp_path / "m", lambda c: c.update(num_hidden_layers=3))
    with pytest.raises(CorruptError, match=r"model\.layers\.2\.\S+: got no tensors"):
        w4.from_pretrained(tmp_path / "m")


def test_more_layers_than_the_config_has(tmp_path: Path) -> None:
    write(tmp_path / "m", Recipe())
    edit_config(tmp_path / "m", lambda c: c.update(num_hidden_layers=1))
    with pytest.raises(CorruptError, match=r"model\.layers\.1\."):
        w4.from_pretrained(tmp_path / "m")


def test_other_sizes_than_the_config_has(tmp_path: Path) -> None:
    write(tmp_path / "m", Recipe())
    edit_config(tmp_path / "m", lambda c: c.update(intermediate_size=96))
    with pytest.raises(CorruptError, match=r"mlp.*config\.json is of another model"):
        w4.from_pretrained(tmp_path / "m")


def test_a_missing_bias(tmp_path: Path) -> None:
    write(tmp_path / "m", Recipe(model=small(Qwen2Config)))
    edit(tmp_path / "m", lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(CorruptError, match=r"layers\.1\.self_attn\.k_proj\.bias"):
        w4.from_pretrained(tmp_path / "m")


def test_damaged_values_are_named(tmp_path: Path) -> None:
    write(tmp_path / "m", Recipe())

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.scales"][0, 0] = float("nan")

    with pytest.raises(CorruptError, match=r"model\.layers\.1\.mlp\.up_proj.*NaN"):
        w4.from_pretrained(edit(tmp_path / "m", damage))


def test_a_layer_that_was_never_filled(tmp_path: Path) -> None:
    write(tmp_path / "m", Recipe())

    def empty(tensors: dict[str, torch.Tensor]) -> None:
        for suffix in ("qweight", "scales"):
            tensors[f"model.layers.1.mlp.up_proj.{suffix}"].zero_()

    with pytest.raises(CorruptError, match=r"up_proj.*all 0"):
        w4.from_pretrained(edit(tmp_path / "m", empty))


def test_a_plain_checkpoint(plain_folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="no module packed in 4 bits"):
        w4.from_pretrained(plain_folder)


def test_pickles(tmp_path: Path) -> None:
    write(tmp_path / "m", Recipe())
    (file,) = (tmp_path / "m").glob("*.safetensors")
    torch.save({"model.norm.weight": torch.ones(64)}, file.with_name("pytorch_model.bin"))
    file.unlink()
    with pytest.raises(UnsafeError, match="pickle"):
        w4.from_pretrained(tmp_path / "m")
    w4.register("all")
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin: got weights in a pickle"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "m")


@pytest.mark.parametrize(
    "device_map", [{"model": "cpu", "lm_head": "disk"}, {"model.embed_tokens": 0, "model": "cpu", "lm_head": 0}]
)
def test_offloading(tmp_path: Path, device_map: Any) -> None:
    with pytest.raises(UnsupportedError, match="device_map"):
        w4.from_pretrained(TINY, device_map=device_map, offload_folder=tmp_path)


@pytest.mark.parametrize(
    "argument", [{"quantization_config": {"bits": 4}}, {"subfolder": "a"}, {"state_dict": {"a": 1}}]
)
def test_arguments_that_contradict_the_checkpoint(argument: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(argument))):
        w4.from_pretrained(TINY, **argument)


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        w4.from_pretrained(tmp_path / "nothing")


def test_unknown_backend() -> None:
    with pytest.raises(UsageError, match="nonesuch"):
        w4.from_pretrained(TINY, backend="nonesuch")
