"""AutoRound's exports: what its method, packing format and older keys make of the same weight (section 5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.formats.samples import (
    borrowed,
    census,
    checkpoint,
    ct_config,
    pack_awq,
    pack_ct,
    pack_gptq,
    read,
    same,
    truth,
)
from w4plugin.errors import UnsupportedError

METHODS = ("auto-round", "intel/auto-round")


def stated(t: Any, method: str = "auto-round", **more: Any) -> dict[str, Any]:
    return {"quant_method": method, "bits": 4, "group_size": t.stated, "sym": t.sym, "data_type": "int", **more}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("key", ["packing_format", "backend"])
@pytest.mark.parametrize("packing", ["auto_round:auto_awq", "auto_round:awq"])
def test_awq_tensors(packing: str, key: str, method: str) -> None:
    t = truth(1, N=32)
    found = read(pack_awq(t), stated(t, method, **{key: packing}))
    same(found.weight, t)
    assert found.notes == ()


@pytest.mark.parametrize("sym", [True, False])
def test_compressed_tensors(sym: bool) -> None:
    t = truth(2, sym=sym)
    config = {**ct_config(t), **stated(t, packing_format="auto_round:llm_compressor")}
    same(read(pack_ct(t), config).weight, t)
    exported = ct_config(t)  # the same tensors under compressed-tensors' own config
    same(read(pack_ct(t), {**exported, "provider": "auto-round"}).weight, t)


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptq:exllamav2"])
def test_v1_without_g_idx_and_with_borrows(packing: str) -> None:
    t = truth(3)
    assert int(t.z.min()) == 0
    tensors = {**pack_gptq(t, g_idx=False), "qzeros": borrowed(t.z)}
    found = read(tensors, stated(t, packing_format=packing))
    same(found.weight, t)
    assert found.zero_rule == "minus-one-carry"


@pytest.mark.parametrize("packing", ["auto_round", "auto_round:exllamav2", "auto_round:gptqmodel"])
def test_true_zeros(packing: str) -> None:
    t = truth(4)
    for g_idx in (False, True):  # only auto_round:gptqmodel writes one, and it is trivial
        found = read(pack_gptq(t, offset=0, g_idx=g_idx), stated(t, packing_format=packing))
        same(found.weight, t)
        assert found.zero_rule == "true"


def test_gptq_export() -> None:
    t = truth(5)
    tensors = {**pack_gptq(t), "qzeros": borrowed(t.z)}
    config = {"quant_method": "gptq", "provider": "auto-round", "bits": 4, "group_size": t.stated, "sym": False}
    same(read(tensors, {**config, "desc_act": False}).weight, t)


@pytest.mark.parametrize("sym", [True, False])
def test_awq_export_calls_symmetric_zero_point_false_and_stores_eights(sym: bool) -> None:
    t = truth(6, sym=sym)
    config = {"quant_method": "awq", "provider": "auto-round", "version": "gemm", "bits": 4, "group_size": t.stated}
    found = read(pack_awq(t), {**config, "zero_point": not sym})
    same(found.weight, t)
    assert found.weight.symmetric is sym
    assert found.notes == ()


def test_rules_of_a_gptq_export_agree_with_its_tensors() -> None:
    """Skipped layers become ``-:`` rules, mixed widths ``+:`` ones."""
    t = truth(7, lowest=1)
    eight = {
        "qweight": torch.zeros(16, 32, dtype=torch.int32),
        "qzeros": torch.zeros(t.G, 8, dtype=torch.int32),
        "scales": t.s.clone(),
        "g_idx": torch.from_numpy(t.g),
    }
    tensors = checkpoint(model__layers__0__up=pack_gptq(t), model__layers__0__down=eight)
    tensors["model.layers.1.up.weight"] = torch.zeros(32, 64).half()
    rules = {r"-:model\.layers\.1\.up": {}, r"+:model\.layers\.0\.down": {"bits": 8, "group_size": 32}}
    config = {"quant_method": "gptq", "provider": "auto-round", **stated(t)} | {"quant_method": "gptq"}
    found = census(tensors, {**config, "dynamic": rules})
    assert [m.name for m in found.modules] == ["model.layers.0.up"]
    assert [(m.name, m.bits) for m in found.other_width] == [("model.layers.0.down", 8)]
    assert [n for n in found.notes if n.level != "info"] == []


def test_a_head_is_named_in_extra_config_alone() -> None:
    t = truth(8, N=40, lowest=1)
    tensors = checkpoint(
        lm_head=pack_gptq(t, offset=0, g_idx=False), model__layers__0__up=pack_gptq(t, offset=0, g_idx=False)
    )
    config = stated(
        t,
        packing_format="auto_round",
        block_name_to_quantize="model.layers",
        extra_config={"lm_head": {"bits": 4, "group_size": t.size}},
    )
    found = census(tensors, config)
    assert [m.name for m in found.modules] == ["lm_head", "model.layers.0.up"]
    assert [n for n in found.notes if n.level != "info"] == []


@pytest.mark.parametrize("data_type", ["mx_fp4", "nv_fp4", "fp8", "mx_int", "float"])
def test_types_other_than_int_are_refused(data_type: str) -> None:
    t = truth(9, lowest=1)
    with pytest.raises(UnsupportedError, match=f"AutoRound weights of type {data_type}"):
        census(checkpoint(layer=pack_gptq(t)), {**stated(t), "data_type": data_type})
