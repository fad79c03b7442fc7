"""How single rules match names, and which of several wins."""

from __future__ import annotations

from typing import Any

import pytest

from w4plugin import module_rules
from w4plugin.module_rules import Expected

GENERAL = Expected(None, 4, 128, True, False)


def expect(name: str, **config: Any) -> Expected:
    return module_rules.parse(config).expect(name, GENERAL)


def test_no_rules_leave_the_general_values() -> None:
    assert expect("model.layers.0.up") == GENERAL


@pytest.mark.parametrize(
    ("pattern", "name", "hit"),
    [
        (r"model\.layers\.1\..*", "model.layers.1.up", True),
        (r"layers\.1\..*", "model.layers.1.up", False),  # anchored at the start
        (r"model\.layers\.1", "model.layers.11.up", True),  # and not at the end
        (r".*\.1\..*", "model.layers.1.up", True),
        (r"model\.model\.layers\.1", "model.layers.1.up", False),  # names are never renamed to make a rule fit
    ],
)
def test_dynamic_is_a_match_at_the_start(pattern: str, name: str, hit: bool) -> None:
    for prefix, quantized in (("-:", False), ("+:", True), ("", True)):
        found = expect(name, dynamic={prefix + pattern: {}})
        assert found.quantized is (quantized if hit else None)
        assert found.rule == (f"dynamic: {prefix}{pattern}" if hit else "")


def test_first_dynamic_rule_in_file_order_wins() -> None:
    rules = {r".*up": {"bits": 8}, r"-:.*": {}, r".*down": {"bits": 3}}
    assert expect("a.up", dynamic=rules).bits == 8
    assert expect("a.down", dynamic=rules).quantized is False


def test_overrides_touch_only_what_they_state() -> None:
    found = expect("a.up", dynamic={".*": {"group_size": 32, "desc_act": True, "damp_percent": 0.1}})
    assert (found.bits, found.group_size, found.sym, found.desc_act) == (4, 32, True, True)


def test_modules_to_not_convert_is_a_substring() -> None:
    for listed in (["gate"], "gate", [["gate"]]):
        assert expect("model.layers.0.mlp.gate_proj", modules_to_not_convert=listed).quantized is False
        assert expect("model.layers.0.mlp.up_proj", modules_to_not_convert=listed).quantized is None
    assert expect("model.layers.0.mlp.up_proj", modules_to_not_convert=None).quantized is None


@pytest.mark.parametrize(
    ("entry", "name", "hit"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("lm_head", "lm_head_2", False),
        ("re:.*head", "model.lm_head", True),
        ("re:head", "model.lm_head", False),
    ],
)
def test_ignore_is_a_name_or_a_regex(entry: str, name: str, hit: bool) -> None:
    assert (expect(name, ignore=[entry]).quantized is False) is hit


def test_extra_config_is_a_name_a_regex_or_a_suffix() -> None:
    extra = {"layers.0.up": {"bits": 8}, r"layers\.\d+\.down": {"bits": 3}, "layers.1.up": {"bits": 32}}
    assert expect("model.layers.0.up", extra_config=extra).bits == 8
    assert expect("model.layers.7.down", extra_config=extra).bits == 3
    assert expect("model.layers.1.up", extra_config=extra).quantized is False
    assert expect("model.layers.10.up", extra_config=extra) == GENERAL


def test_include_list_is_relative_to_a_block() -> None:
    listed = {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}
    assert expect("model.layers.0.mlp.up_proj", **listed).quantized is True
    assert expect("model.layers.0.mlp.down_proj", **listed).quantized is False
    assert expect("lm_head", **listed).quantized is None
    assert expect("model.layers.0.mlp.down_proj", modules_in_block_to_quantize=[]).quantized is None


@pytest.mark.parametrize(
    "blocks", ["model.layers,visual.blocks", ["model.layers", "visual.blocks"], [["model.layers"], ["visual.blocks"]]]
)
@pytest.mark.parametrize("key", ["block_name_to_quantize", "to_quant_block_names"])
def test_block_names(key: str, blocks: Any) -> None:
    assert expect("model.layers.0.up", **{key: blocks}).quantized is True
    assert expect("visual.blocks.0.up", **{key: blocks}).quantized is True
    assert expect("model.layers_2.0.up", **{key: blocks}).quantized is False


def test_a_rule_for_the_module_beats_the_list_of_blocks() -> None:
    config = {"block_name_to_quantize": "model.layers", "extra_config": {"lm_head": {"bits": 4}}}
    assert expect("lm_head", **config).quantized is True
    assert expect("other", **config).quantized is False


def test_head_flag() -> None:
    assert expect("lm_head", lm_head=True).quantized is True
    assert expect("model.lm_head", lm_head=False).quantized is False
    assert expect("model.layers.0.up", lm_head=False).quantized is None
    both = {"lm_head": True, "dynamic": {"lm_head": {"bits": 8, "group_size": 32}}}
    assert (expect("lm_head", **both).bits, expect("lm_head", **both).group_size) == (8, 32)


def test_config_groups_prefer_names_to_regexes_to_classes() -> None:
    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": {"num_bits": bits}}

    groups = {"a": group(4, "Linear"), "b": group(8, r"re:.*up"), "c": group(3, "model.layers.0.up")}
    assert expect("model.layers.0.up", config_groups=groups).bits == 3
    assert expect("model.layers.1.up", config_groups=groups).bits == 8
    assert expect("model.layers.1.down", config_groups=groups).bits == 4
    assert expect("model.layers.1.down", config_groups=groups).quantized is None


@pytest.mark.parametrize(
    ("actorder", "desc_act"),
    [("group", True), ("dynamic", True), (True, True), ("static", False), ("weight", False), (None, None)],
)
def test_actorder(actorder: Any, desc_act: bool | None) -> None:
    assert module_rules.overrides("w", {"actorder": actorder})["desc_act"] is desc_act
