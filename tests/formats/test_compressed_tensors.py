"""compressed-tensors pack-quantized (cases A12, E12; section 6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.formats.samples import census, checkpoint, ct_config, levels, pack_ct, read, same, tensor, truth
from w4plugin.errors import CorruptError, UnsupportedError


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16])
def test_unpacked_zero_points(dtype: torch.dtype) -> None:
    t = truth(1, N=24)
    signed = (tensor(t.z).to(torch.int16) - 8).T.contiguous().to(dtype)
    found = read({**pack_ct(t), "weight_zero_point": signed}, ct_config(t))
    same(found.weight, t)
    assert found.notes == ()


def test_a12_unsigned_zero_points_in_a_signed_field_are_reported() -> None:
    t = truth(2, N=24)
    found = read({**pack_ct(t), "weight_zero_point": tensor(t.z).T.contiguous().to(torch.int8)}, ct_config(t))
    same(found.weight, t)
    (note,) = found.notes
    assert note.level == "warning"
    assert "in a signed field" in note.text


@pytest.mark.parametrize("value", [16, -9, 100])
def test_a12_zero_points_in_neither_range(value: int) -> None:
    t = truth(3, N=24)
    zeros = torch.zeros(24, t.G, dtype=torch.int64)
    zeros[3, 1] = value
    with pytest.raises(CorruptError, match=f"zero points .*{value}"):
        read({**pack_ct(t), "weight_zero_point": zeros}, ct_config(t))


@pytest.mark.parametrize("actorder", ["static", "weight", True, None, "group", "dynamic"])
def test_e12_every_spelling_of_actorder_loads_trivial_tensors(actorder: Any) -> None:
    t = truth(4)
    found = read(pack_ct(t), ct_config(t, actorder=actorder))
    same(found.weight, t)
    assert found.notes == ()


@pytest.mark.parametrize("actorder", ["group", "dynamic", True])
def test_real_act_order(actorder: Any) -> None:
    t = truth(5, K=96, size=32, order="act")
    found = read(pack_ct(t, order=True), ct_config(t, actorder=actorder))
    same(found.weight, t)
    assert found.notes == ()
    denied = read(pack_ct(t, order=True), ct_config(t, actorder=None, desc_act=False))
    same(denied.weight, t)
    assert levels(denied) == ["conflict"]


@pytest.mark.parametrize("N", [1, 5, 8, 33])
@pytest.mark.parametrize("size", [16, -1])
def test_outputs_that_fill_no_word(N: int, size: int) -> None:
    t = truth(6, K=64, N=N, size=size)
    same(read(pack_ct(t), ct_config(t)).weight, t)


def test_inputs_that_fill_no_word_are_refused() -> None:
    t = truth(7, K=100, size=-1)
    assert pack_ct(t)["weight_packed"].shape[1] == 13
    with pytest.raises(UnsupportedError, match="K = 100"):
        read(pack_ct(t), ct_config(t))


def test_group_strategy_makes_k_exact_in_the_headers() -> None:
    t = truth(8, K=60, size=20)
    (module,) = census(checkpoint(layer=pack_ct(t)), ct_config(t)).modules
    assert (module.K, module.group_size) == (60, 20)


@pytest.mark.parametrize("shape", [[32, 65], [33, 64], [32, 56]])
def test_shape_that_contradicts_the_words(shape: list[int]) -> None:
    t = truth(9)
    with pytest.raises(CorruptError, match="weight_shape"):
        read({**pack_ct(t), "weight_shape": torch.tensor(shape)}, ct_config(t))


def test_missing_zero_points_of_an_asymmetric_layer() -> None:
    t = truth(10)
    tensors = pack_ct(t)
    del tensors["weight_zero_point"]
    with pytest.raises(CorruptError, match="weight_zero_point: got no zero points"):
        read(tensors, ct_config(t))


def test_zero_points_that_the_config_denies() -> None:
    t = truth(11)
    found = read(pack_ct(t), ct_config(t, symmetric=True))
    same(found.weight, t)
    assert levels(found) == ["conflict"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_keep_their_dtype(dtype: torch.dtype) -> None:
    t = truth(12, dtype=dtype)
    same(read(pack_ct(t), ct_config(t)).weight, t)


def test_experts_stacked_in_one_tensor() -> None:
    parts = [truth(seed, N=24) for seed in (13, 14, 15)]
    packed = [pack_ct(t) for t in parts]
    stacked = {name: torch.stack([p[name] for p in packed]) for name in packed[0]}
    for shape in (stacked["weight_shape"], torch.tensor([3, 24, 64])):
        found = read({**stacked, "weight_shape": shape}, ct_config(parts[0]))
        for i, t in enumerate(parts):
            same(found.weight.expert(i), t)


def test_eight_bits_are_another_width() -> None:
    t = truth(16, K=64, N=32, size=32)
    tensors = {
        "weight_packed": torch.zeros(32, 16, dtype=torch.int32),
        "weight_scale": torch.ones(32, 2).half(),
        "weight_shape": torch.tensor([32, 64]),
    }
    for config in (ct_config(t, num_bits=8, symmetric=True), ct_config(t, symmetric=True)):
        found = census(checkpoint(layer=tensors), config)
        assert [(m.bits, m.K) for m in found.other_width] == [(8, 64)]


def test_missing_scale_is_named() -> None:
    t = truth(17)
    tensors = pack_ct(t)
    del tensors["weight_scale"]
    with pytest.raises(CorruptError, match=r"layer\.weight_scale: got no such tensor"):
        census(checkpoint(layer=tensors), ct_config(t))
