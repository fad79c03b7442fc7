"""Which modules are packed: tensors against config (cases D to F, section 12)."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.formats.samples import (
    awq_config,
    census,
    checkpoint,
    ct_config,
    gptq_config,
    pack_awq,
    pack_ct,
    pack_gptq,
    truth,
)
from w4plugin.errors import CorruptError, UnsupportedError, W4Error
from w4plugin.formats import Census, TensorHeader, find_modules
from w4plugin.note import Note
from w4plugin.quant_config import QuantConfig

T = truth(0, lowest=1)
PACKED = pack_gptq(T)


def plain(*names: str) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.zeros(16, 8).half() for name in names}


def conflicts(found: Census) -> list[Note]:
    return [n for n in found.notes if n.level == "conflict"]


def test_e1_config_json_alone_is_enough() -> None:
    config = QuantConfig.from_files({"config.json": {"quantization_config": gptq_config(T)}})
    found = find_modules(
        {f"m.{k}": TensorHeader("I32", tuple(v.shape)) for k, v in PACKED.items() if k != "scales"}
        | {"m.scales": TensorHeader("F16", tuple(PACKED["scales"].shape))},
        config,
    )
    assert [(m.name, m.group_size) for m in found.modules] == [("m", 32)]


def test_e2_no_config_at_all_is_inferred_and_reported() -> None:
    found = census(checkpoint(model__layers__0__mlp__up_proj=PACKED), None)
    (module,) = found.modules
    assert (module.format, module.bits, module.K, module.N, module.group_size) == ("gptq", 4, 64, 32, 32)
    assert any(n.level == "warning" and "inferred from tensors: gptq" in n.text for n in found.notes)


def test_e6_incomplete_include_list() -> None:
    config = gptq_config(T, modules_in_block_to_quantize=[["mlp.up_proj"]])
    found = census(
        checkpoint(model__layers__0__mlp__up_proj=PACKED, model__layers__0__self_attn__q_proj=PACKED), config
    )
    assert len(found.modules) == 2
    (note,) = conflicts(found)
    assert note.where == "model.layers.0.self_attn.q_proj"
    assert "modules_in_block_to_quantize: not listed" in note.text


def test_e9_rule_that_skips_a_packed_module() -> None:
    config = gptq_config(T, dynamic={r"-:.*\.1\..*": {}})
    found = census(checkpoint(model__layers__0__up=PACKED, model__layers__1__up=PACKED), config)
    assert len(found.modules) == 2
    (note,) = conflicts(found)
    assert note.where == "model.layers.1.up"
    assert r"dynamic: -:.*\.1\..*" in note.text


def test_e9_rules_are_anchored_at_the_start() -> None:
    config = gptq_config(T, dynamic={r"-:layers\.1": {}})
    found = census(checkpoint(model__layers__1__up=PACKED), config)
    assert conflicts(found) == []
    (note,) = [n for n in found.notes if n.where == "dynamic"]
    assert "matches no module" in note.text


def test_f1_vision_tower_is_left_alone() -> None:
    tensors = checkpoint(model__language_model__layers__0__mlp__up_proj=PACKED)
    tensors |= {"visual.blocks.0.attn.qkv.weight": torch.zeros(24, 8).bfloat16(), "visual.norm.weight": torch.ones(8)}
    found = census(tensors, gptq_config(T))
    assert set(found.plain) == {"visual.blocks.0.attn.qkv.weight", "visual.norm.weight"}
    assert found.plain_layers == ("visual.blocks.0.attn.qkv",)
    assert [n for n in found.notes if n.level != "info"] == []


def test_f2_stale_names_are_reported() -> None:
    config = ct_config(T)
    config["ignore"] = ["lm_head", "old.visual.merger", r"re:.*old_gate$", "model.layers.0.router"]
    tensors = checkpoint(model__layers__0__up=pack_ct(T)) | plain("model.layers.0.router")
    found = census(tensors, config)
    (note,) = [n for n in found.notes if n.level != "info"]
    assert (note.where, note.level) == ("ignore", "warning")
    assert note.text == r"matches no module of this checkpoint: old.visual.merger, re:.*old_gate$"


def test_f7_router_beside_packed_experts_stays_plain() -> None:
    t = truth(1, N=16)
    experts = {
        f"model__layers__0__block_sparse_moe__experts__{e}__w{w}": pack_awq(t) for e in (0, 1) for w in (1, 2, 3)
    }
    tensors = checkpoint(**experts) | plain("model.layers.0.block_sparse_moe.gate")
    for skip in (None, ["gate"]):
        found = census(tensors, awq_config(t, modules_to_not_convert=skip))
        assert len(found.modules) == 6
        assert found.plain_layers == ("model.layers.0.block_sparse_moe.gate",)
        assert [n for n in found.notes if n.level != "info"] == []


def test_f7_skip_list_matches_substrings() -> None:
    t = truth(2, N=16)
    tensors = checkpoint(model__layers__0__mlp__gate_proj=pack_awq(t)) | plain("model.layers.0.mlp.gate")
    (note,) = conflicts(census(tensors, awq_config(t, modules_to_not_convert=["gate"])))
    assert note.where == "model.layers.0.mlp.gate_proj"


def test_f8_plain_expert_among_packed_ones_is_reported() -> None:
    tensors = checkpoint(model__layers__0__experts__0__up_proj=PACKED) | plain("model.layers.0.experts.1.up_proj")
    found = census(tensors, gptq_config(T))
    (note,) = [n for n in found.notes if n.level == "warning"]
    assert note.where == "model.layers.0.experts.1.up_proj"
    ruled = census(tensors, gptq_config(T, dynamic={r"-:.*experts\.1.*": {}}))
    assert [n for n in ruled.notes if n.level != "info"] == []


def test_rule_that_quantises_a_plain_layer() -> None:
    tensors = checkpoint(model__layers__0__up=PACKED) | plain("model.layers.0.down")
    found = census(tensors, gptq_config(T, dynamic={"+:.*down": {"bits": 8}}))
    (note,) = conflicts(found)
    assert note.where == "model.layers.0.down"


def test_rule_with_another_width_than_the_tensors() -> None:
    found = census(checkpoint(model__layers__0__up=PACKED), gptq_config(T, dynamic={"+:.*up": {"bits": 8}}))
    (note,) = conflicts(found)
    assert "says 8 bits (dynamic: +:.*up), the tensors hold 4" in note.text


@pytest.mark.parametrize(
    ("rules", "where", "text"),
    [
        ({"dynamic": {r"-:.*\.up$": {}}}, "model.layers.0.up", r"the config skips it (dynamic: -:.*\.up$)"),
        ({"modules_to_not_convert": ["layers.0.up"]}, "model.layers.0.up", "the config skips it"),
        ({"ignore": ["re:.*up"]}, "model.layers.0.up", "the config skips it (ignore: re:.*up)"),
        ({"extra_config": {"model.layers.0.up": {"bits": 16}}}, "model.layers.0.up", "the config skips it"),
        ({"extra_config": {"layers.0.up": {"bits": 8}}}, "model.layers.0.up", "the config says 8 bits"),
        ({"extra_config": {r".*\.down": {"bits": 4}}}, "model.layers.0.down", "the config quantises it"),
        ({"modules_in_block_to_quantize": [["down"]]}, "model.layers.0.up", "the config skips it"),
        ({"block_name_to_quantize": "model.blocks"}, "model.layers.0.up", "not listed), but it is packed"),
        ({"config_groups": {"g": {"targets": ["re:.*up"], "weights": {"num_bits": 8}}}}, "model.layers.0.up", "says 8"),
        ({"config_groups": {"g": {"targets": ["re:.*down"], "weights": {}}}}, "model.layers.0.down", "quantises it"),
        ({"lm_head": True}, "lm_head", "the config quantises it (lm_head: true)"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_every_kind_of_rule_is_compared_with_the_tensors(rules: dict[str, Any], where: str, text: str) -> None:
    tensors = checkpoint(model__layers__0__up=PACKED) | plain("model.layers.0.down", "lm_head")
    config = {k: v for k, v in gptq_config(T).items() if k != "bits"}
    found = census(tensors, {**config, "bits": 4, **rules})
    assert [m.name for m in found.modules] == ["model.layers.0.up"]
    told = [n for n in conflicts(found) if n.where == where]
    assert any(text in n.text for n in told), found.notes


def test_rules_give_a_module_its_own_group_size() -> None:
    t = truth(3, K=192, size=128, lowest=1)
    config = {**gptq_config(t, dynamic={r".*\.up$": {"group_size": 128}}), "group_size": 64}
    (module,) = census(checkpoint(model__layers__0__up=pack_gptq(t, g_idx=False)), config).modules
    assert module.group_size == 128


def test_config_that_promises_packed_modules_where_there_are_none() -> None:
    found = census(plain("model.layers.0.up"), gptq_config(T))
    assert found.modules == ()
    assert [n.text for n in found.notes if n.level == "warning"] == [
        "says gptq, but no module is packed; the tensors win"
    ]


@pytest.mark.parametrize(
    ("suffix", "dtype"), [("rotation", torch.float32), ("weight", torch.float16), ("input_scale", torch.bfloat16)]
)
def test_unknown_float_tensor_in_a_packed_module(suffix: str, dtype: torch.dtype) -> None:
    tensors = checkpoint(layer={**PACKED, suffix: torch.zeros(4, 4, dtype=dtype)})
    with pytest.raises(UnsupportedError, match=rf"layer\.{suffix}"):
        census(tensors, gptq_config(T))


def test_unknown_integer_tensor_is_carried_through() -> None:
    found = census(checkpoint(layer={**PACKED, "wf": torch.zeros(8, dtype=torch.int32)}), gptq_config(T))
    assert found.plain == ("layer.wf",)
    assert [n.where for n in found.notes if n.level == "warning"] == ["layer.wf"]


def test_activation_scales_are_no_weight() -> None:
    t = truth(4, N=16)
    tensors = checkpoint(model__layers__0__mlp__up_proj=pack_awq(t)) | {
        "model.layers.0.mlp.act.scales": torch.ones(16).half()
    }
    found = census(tensors, awq_config(t))
    assert found.plain == ("model.layers.0.mlp.act.scales",)
    assert any("scales of an activation" in n.text for n in found.notes)


def test_natural_order_and_ownership() -> None:
    names = [f"model__layers__{i}__up" for i in (10, 2, 0)]
    tensors = checkpoint(**{n: {**PACKED, "bias": torch.zeros(32)} for n in names}) | plain("model.embed_tokens")
    found = census(tensors, gptq_config(T))
    assert [m.name for m in found.modules] == ["model.layers.0.up", "model.layers.2.up", "model.layers.10.up"]
    owned = {full for m in found.modules for full in m.tensors.values()}
    assert owned | set(found.plain) == set(tensors)
    assert owned.isdisjoint(found.plain)
    assert found.modules[0].tensors["bias"] == "model.layers.0.up.bias"


def test_mixed_widths_are_told_by_shape() -> None:
    from tests.formats.samples import words

    eight = {
        **PACKED,
        "qweight": torch.zeros(16, 32, dtype=torch.int32),
        "qzeros": torch.zeros(2, 8, dtype=torch.int32),
    }
    three = {**PACKED, "qweight": torch.zeros(6, 32, dtype=torch.int32), "qzeros": torch.zeros(2, 3, dtype=torch.int32)}
    two = {**PACKED, "qweight": torch.zeros(4, 32, dtype=torch.int32), "qzeros": torch.zeros(2, 2, dtype=torch.int32)}
    assert words(T.q, 0).shape == (8, 32)
    tensors = checkpoint(a=PACKED, b=eight, c=three, d=two)
    for tell_by_index in (True, False):
        if not tell_by_index:
            tensors = {k: v for k, v in tensors.items() if not k.endswith("g_idx")}
        found = census(tensors, gptq_config(T))
        assert [m.name for m in found.modules] == ["a"]
        assert [(m.name, m.bits, m.K) for m in found.other_width] == [("b", 8, 64), ("c", 3, 64), ("d", 2, 64)]
        assert len(conflicts(found)) == 3


@pytest.mark.parametrize("rule", [{"dynamic": {"-:(": {}}}, {"ignore": ["re:["]}, {"extra_config": {"*": {"bits": 8}}}])
def test_invalid_regex_is_an_error_of_ours(rule: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match="invalid regular expression"):
        census(checkpoint(model__layers__0__up=PACKED), gptq_config(T, **rule))


def test_census_of_a_large_moe_takes_seconds_at_most() -> None:
    shapes = {k: TensorHeader("F16" if k == "scales" else "I32", tuple(v.shape)) for k, v in PACKED.items()}
    names = [
        f"model.layers.{i}.mlp.experts.{e}.{p}"
        for i in range(40)
        for e in range(128)
        for p in ("gate_proj", "up_proj", "down_proj")
    ]
    headers = {f"{n}.{suffix}": h for n in names for suffix, h in shapes.items()}
    listed = [f"mlp.experts.{e}.{p}" for e in range(128) for p in ("gate_proj", "up_proj", "down_proj")]
    config = gptq_config(
        T, modules_in_block_to_quantize=[listed], dynamic={rf"-:.*layers\.{i}\.mlp\.gate$": {} for i in range(40)}
    )
    start = time.process_time()
    found = find_modules(headers, QuantConfig.from_dict(config))
    assert len(found.modules) == 15360
    assert time.process_time() - start < 20


SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "bias", "B", "s", "weight_packed", "weight_scale", "weight_shape")
SUFFIXES += ("weight_zero_point", "scaled_zeros", "zeros", "weight", "workspace", "codes")
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 16, 32, 64, 128, 256]), max_size=3).map(tuple)
headers_of_a_module = st.dictionaries(
    st.sampled_from(SUFFIXES),
    st.builds(
        TensorHeader, st.sampled_from(["I32", "I16", "I64", "F16", "BF16", "F32", "U8", "F8_E4M3", "BOOL"]), shapes
    ),
    max_size=6,
)
configs = st.sampled_from([{}, gptq_config(T), awq_config(T), awq_config(T, "gemv"), ct_config(T)])


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b.c", ""]), headers_of_a_module, max_size=2), configs)
def test_any_headers_are_a_census_or_one_of_our_errors(
    modules: dict[str, dict[str, TensorHeader]], config: dict[str, Any]
) -> None:
    found = {f"{n}.{s}".lstrip("."): h for n, headers in modules.items() for s, h in headers.items()}
    try:
        seen = find_modules(found, QuantConfig.from_dict(config))
    except W4Error:
        return
    owned = [full for m in seen.modules + seen.other_width for full in m.tensors.values()]
    assert sorted([*owned, *seen.plain]) == sorted(found)
    for module in seen.modules:
        assert min(module.K, module.N) >= 1
        assert module.group_size is None or module.group_size >= 1
