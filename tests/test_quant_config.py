"""Every spelling and place of a quantisation config (section 9; cases E)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w4plugin.errors import CorruptError, W4Error
from w4plugin.note import Note
from w4plugin.quant_config import METADATA, QuantConfig


def parse(**config: Any) -> QuantConfig:
    return QuantConfig.from_dict(config)


@pytest.mark.parametrize("key", ["bits", "w_bit", "wbits"])
@pytest.mark.parametrize("value", [4, "4", 4.0])
def test_bits(key: str, value: Any) -> None:
    assert parse(quant_method="gptq", **{key: value}).bits == 4


@pytest.mark.parametrize("key", ["group_size", "q_group_size", "groupsize"])
def test_group_size(key: str) -> None:
    assert parse(quant_method="gptq", **{key: 64}).group_size == 64
    assert parse(quant_method="gptq", **{key: -1}).group_size == -1


@pytest.mark.parametrize("value", [0, -2, "many", 3.5, True, [1]])
def test_group_size_that_makes_no_sense(value: Any) -> None:
    with pytest.raises(CorruptError, match="group_size"):
        parse(quant_method="gptq", group_size=value)


@pytest.mark.parametrize(
    ("config", "sym"),
    [
        ({"quant_method": "gptq", "sym": False}, False),
        ({"quant_method": "gptq", "symmetric": True}, True),
        ({"quant_method": "gptq"}, True),
        ({"quant_method": "awq"}, False),
        ({"quant_method": "awq", "zero_point": True}, False),
        ({"quant_method": "awq", "zero_point": False}, True),
        ({"quant_method": "auto-round"}, True),
        ({"quant_method": "compressed-tensors"}, None),
    ],
    ids=str,
)
def test_symmetric(config: dict[str, Any], sym: bool | None) -> None:
    assert QuantConfig.from_dict(config).sym is sym


@pytest.mark.parametrize(
    ("stated", "method"),
    [
        ("GPTQ", "gptq"), ("gptq_marlin", "gptq"), ("Marlin", "gptq"), ("AWQ", "awq"), ("awq_marlin", "awq"),
        ("auto-round", "auto-round"), ("intel/auto-round", "auto-round"), ("auto_round", "auto-round"),
        ("compressed_tensors", "compressed-tensors"), ("something-new", "something-new"),
    ],
)  # fmt: skip
def test_method(stated: str, method: str) -> None:
    assert parse(quant_method=stated).method == method
    assert parse(method=stated).method == method


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq"),
        ({"bits": 4, "damp_percent": 0.01, "desc_act": False}, "gptq"),
        ({"wbits": 4, "groupsize": 128}, "gptq"),
        ({"packing_format": "auto_round"}, "auto-round"),
        ({"config_groups": {}}, "compressed-tensors"),
        ({"bits": 4}, None),
    ],
    ids=str,
)
def test_method_that_is_not_stated(config: dict[str, Any], method: str | None) -> None:
    assert QuantConfig.from_dict(config).method == method


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "gptq", "format": "gptq_v2"}, "gptq_v2"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_v2", "format": "gptq_v2"}, "gptq_v2"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_p"}, "gptq_v2"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "marlin"),
        ({"quant_method": "gptq", "is_marlin_format": False}, "gptq"),
        ({"quant_method": "marlin"}, "marlin"),
        ({"quant_method": "awq"}, "gemm"),
        ({"quant_method": "awq", "version": "GEMV_FAST"}, "gemv_fast"),
        ({"quant_method": "awq", "version": "Marlin"}, "marlin"),
        ({"quant_method": "awq", "version": "exllama"}, "gemm"),
        ({"quant_method": "awq", "backend": "llm-awq", "version": "gemm"}, "gemm"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "llm-awq"),
        ({"quant_method": "awq", "checkpoint_format": "gemv", "format": "gemv"}, "gemv"),
        ({"quant_method": "compressed-tensors", "version": "0.19.0"}, "pack-quantized"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:awq"}, "gemm"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, "gemm"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, "pack-quantized"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:fp8"}, "fp8"),
        ({"quant_method": "auto-round", "config_groups": {"g": {}}, "format": "pack-quantized"}, "pack-quantized"),
    ],
    ids=str,
)  # fmt: skip
def test_layout(config: dict[str, Any], layout: str) -> None:
    assert QuantConfig.from_dict(config).layout == layout


@pytest.mark.parametrize(
    ("config", "producer", "borrows"),
    [
        ({"meta": {"quantizer": ["gptqmodel:7.7.0"]}}, "gptqmodel:7.7.0", True),
        ({"meta": {"quantizer": "intel/auto-round:0.4.1"}}, "intel/auto-round:0.4.1", True),
        ({"autoround_version": "0.15.1"}, "auto-round:0.15.1", True),
        ({"provider": "auto-round"}, "auto-round", True),
        ({"meta": {"quantizer": ["optimum:1.2", "auto_gptq:0.8"]}}, "optimum:1.2, auto_gptq:0.8", False),
        ({}, None, False),
    ],
    ids=str,
)
def test_producer(config: dict[str, Any], producer: str | None, borrows: bool) -> None:
    found = QuantConfig.from_dict({"quant_method": "gptq", **config})
    assert (found.producer, found.borrows) == (producer, borrows)


def test_act_order_keys_may_stand_in_meta() -> None:
    assert parse(quant_method="gptq", meta={"desc_act": True}).desc_act is True
    assert parse(quant_method="gptq", desc_act=False, meta={"desc_act": True}).desc_act is False


RUNTIME_KEYS: dict[str, Any] = {
    "damp_percent": 0.01, "damp_auto_increment": 0.0025, "true_sequential": True, "dataset": "c4", "tokenizer": None,
    "batch_size": 1, "model_seqlen": 2048, "pad_token_id": None, "module_name_preceding_first_block": None,
    "cache_block_outputs": True, "exllama_config": {"version": 1}, "use_exllama": True, "disable_exllama": False,
    "use_cuda_fp16": True, "max_input_length": None, "do_fuse": False, "fuse_max_seq_len": None,
    "modules_to_fuse": None, "iters": 200, "lr": None, "minmax_lr": 0.005, "nsamples": 128, "seqlen": 2048,
    "scale_dtype": "torch.float16", "amp": True, "mse": 0.0, "v2": False, "v2_alpha": 0.25, "uri": "https://x",
    "offload_to_disk": True, "offload_to_disk_path": "/x", "act_group_aware": True, "hyb_act": False,
    "static_groups": False, "model_name_or_path": "x", "gptqmodel_only_key": [1],
}  # fmt: skip


@pytest.mark.parametrize("method", ["gptq", "awq", "auto-round"])
def test_keys_of_kernels_and_of_calibration_change_nothing(method: str) -> None:
    config = {"quant_method": method, "bits": 4, "group_size": 128}
    one, other = parse(**config), parse(**config, **RUNTIME_KEYS)
    for name in ("method", "layout", "bits", "group_size", "sym", "desc_act", "rules", "producer", "pack_dtype"):
        assert getattr(one, name) == getattr(other, name), name
    assert (one.notes, one.stated) == (other.notes, other.stated)
    for key, value in RUNTIME_KEYS.items():
        assert parse(**config, meta={key: value}).notes == one.notes


def test_defaults_are_noted_and_not_stated() -> None:
    config = parse(quant_method="gptq", bits=4, group_size=128)
    assert config.stated == {"method", "bits", "group_size"}
    assert [n.where for n in config.notes] == ["layout", "sym"]
    assert {n.level for n in config.notes} == {"info"}


def test_no_config() -> None:
    for config in (QuantConfig(), QuantConfig.from_files({}), QuantConfig.from_files({"config.json": {"a": 1}})):
        assert (config.method, config.layout, config.bits, config.sym, config.notes) == (None, None, None, None, ())


CHANNEL = {"num_bits": 4, "symmetric": True, "strategy": "channel", "group_size": None}

CT = {
    "quant_method": "compressed-tensors",
    "config_groups": {"g": {"targets": ["Linear"], "weights": CHANNEL}},
    "ignore": ["lm_head", r"re:.*gate$"],
}


def test_compressed_tensors() -> None:
    config = QuantConfig.from_dict(CT)
    assert (config.bits, config.group_size, config.sym) == (4, -1, True)
    assert config.for_module("model.layers.0.up").group_size == -1
    assert config.for_module("lm_head").quantized is False
    assert config.for_module("model.layers.0.mlp.gate").quantized is False
    assert config.for_module("model.layers.0.mlp.gate_proj").quantized is None


@pytest.mark.parametrize("outer", [None, "text_config", "llm_config"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_places_inside_config_json(outer: str | None, key: str) -> None:
    inner = {key: {"quant_method": "gptq", "bits": 4, "sym": False}}
    config = QuantConfig.from_files({"config.json": {outer: inner} if outer else inner})
    assert (config.method, config.sym) == ("gptq", False)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "quantization_config.json"])
def test_e1_any_file_alone(name: str) -> None:
    config = QuantConfig.from_files({name: {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}})
    assert (config.method, config.layout, config.bits, config.group_size) == ("awq", "gemm", 4, 128)


def test_conflicts_are_noted_and_config_json_wins() -> None:
    config = QuantConfig.from_files(
        {
            "quantize_config.json": {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {"-:a": {}}},
            "config.json": {
                "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {}}
            },
        }
    )
    assert config.group_size == 128
    assert config.rules.rules == ()
    conflicts = [n for n in config.notes if n.level == "conflict"]
    text = "group_size is 64 here and 128 in config.json: quantization_config; the latter is used"
    assert conflicts[0] == Note("conflict", "quantize_config.json", text)
    assert "dynamic differs" in conflicts[1].text


def test_a_field_that_one_file_leaves_out_is_no_conflict() -> None:
    config = QuantConfig.from_files(
        {
            "config.json": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantize_config.json": {"bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        }
    )
    assert (config.group_size, config.desc_act, config.sym) == (32, True, False)
    assert [n.level for n in config.notes if n.level != "info"] == []


def test_metadata_of_autogptq() -> None:
    metadata = {
        "format": "pt",
        "auto_gptq_version": "0.7.1",
        "gptq_bits": "4",
        "gptq_group_size": "-1",
        "gptq_desc_act": "False",
        "gptq_is_marlin_format": "False",
        "gptq_damp_percent": "0.01",
        "gptq_checkpoint_format": "gptq_v2",
        "gptq_quant_method": "gptq",
    }
    config = QuantConfig.from_files({}, metadata)
    assert (config.method, config.layout, config.bits, config.group_size) == ("gptq", "gptq_v2", 4, -1)
    assert config.desc_act is False
    assert config.producer == "auto_gptq:0.7.1"
    other = QuantConfig.from_files(
        {"config.json": {"quantization_config": {"bits": 8, "quant_method": "gptq"}}}, metadata
    )
    assert other.bits == 8
    assert [n.where for n in other.notes if n.level == "conflict"] == [METADATA]


def test_autoround_extra_config() -> None:
    config = parse(
        quant_method="auto-round",
        packing_format="auto_round",
        bits=4,
        group_size=128,
        extra_config={
            "model.layers.0.down": {"bits": 8},
            r".*\.1\.up": {"group_size": 32},
            "layers.2.up": {"bits": 16},
        },
        block_name_to_quantize="model.layers,model.others",
    )
    assert config.for_module("model.layers.0.down").bits == 8
    assert config.for_module("model.layers.1.up").group_size == 32
    assert config.for_module("model.layers.2.up").quantized is False
    assert config.for_module("model.layers.3.up").quantized is True
    assert config.for_module("model.others.3.up").quantized is True
    assert config.for_module("lm_head").quantized is False


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": 3},
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "gptq", "bits": True},
        {"quant_method": "gptq", "sym": "maybe"},
        {"quant_method": "gptq", "checkpoint_format": 2},
        {"quant_method": "gptq", "dynamic": ["-:a"]},
        {"quant_method": "gptq", "dynamic": {"a": 3}},
        {"quant_method": "awq", "modules_to_not_convert": {"a": 1}},
        {"quant_method": "auto-round", "extra_config": {"a": None}},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": 4}}},
    ],
    ids=str,
)
def test_values_of_the_wrong_kind_are_one_clear_error(config: dict[str, Any]) -> None:
    with pytest.raises(CorruptError) as error:
        QuantConfig.from_dict(config)
    assert error.value.where
    assert error.value.wanted


@pytest.mark.parametrize("content", [[], "gptq", 4, None])
def test_a_file_that_is_no_table(content: Any) -> None:
    for name in ("config.json", "quantize_config.json"):
        with pytest.raises(CorruptError, match=name):
            QuantConfig.from_files({name: content})


KEYS = [
    "quant_method",
    "method",
    "bits",
    "group_size",
    "sym",
    "zero_point",
    "desc_act",
    "format",
    "checkpoint_format",
    "version",
    "backend",
    "packing_format",
    "meta",
    "dynamic",
    "extra_config",
    "modules_to_not_convert",
    "ignore",
    "config_groups",
    "modules_in_block_to_quantize",
    "block_name_to_quantize",
    "lm_head",
    "is_marlin_format",
    "pack_dtype",
    "autoround_version",
    "provider",
    "quantization",
]

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["gptq", "awq", "marlin"]),
)
tables = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(KEYS), tables, max_size=6), st.text(max_size=12))
def test_any_json_is_a_config_or_one_of_our_errors(config: dict[str, Any], name: str) -> None:
    try:
        found = QuantConfig.from_files({"config.json": {"quantization_config": config}, "quant_config.json": config})
        expected = found.for_module(name)
    except W4Error:
        return
    assert found.bits is None or type(found.bits) is int
    assert expected.group_size is None or expected.group_size == -1 or expected.group_size >= 1
    assert (found.method is None) or (found.method == found.method.lower())
