"""Which checkpoints are taken from vLLM: those that it would refuse or misread, and no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.vllm.checkpoints import Recipe, Shape, edit_config, write
from w4plugin.errors import UsageError
from w4plugin.runtime.vllm import claim, native, versions
from w4plugin.runtime.vllm.config import W4Config
from w4plugin.runtime.vllm.inventory import Inventory

TINY = Shape(hidden=128, inner=256, layers=1, vocab=128)
MIXTRAL = replace(TINY, mixture="mixtral", experts=3)
QWEN2_MOE = replace(TINY, mixture="qwen2_moe", experts=3)


@pytest.fixture(autouse=True)
def cpu_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU build has INT4 kernels only for some CPUs; what it does with them is the question here."""
    monkeypatch.setattr(native, "has_int4_kernels", lambda: True)


def ask(folder: Path, user: str | None = None) -> bool:
    """As vLLM asks while it makes a model's config."""
    config = json.loads((folder / "config.json").read_text())
    quant = config.get("quantization_config", {})
    hf_config = SimpleNamespace(_name_or_path=str(folder), **config)
    return W4Config.override_quantization_method(quant, user, hf_config=hf_config) == "w4plugin"


def why(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The reason of the one line that a claim logs, empty without a claim."""
    logger = versions.logger()
    lines: list[str] = []
    original, logger.info = logger.info, lambda text, *args: lines.append(text % args)
    try:
        claimed = ask(folder)
    finally:
        logger.info = original
    assert len(lines) == claimed
    return lines[0].partition(": ")[2] if lines else ""


SERVED_BY_VLLM = {
    "gptq symmetric": Recipe("gptq", group_size=128, sym=True),
    "gptq_v2 symmetric": Recipe("gptq_v2", group_size=128, sym=True),
    "awq": Recipe("awq", group_size=64),
    "compressed-tensors": Recipe("compressed-tensors", group_size=32),
}

TAKEN = {
    "asymmetric gptq": (Recipe("gptq"), "refuses"),
    "asymmetric gptq_v2": (Recipe("gptq_v2"), "refuses"),
    "act-order": (Recipe("gptq", sym=True, act_order="each"), "refuses"),
    "groups of 16": (Recipe("gptq", group_size=16, sym=True), "group_size = 16"),
    "groups of 256": (Recipe("gptq", group_size=256, sym=True), "group_size = 256"),
    "asymmetric auto-round": (Recipe("auto-round"), "refuses"),
    "awq gemv": (Recipe("awq-gemv"), "awq-gemv"),
    "awq gemv_fast": (Recipe("awq-gemv-fast"), "awq-gemv-fast"),
    "awq marlin": (Recipe("awq-marlin", group_size=128, sym=True), "awq-marlin"),
    "gptq marlin": (Recipe("gptq-marlin", group_size=128, sym=True), "gptq-marlin"),
    "compressed-tensors act-order": (Recipe("compressed-tensors act-order", act_order="each"), "ordering"),
    "packed and plain weights in one layer": (Recipe("gptq", sym=True, skip=("k_proj",)), "packed and other weights"),
    "8-bit head": (Recipe("gptq", sym=True, head=8), "uint8b128"),
    "packed head of a padded vocabulary": (Recipe("gptq", sym=True, head=4), "packed"),
}


def shape(recipe: Recipe) -> Shape:
    marlin = "marlin" in recipe.format
    wide = recipe.group_size >= 256 or marlin
    return replace(TINY, hidden=256 if wide else 128, inner=512 if wide else 256, kv_heads=4, vocab=100)


@pytest.mark.parametrize("name", SERVED_BY_VLLM)
def test_what_vllm_serves_stays_vllms(name: str, tmp_path: Path) -> None:
    recipe = SERVED_BY_VLLM[name]
    packed, _ = write(tmp_path, recipe, shape(recipe))
    assert not ask(packed)


@pytest.mark.parametrize("name", TAKEN)
def test_what_vllm_refuses_or_misreads_is_taken(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, reason = TAKEN[name]
    monkeypatch.setattr(versions, "drops_g_idx", lambda: True)
    packed, _ = write(tmp_path, recipe, shape(recipe))
    assert reason in why(packed, caplog)


MIXTURES = {
    "mixtral symmetric": (Recipe("gptq", group_size=64, sym=True), MIXTRAL, {}, ""),
    "qwen2_moe symmetric": (Recipe("gptq", group_size=32, sym=True), QWEN2_MOE, {}, ""),
    "mixtral awq": (Recipe("awq", group_size=64), MIXTRAL, {"modules_to_not_convert": ["gate"]}, ""),
    "a list of what is packed, which vLLM does not ask about experts": (
        Recipe("gptq", group_size=64, sym=True),
        MIXTRAL,
        {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]]},
        "modules_in_block_to_quantize omits a packed layer (model.layers.0.self_attn.o_proj)",
    ),
    "gate hits what is beside the experts": (
        Recipe("awq", group_size=64),
        QWEN2_MOE,
        {"modules_to_not_convert": ["gate"]},
        "modules_to_not_convert hits a packed layer (model.layers.0.mlp.shared_expert.gate_proj)",
    ),
    "asymmetric": (Recipe("gptq", group_size=64), MIXTRAL, {}, "refuses"),
    "act-order": (Recipe("gptq", group_size=64, sym=True, act_order="each"), MIXTRAL, {}, "refuses"),
    "awq of one group": (
        Recipe("awq", group_size=512),
        replace(MIXTRAL, hidden=192, kv_heads=4, heads=6),
        {"group_size": -1},
        "fit neither of vLLM's kernels for experts",
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, model, changes, reason = MIXTURES[name]
    monkeypatch.setattr(versions, "drops_g_idx", lambda: True)
    packed, _ = write(tmp_path, recipe, model)
    edit_config(packed, **{f"quantization_config__{key}": value for key, value in changes.items()})
    found = why(packed, caplog)
    assert (reason in found) if reason else not found, found


def test_experts_that_share_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 inner rows: two ranks leave whole groups of 128, four make vLLM halve them, eight of 96 end below 32."""
    packed, _ = write(tmp_path / "a", Recipe("gptq", group_size=128, sym=True), replace(MIXTRAL, heads=8, kv_heads=8))
    for ranks in (2, 4):
        monkeypatch.setattr(versions, "ranks_of_an_expert", lambda r=ranks: r)
        assert not why(packed, caplog)
    packed, _ = write(tmp_path / "b", Recipe("gptq", group_size=128, sym=True), replace(MIXTRAL, inner=384))
    monkeypatch.setattr(versions, "ranks_of_an_expert", lambda: 8)
    assert "128 and 48 rows in groups of 128" in why(packed, caplog)


def test_mixed_experts_are_taken_if_the_user_lets_them_be_made_plain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip = ("experts.1.w1", "experts.1.w2", "experts.1.w3")
    packed, _ = write(tmp_path, Recipe("gptq", group_size=64, sym=True, skip=skip), MIXTRAL)
    assert not why(packed, caplog)
    monkeypatch.setenv("W4PLUGIN_MIXED_EXPERTS", "dequantize")
    assert "not all experts of a layer are packed" in why(packed, caplog)


def test_mixtral_under_the_names_of_transformers_5(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = write(tmp_path, Recipe("gptq", group_size=64, sym=True), MIXTRAL)
    file, words = packed / "model.safetensors", {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    tensors = {
        ".".join(words.get(part, part) for part in name.replace("block_sparse_moe", "mlp").split(".")): t
        for name, t in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    assert "reads its experts under other names" in why(packed, caplog)


def test_b3_act_order_that_the_config_denies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = write(tmp_path, Recipe("gptq", sym=True, act_order="each"), TINY)
    edit_config(packed, quantization_config__desc_act=False)
    assert "act-order" in why(packed, caplog)


def test_zero_points_that_the_config_denies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = write(tmp_path, Recipe("gptq"), TINY)
    edit_config(packed, quantization_config__sym=True)
    assert "zero points are not" in why(packed, caplog)


def test_awq_without_zero_points(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = write(tmp_path, Recipe("awq", sym=True), TINY)
    edit_config(packed, quantization_config__zero_point=False)
    file = packed / "model.safetensors"
    tensors = {name: t for name, t in load_file(file).items() if not name.endswith("qzeros")}
    save_file(tensors, file, {"format": "pt"})
    assert "uninitialised" in why(packed, caplog)


def test_skip_list_that_hits_packed_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = write(tmp_path, Recipe("awq"), TINY)
    edit_config(packed, quantization_config__modules_to_not_convert=["gate"])
    assert "modules_to_not_convert" in why(packed, caplog)


def test_include_list_that_omits_packed_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = write(tmp_path, Recipe("gptq", sym=True), TINY)
    edit_config(packed, quantization_config__modules_in_block_to_quantize=[["mlp.gate_proj", "mlp.up_proj"]])
    assert "modules_in_block_to_quantize" in why(packed, caplog)


def test_row_shard_that_cuts_a_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = write(tmp_path, Recipe("gptq", group_size=128, sym=True), TINY)
    assert not ask(packed)
    monkeypatch.setattr(versions, "tensor_parallel_size", lambda: 2)
    assert "no multiple of its groups of 128" in why(packed, caplog)


def test_on_the_hub_a_few_modules_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = write(tmp_path, Recipe("gptq", group_size=128, sym=True), replace(TINY, layers=4))
    inventory = Inventory.open(str(packed), None)
    read: list[str] = []
    original = inventory.tensor
    monkeypatch.setattr(inventory, "tensor", lambda name: read.append(name) or original(name))
    assert native.misreads(inventory.config, inventory) is None
    assert len(read) == 4 * 7 * 2
    read.clear()
    inventory.remote = True
    assert native.misreads(inventory.config, inventory) is None
    assert len(read) == 2 * native.SAMPLE


def test_tensor_parallel_size_is_found_where_vllm_is_asked() -> None:
    from vllm.engine.arg_utils import EngineArgs

    class Asking(EngineArgs):
        def create_model_config(self) -> Any:
            return versions.tensor_parallel_size(), versions.download_folder()

    assert (versions.tensor_parallel_size(), versions.download_folder()) == (1, None)
    arguments = Asking.__new__(Asking)
    arguments.tensor_parallel_size = 4
    arguments.download_dir = "somewhere"
    assert arguments.create_model_config() == (4, "somewhere")


def test_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    symmetric, _ = write(tmp_path / "a", Recipe("gptq", group_size=128, sym=True), TINY)
    asymmetric, plain = write(tmp_path / "b", Recipe("gptq"), TINY)
    monkeypatch.setenv(claim.VARIABLE, "never")
    assert not ask(asymmetric)
    assert ask(asymmetric, "w4plugin")
    monkeypatch.setenv(claim.VARIABLE, "all")
    assert ask(symmetric)
    assert not ask(symmetric, "auto_gptq")
    assert not ask(plain)
    monkeypatch.setenv(claim.VARIABLE, "some")
    with pytest.raises(UsageError, match=r"auto \| all \| never"):
        ask(symmetric)


@pytest.mark.parametrize("format_name", ["gptq", "awq", "auto-round", "compressed-tensors"])
def test_e13_the_users_flag_decides(format_name: str, tmp_path: Path) -> None:
    packed, _ = write(tmp_path, Recipe(format_name, group_size=32, sym=True), TINY)
    if format_name == "auto-round":  # what AutoRound writes for symmetric weights, and the one that vLLM reads
        edit_config(packed, quantization_config__packing_format="auto_round:auto_gptq")
    assert ask(packed, "w4plugin")
    assert not ask(packed)
    assert not ask(packed, "gptq_marlin")


@pytest.mark.parametrize("quant", [{"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 8}, {"quant_method": ""}])
def test_what_is_not_four_bits_is_left_alone(
    quant: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(claim.VARIABLE, "all")
    packed, _ = write(tmp_path, Recipe("gptq"), TINY)
    edit_config(packed, quantization_config=quant)
    assert not ask(packed)


def test_group_size_that_the_tensors_deny(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = write(tmp_path, Recipe("gptq", group_size=256, sym=True), replace(TINY, hidden=256))
    edit_config(packed, quantization_config__group_size=128)
    assert "its tensors hold groups of 256" in why(packed, caplog)


def test_cpu_without_kernels_leaves_nothing_to_vllm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "has_int4_kernels", lambda: False)
    packed, _ = write(tmp_path, Recipe("gptq", group_size=128, sym=True), TINY)
    assert "no INT4 kernels" in why(packed, caplog)


def test_files_that_cannot_be_served_are_left_to_vllm(tmp_path: Path) -> None:
    packed, _ = write(tmp_path, Recipe("gptq"), TINY)
    (packed / "model.safetensors").write_bytes(b"\0" * 100)
    assert not ask(packed)


def test_scales_of_another_dtype_are_read(tmp_path: Path) -> None:
    packed, _ = write(tmp_path, Recipe("gptq", scale_dtype=torch.bfloat16), TINY)
    assert ask(packed)
