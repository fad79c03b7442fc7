"""Which checkpoints SGLang gives to the plugin, asked through SGLang's own model config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from sglang.srt.plugins import load_plugins

from w4plugin.errors import UsageError
from w4plugin.runtime.sglang import host, register
from w4plugin.runtime.sglang.config import W4Config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "torch_dtype": "float16",
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.fixture(autouse=True)
def plugins() -> None:
    load_plugins()


def method(folder: Path, quant: dict[str, Any] | None, quantization: str | None = None) -> str | None:
    """SGLang's decision about a checkpoint with this config; a new folder for each, since SGLang remembers by path."""
    folder = folder / str(len(list(folder.iterdir())))
    folder.mkdir()
    content = CONFIG if quant is None else {**CONFIG, "quantization_config": quant}
    (folder / "config.json").write_text(json.dumps(content))
    found: str | None = ModelConfig(str(folder), quantization=quantization).quantization
    return found


def test_the_entry_point_registers_once() -> None:
    assert next(iter(QUANTIZATION_METHODS)) == "w4plugin"
    assert get_quantization_config("w4plugin") is W4Config
    before = list(QUANTIZATION_METHODS)
    register()
    assert list(QUANTIZATION_METHODS) == before
    assert QUANTIZATION_CHOICES.count("w4plugin") == 1


def test_what_sglang_refuses_is_taken(tmp_path: Path) -> None:
    assert method(tmp_path, GPTQ) == "w4plugin"
    assert "refuses it" in (host.refuses(GPTQ) or "")


def test_what_sglang_serves_stays_its_own(tmp_path: Path) -> None:
    assert host.refuses(AWQ) is None
    assert method(tmp_path, AWQ) == "awq"
    assert method(tmp_path, FP8) == "fp8"
    assert method(tmp_path, None) is None


def test_the_flag_and_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert method(tmp_path, AWQ, "w4plugin") == "w4plugin"
    monkeypatch.setenv("W4PLUGIN_CLAIM", "all")
    assert method(tmp_path, AWQ) == "w4plugin"
    assert method(tmp_path, FP8) == "fp8"
    assert method(tmp_path, AWQ, "awq") == "awq"
    monkeypatch.setenv("W4PLUGIN_CLAIM", "never")
    with pytest.raises(ValueError, match="gptq"):
        method(tmp_path, GPTQ)
    monkeypatch.setenv("W4PLUGIN_CLAIM", "some")
    with pytest.raises(UsageError, match=r"auto \| all \| never"):
        method(tmp_path, AWQ)


def test_another_version_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    host.warn_if_untested()
    assert not caplog.records
    monkeypatch.setattr(host, "version", lambda: "0.6.1.post1")
    host.warn_if_untested()
    assert "this is 0.6.1.post1" in caplog.text
