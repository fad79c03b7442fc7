"""Zero points: what is stored, what it means, and what was lost (section 3 of the format census; cases A)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.samples import (
    borrowed,
    census,
    gptq_config,
    levels,
    pack_gptq,
    read,
    same,
    smeared,
    tensor,
    truth,
    words,
)
from w4plugin.errors import CorruptError
from w4plugin.formats import zero_points
from w4plugin.formats.zero_points import Claim

GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}


def filled(value: int, t: object) -> torch.Tensor:
    return torch.full((t.G, t.N // 8), value, dtype=torch.int64).to(torch.int32)  # type: ignore[attr-defined]


def test_a1_v2_stores_the_zero_point_itself() -> None:
    t = truth(1, K=64, N=16, size=32, lowest=1)
    v1 = read(pack_gptq(t, offset=1), gptq_config(t, "gptq"))
    v2 = read(pack_gptq(t, offset=0), gptq_config(t, "gptq_v2"))
    same(v1.weight, t)
    same(v2.weight, t)
    assert torch.equal(v1.weight.dequantize(), v2.weight.dequantize())
    assert (v1.zero_rule, v2.zero_rule) == ("minus-one", "true")


def test_a2_symmetric_values_decide_against_the_label() -> None:
    t = truth(2, K=64, N=16, size=32, sym=True)
    eight, seven = {**pack_gptq(t), "qzeros": filled(-2004318072, t)}, {**pack_gptq(t), "qzeros": filled(0x77777777, t)}
    assert eight["qzeros"][0, 0].item() & 0xFFFFFFFF == 0x88888888
    mislabelled = read(eight, gptq_config(t, "gptq"))
    same(mislabelled.weight, t)
    assert mislabelled.weight.symmetric
    assert mislabelled.zero_rule == "true"
    (note,) = mislabelled.notes
    assert note.level == "conflict"
    assert "every stored zero point is 8" in note.text
    honest = read(seven, gptq_config(t, "gptq"))
    same(honest.weight, t)
    assert honest.notes == ()
    other_way = read(seven, gptq_config(t, "gptq_v2"))
    same(other_way.weight, t)
    assert levels(other_way) == ["conflict"]


def test_a2_symmetric_claim_with_other_values_is_a_conflict_and_read_as_stored() -> None:
    t = truth(3, lowest=1)
    found = read(pack_gptq(t), {**gptq_config(t), "sym": True})
    same(found.weight, t)
    assert levels(found) == ["conflict"]


def test_a3_intended_zero_smears_over_the_word() -> None:
    t = truth(4, K=32, N=8, size=32)
    z = np.array([[5, 5, 0, 5, 5, 5, 5, 5]], np.uint8)
    stored = smeared(z)
    assert stored.item() & 0xFFFFFFFF == 0xFFFFFF44
    found = read({**pack_gptq(t), "qzeros": stored}, gptq_config(t))
    same(found.weight, t, z=[[5, 5, 0, 0, 0, 0, 0, 0]])
    assert int(found.weight.full_zeros().max()) <= 15
    (note,) = found.notes
    assert note.level == "warning"
    assert "5 zero points were lost by the quantiser in 1 words" in note.text


def test_a3_zero_in_the_last_lane_loses_nothing() -> None:
    t = truth(5, K=32, N=8, size=32)
    z = np.array([[5, 5, 3, 5, 5, 5, 5, 0]], np.uint8)
    found = read({**pack_gptq(t), "qzeros": smeared(z)}, gptq_config(t))
    same(found.weight, t, z=z)
    assert levels(found) == ["info"]


@pytest.mark.parametrize("config", [GPTQMODEL, {"provider": "auto-round"}, {"autoround_version": "0.4"}], ids=str)
def test_a3_borrowing_producers_are_decoded_with_the_carry(config: dict[str, object]) -> None:
    t = truth(6, K=64, N=32, size=32)
    t.z[0, :10] = (0, 0, 5, 0, 15, 1, 0, 0, 0, 1)
    found = read({**pack_gptq(t), "qzeros": borrowed(t.z)}, gptq_config(t, **config))
    same(found.weight, t)
    assert found.zero_rule == "minus-one-carry"
    assert levels(found) == ["info"]


def test_a3_unknown_producer_is_decoded_by_nibble_and_reported_as_ambiguous() -> None:
    t = truth(7, K=32, N=8, size=32)
    z = np.array([[5, 5, 0, 5, 5, 5, 5, 5]], np.uint8)
    found = read({**pack_gptq(t), "qzeros": tensor(words((z.astype(int) - 1) & 15, 1))}, gptq_config(t))
    same(found.weight, t, z=z)
    (note,) = found.notes
    assert note.level == "warning"
    assert note.text.startswith("ambiguous: 1 stored values of 15")


@pytest.mark.parametrize(
    ("config", "offset"),
    [
        ({"packing_format": "auto_round"}, 0),
        ({"packing_format": "auto_round:exllamav2"}, 0),
        ({"packing_format": "auto_round:gptqmodel"}, 0),
        ({"packing_format": "auto_round:auto_gptq"}, 1),
        ({"packing_format": "auto_round:gptq:exllamav2"}, 1),
        ({"backend": "auto_round:exllamav2"}, 0),
        ({"backend": "autoround:gptq:exllamav2"}, 1),
        ({"backend": "auto", "packing_format": "auto_round"}, 0),
        ({"quant_method": "intel/auto-round", "packing_format": "auto_round"}, 0),
        ({"quant_method": "intel/auto-round", "backend": "auto_round:gptq"}, 1),
    ],
    ids=str,
)
def test_a7_offset_follows_the_packing_format(config: dict[str, str], offset: int) -> None:
    t = truth(8, lowest=1)
    stated = {"quant_method": "auto-round", "bits": 4, "group_size": t.size, "sym": False, **config}
    found = read(pack_gptq(t, offset=offset, g_idx=False), stated)
    same(found.weight, t)


def test_a9_empty_zero_points_of_a_symmetric_layer() -> None:
    t = truth(9, sym=True)
    for empty in (torch.empty(0, dtype=torch.int32), torch.empty((t.G, 0), dtype=torch.int32)):
        found = read({**pack_gptq(t), "qzeros": empty}, gptq_config(t))
        same(found.weight, t)
        assert found.zero_rule == "symmetric"
    with pytest.raises(CorruptError, match="32 columns missing"):
        read({**pack_gptq(t), "qzeros": torch.empty(0, dtype=torch.int32)}, {**gptq_config(t), "sym": False})


def test_empty_zero_points_without_any_config_are_refused() -> None:
    t = truth(10, sym=True)
    with pytest.raises(CorruptError, match="no zero points and no config"):
        read({**pack_gptq(t), "qzeros": torch.empty(0, dtype=torch.int32)}, None)


def test_missing_zero_points_name_the_tensor() -> None:
    t = truth(11)
    tensors = pack_gptq(t)
    del tensors["qzeros"]
    with pytest.raises(CorruptError, match=r"down_proj.qzeros: got no such tensor"):
        census({f"model.layers.0.mlp.down_proj.{k}": v for k, v in tensors.items()}, gptq_config(t))


def test_all_middle_zero_points_are_symmetric_whatever_the_config_says() -> None:
    t = truth(12, sym=True)
    found = read(pack_gptq(t), {**gptq_config(t), "sym": False})
    assert found.weight.zeros is None
    same(found.weight, t)
    assert found.notes == ()


def test_a_constant_zero_of_nine_in_an_asymmetric_module_stays_nine() -> None:
    t = truth(13)
    t.z[:] = 9
    found = read(pack_gptq(t), gptq_config(t))
    same(found.weight, t)


zeros = st.lists(st.integers(0, 15), min_size=1, max_size=40)


@given(zeros)
def test_carry_undoes_the_borrow_for_every_zero(values: list[int]) -> None:
    z = np.array([values], np.uint8)
    padded = np.concatenate([z, np.ones((1, -z.shape[1] % 8), np.uint8)], 1)
    stored = borrowed(padded)
    nibbles = torch.tensor([[(w >> (4 * i)) & 15 for w in stored[0].tolist() for i in range(8)]], dtype=torch.uint8)
    found = zero_points.carried(nibbles, 8)
    assert found[0, : z.shape[1]].tolist() == values


@given(zeros, st.booleans(), st.sampled_from([True, False, None]), st.booleans())
def test_no_claim_ever_yields_sixteen_or_changes_a_safe_value(
    values: list[int], true: bool, sym: bool | None, borrows: bool
) -> None:
    stored = torch.tensor([values], dtype=torch.uint8)
    found = zero_points.decode("m", stored, len(values), 8, Claim(true, sym, borrows, "label"))
    decoded = torch.full_like(stored, 8) if found.zeros is None else found.zeros
    assert int(decoded.max()) <= 15
    constant = len(set(values)) == 1 and values[0] in (7, 8) and sym is not False
    if not constant and 15 not in values:
        assert decoded[0].tolist() == [v if true else v + 1 for v in values]
    if 15 in values and not true and found.rule == "minus-one":
        assert [n.level for n in found.notes if n.level != "conflict"] in (["warning"], ["info"])
