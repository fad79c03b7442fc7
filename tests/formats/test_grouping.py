"""Groups and g_idx: what the tensors spell wins over the config (cases B and C)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.formats.samples import (
    awq_config,
    ct_config,
    gptq_config,
    levels,
    pack_awq,
    pack_ct,
    pack_gptq,
    read,
    same,
    tensor,
    truth,
)
from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats import RowShard
from w4plugin.tensor import W4Tensor


def cut(tensors: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    """A row shard as a host hands it over: all scales, global group numbers."""
    shard = {**tensors, "qweight": tensors["qweight"][first // 8 : last // 8]}
    return {**shard, "g_idx": tensors["g_idx"][first:last]} if "g_idx" in tensors else shard


@pytest.mark.parametrize("order", ["act", "free", "sequential"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_b1_row_shards_of_act_order_use_global_groups(order: str, ranks: int) -> None:
    t = truth(1, K=256, N=16, size=32, order=order, lowest=1)
    tensors, config = pack_gptq(t), gptq_config(t)
    x = torch.randn(3, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = read(tensors, config).weight.dequantize(torch.float64)
    total = torch.zeros(3, 16, dtype=torch.float64)
    rows = 256 // ranks
    for first in range(0, 256, rows):
        part = read(cut(tensors, first, first + rows), config, RowShard(first, 256), tensors).weight
        assert torch.equal(part.dequantize(torch.float64), whole[first : first + rows])
        total += x[:, first : first + rows] @ part.dequantize(torch.float64)
    assert torch.allclose(total, x @ whole, rtol=0, atol=1e-12)


def test_b3_tensor_wins_over_desc_act_false() -> None:
    t = truth(2, K=128, size=32, order="act", lowest=1)
    found = read(pack_gptq(t), {**gptq_config(t), "desc_act": False})
    same(found.weight, t)
    (note,) = found.notes
    assert note.level == "conflict"
    assert "real act-order" in note.text


def test_desc_act_true_with_static_groups_is_an_ordinary_layer() -> None:
    t = truth(3, K=128, size=32, lowest=1)
    found = read(pack_gptq(t), {**gptq_config(t), "desc_act": True, "static_groups": True})
    assert found.weight.g_idx is None
    same(found.weight, t)
    assert found.notes == ()


def test_all_zero_index_is_a_placeholder() -> None:
    t = truth(4, K=128, size=32, lowest=1)
    found = read({**pack_gptq(t), "g_idx": torch.zeros(128, dtype=torch.int32)}, gptq_config(t))
    assert found.weight.g_idx is None
    same(found.weight, t)
    assert levels(found) == ["warning"]


def test_negative_group_numbers_count_from_the_end() -> None:
    t = truth(5, K=64, size=16, order="act", lowest=1)
    index = tensor(t.g).clone()
    index[index >= 2] -= 4
    found = read({**pack_gptq(t), "g_idx": index}, gptq_config(t))
    same(found.weight, t)
    assert levels(found) == ["warning"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.int16])
def test_index_of_another_dtype_with_whole_numbers(dtype: torch.dtype) -> None:
    t = truth(6, K=64, size=16, order="act", lowest=1)
    same(read({**pack_gptq(t), "g_idx": tensor(t.g).to(dtype)}, gptq_config(t)).weight, t)


@pytest.mark.parametrize("value", [4, -5, 2**31, 10**12])
def test_group_number_out_of_range(value: int) -> None:
    t = truth(7, K=64, size=16, order="act", lowest=1)
    index = tensor(t.g).long()
    index[3] = value
    with pytest.raises(CorruptError, match=r"g_idx.*wanted 0\.\.3"):
        read({**pack_gptq(t), "g_idx": index}, gptq_config(t))


@pytest.mark.parametrize("shape", [(), (1,), (63,), (64, 1), (2, 32)])
def test_index_of_another_shape(shape: tuple[int, ...]) -> None:
    t = truth(28, K=64, size=16, order="act", lowest=1)
    with pytest.raises(CorruptError, match="g_idx"):
        read({**pack_gptq(t), "g_idx": torch.zeros(shape, dtype=torch.int32)}, gptq_config(t), None, pack_gptq(t))


def test_fractions_in_the_index() -> None:
    t = truth(8, K=64, size=16, order="act", lowest=1)
    with pytest.raises(CorruptError, match="fractions"):
        read({**pack_gptq(t), "g_idx": tensor(t.g).float() + 0.5}, gptq_config(t))


def test_unequal_groups_keep_their_index() -> None:
    t = truth(9, K=64, size=16, order="free", lowest=1)
    found = read(pack_gptq(t), gptq_config(t))
    assert found.weight.g_idx is not None
    same(found.weight, t)


@pytest.mark.parametrize(("first", "last"), [(0, 48), (48, 96), (16, 24), (40, 96)])
def test_c1_shard_that_cuts_a_group(first: int, last: int) -> None:
    t = truth(10, K=96, N=16, size=32, lowest=1)
    whole = read(pack_gptq(t), gptq_config(t)).weight
    for tensors in (pack_gptq(t), pack_gptq(t, g_idx=False)):
        part = read(cut(tensors, first, last), gptq_config(t), RowShard(first, 96), tensors).weight
        assert torch.equal(part.dequantize(), whole.dequantize()[first:last])
        assert -(-last // 32) - first // 32 == part.G
    awq = {**pack_awq(t), "qweight": pack_awq(t)["qweight"][first:last]}
    same_rows = read(awq, awq_config(t), RowShard(first, 96)).weight
    assert torch.equal(same_rows.dequantize(), whole.dequantize()[first:last])


def test_c1_shard_with_scales_already_cut() -> None:
    t = truth(11, K=128, N=16, size=32, lowest=1)
    tensors = cut(pack_gptq(t), 64, 128)
    tensors |= {name: tensors[name][2:] for name in ("scales", "qzeros")}
    part = read(tensors, gptq_config(t), RowShard(64, 128)).weight
    assert part.g_idx is None
    assert torch.equal(part.dequantize(), read(pack_gptq(t), gptq_config(t)).weight.dequantize()[64:])


def test_shard_outside_the_layer() -> None:
    t = truth(12, K=64, size=32, lowest=1)
    with pytest.raises(CorruptError, match="a shard inside the layer"):
        read(pack_gptq(t), gptq_config(t), RowShard(8, 64))


def test_act_order_shard_whose_scales_were_cut_is_refused() -> None:
    t = truth(13, K=128, size=32, order="act", lowest=1)
    tensors = cut(pack_gptq(t), 64, 128)
    tensors |= {name: tensors[name][2:] for name in ("scales", "qzeros")}
    with pytest.raises(CorruptError, match="groups"):
        read(tensors, gptq_config(t), RowShard(64, 128))


def test_c2_short_last_group() -> None:
    t = truth(14, K=192, size=128, lowest=1)
    for tensors in (pack_gptq(t), pack_gptq(t, g_idx=False)):
        found = read(tensors, gptq_config(t)).weight
        assert (found.G, found.group_size) == (2, 128)
        same(found, t)
        assert found.groups()[127:129].tolist() == [0, 1]


def test_c2_index_tells_the_size_when_no_config_does() -> None:
    t = truth(15, K=192, size=128, lowest=1)
    found = read(pack_gptq(t), None)
    same(found.weight, t)
    assert found.weight.group_size == 128


@pytest.mark.parametrize("desc_act", [True, False])
def test_c7_one_group_with_and_without_act_order(desc_act: bool) -> None:
    t = truth(16, K=72, size=-1, lowest=1)
    config = {**gptq_config(t), "desc_act": desc_act}
    assert config["group_size"] == -1
    for tensors in (pack_gptq(t), pack_gptq(t, g_idx=False)):
        found = read(tensors, config)
        assert (found.weight.G, found.weight.group_size) == (1, 72)
        same(found.weight, t)
        assert found.notes == ()


def test_c9_tensors_win_over_a_wrong_group_size() -> None:
    t = truth(17, K=512, size=-1, lowest=1)
    found = read(pack_gptq(t), {**gptq_config(t), "group_size": 128})
    same(found.weight, t)
    assert found.weight.group_size == 512
    (note,) = found.notes
    assert note.level == "conflict"
    assert "128" in note.text
    assert "512" in note.text


def test_c9_no_size_fits_and_no_index_helps() -> None:
    t = truth(18, K=80, size=32, lowest=1)
    with pytest.raises(UnsupportedError, match="K = 80 in 3 groups while the config says group_size 16"):
        read(pack_gptq(t, g_idx=False), {**gptq_config(t), "group_size": 16})


def test_c9_index_beats_config_and_shapes() -> None:
    t = truth(19, K=96, size=48, lowest=1)
    found = read(pack_gptq(t), {**gptq_config(t), "group_size": 64})  # ceil(96 / 64) is 2, too
    same(found.weight, t)
    assert found.weight.group_size == 48
    assert levels(found) == ["conflict"]


def test_c13_index_longer_than_the_weight() -> None:
    t = truth(20, K=80, N=32, size=16, sym=True)
    tensors = pack_gptq(t)
    with pytest.raises(CorruptError, match="80 entries"):
        read({**tensors, "qweight": tensors["qweight"][:8]}, gptq_config(t))


def test_uninitialised_index_of_compressed_tensors() -> None:
    t = truth(21, K=64, size=16)
    index = tensor(t.g).clone()
    index[5] = -1
    for unset in (index, torch.full((64,), -1, dtype=torch.int32)):
        found = read({**pack_ct(t), "weight_g_idx": unset}, ct_config(t))
        assert found.weight.g_idx is None
        same(found.weight, t)


def test_b7_parts_of_a_fused_layer_with_different_orders() -> None:
    parts = [
        read(pack_gptq(t), gptq_config(t)).weight
        for t in (truth(seed, K=64, N=8, size=16, order="act", lowest=1) for seed in (22, 23))
    ]
    with pytest.raises(UnsupportedError, match="different g_idx"):
        W4Tensor.cat_n(parts)
    t = truth(24, K=64, N=8, size=16, order="act", lowest=1)
    both = W4Tensor.cat_n([read(pack_gptq(t), gptq_config(t)).weight] * 2)
    assert torch.equal(both.dequantize(), torch.cat([both.dequantize()[:, :8]] * 2, 1))
    assert np.array_equal(both.groups().numpy(), t.g)
