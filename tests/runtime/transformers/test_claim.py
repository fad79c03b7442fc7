"""Plain from_pretrained: what register() takes, and what stays the host's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    AutoQuantizationConfig,
)
from transformers.utils.quantization_config import AwqConfig, BitsAndBytesConfig, CompressedTensorsConfig, GPTQConfig

import w4plugin
import w4plugin.runtime.transformers as w4
from tests.runtime.transformers.models import TINY, agree
from w4plugin.errors import UsageError
from w4plugin.runtime.transformers.claim import NEEDS, claims

OURS = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "meta": {"packer": "w4plugin"}}
THEIRS: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq", "bits": 4, "group_size": 128},
    {"quant_method": "awq", "bits": 4, "version": "gemm"},
    {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"},
)
NEVER: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq", "bits": 8, "group_size": 128},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}},
    {"quant_method": "fp8"},
)


def test_repacked_checkpoints_load_as_ever(tmp_path: Path, plain_model: Any) -> None:
    w4plugin.repack(TINY, tmp_path / "m")
    w4.register()
    agree(AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="float32"), plain_model)


def test_any_checkpoint_after_the_explicit_claim(plain_model: Any) -> None:
    w4.register("all", backend="plain")
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")
    assert {m.backend for m in model.modules() if isinstance(m, w4.W4Linear)} == {"plain"}
    agree(model, plain_model)


def test_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # the host can serve everything
    assert claims(OURS, "auto")
    assert not any(claims(config, "auto") for config in THEIRS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # the host can serve nothing of it
    assert all(claims(config, "auto") for config in (OURS, *THEIRS))
    for config in (OURS, *THEIRS):
        assert claims(config, "all")
        assert not claims(config, "never")
    assert not any(claims(config, policy) for config in NEVER for policy in ("auto", "all", "never"))


def test_what_is_not_claimed_is_the_hosts() -> None:
    w4.register("all")
    config = AutoQuantizationConfig.from_dict({"quant_method": "gptq", "bits": 8, "group_size": 128})
    assert type(config) is GPTQConfig
    assert config.bits == 8
    assert type(AutoQuantizationConfig.from_dict({"load_in_4bit": True})) is BitsAndBytesConfig
    assert type(AutoQuantizationConfig.from_dict(dict(OURS))) is w4.W4QuantizationConfig


def test_never_gives_everything_back() -> None:
    w4.register("all")
    w4.register("auto")
    w4.register("never")
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["gptq"] is GPTQConfig
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["awq"] is AwqConfig
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] is CompressedTensorsConfig
    assert set(NEEDS) <= set(AUTO_QUANTIZATION_CONFIG_MAPPING)
    assert AUTO_QUANTIZER_MAPPING["w4plugin"] is w4.W4Quantizer


def test_unknown_policy() -> None:
    with pytest.raises(UsageError, match=r"auto \| all \| never"):
        w4.register("some")
