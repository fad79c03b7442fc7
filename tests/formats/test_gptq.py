"""GPTQ shapes: padding, dropped words, odd word types, bias (cases C and D, section 3.6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.formats.samples import census, checkpoint, gptq_config, levels, pack_gptq, read, same, truth
from w4plugin.errors import CorruptError, UnsupportedError


def columns(t: Any, N: int) -> Any:
    """``t`` with zero columns up to N."""
    return torch.nn.functional.pad(t, (0, N - t.shape[-1]))


def test_c4_zero_words_dropped_by_autogptq() -> None:
    sym, asym = truth(1, N=48, sym=True), truth(1, N=48, lowest=1)
    for t in (sym, asym):
        same(read(pack_gptq(t), gptq_config(t)).weight, t)  # GPTQModel writes all six words
    short = {**pack_gptq(sym), "qzeros": pack_gptq(sym)["qzeros"][:, :4]}
    found = read(short, gptq_config(sym))
    same(found.weight, sym)
    assert levels(found) == ["warning"]
    short = {**pack_gptq(asym), "qzeros": pack_gptq(asym)["qzeros"][:, :4]}
    with pytest.raises(CorruptError, match="16 columns missing"):
        read(short, gptq_config(asym))


def test_c4_fewer_than_32_columns_leave_no_zero_word_at_all() -> None:
    t = truth(2, N=16, sym=True)
    found = read({**pack_gptq(t), "qzeros": torch.empty((t.G, 0), dtype=torch.int32)}, gptq_config(t))
    same(found.weight, t)


@pytest.mark.parametrize("N", [1, 7, 12, 33, 63])
def test_columns_that_fill_no_word(N: int) -> None:
    t = truth(3, N=N, lowest=1)
    assert pack_gptq(t)["qzeros"].shape[1] == -(-N // 8)
    same(read(pack_gptq(t), gptq_config(t)).weight, t)


def test_padded_columns_are_cropped_to_the_scales() -> None:
    t = truth(4, N=48, lowest=1)
    tensors = pack_gptq(t)
    tensors["qweight"], tensors["qzeros"] = columns(tensors["qweight"], 64), columns(tensors["qzeros"], 8)
    same(read(tensors, gptq_config(t)).weight, t)
    tensors["qweight"][0, 50] = 1
    with pytest.raises(CorruptError, match=r"columns 48\.\.63, which have no scale"):
        read(tensors, gptq_config(t))


def test_padded_scales_are_cropped_to_the_bias() -> None:
    t = truth(5, N=48, lowest=1)
    bias = torch.arange(48.0).half()
    tensors = {**pack_gptq(t), "bias": bias}
    tensors["qweight"], tensors["qzeros"] = columns(tensors["qweight"], 64), columns(tensors["qzeros"], 8)
    tensors["scales"] = columns(tensors["scales"], 64)
    found = read(tensors, gptq_config(t))
    same(found.weight, t)
    assert found.bias is bias
    tensors["scales"][0, 60] = 1
    with pytest.raises(CorruptError, match="48 columns, as bias has"):
        read(tensors, gptq_config(t))


@pytest.mark.parametrize("word", [np.int8, np.int16, np.int64])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_words_of_other_sizes(word: Any, version: str) -> None:
    t = truth(6, K=64, N=32, lowest=1)
    tensors = pack_gptq(t, offset=version == "gptq", dtype=word)
    config = gptq_config(t, version, pack_dtype=np.dtype(word).name)
    same(read(tensors, config).weight, t)
    del config["pack_dtype"]  # shapes tell it as well
    same(read(tensors, config).weight, t)


def test_borrows_stop_at_the_packers_own_words() -> None:
    t = truth(7, K=32, N=16, size=32)
    t.z[0] = (5, 0, 0, 0, 3, 0, 7, 0, 0, 0, 0, 0, 9, 1, 2, 0)
    tensors = pack_gptq(t, offset=0, dtype=np.int16)
    minus = tensors["qzeros"].numpy().view(np.uint16) - np.uint16(0x1111)
    tensors["qzeros"] = torch.from_numpy(minus.view(np.int16))
    config = gptq_config(t, pack_dtype="int16", meta={"quantizer": ["gptqmodel:5.0"]})
    same(read(tensors, config).weight, t)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32, torch.float64])
def test_32_bit_words_in_another_dtype(dtype: torch.dtype) -> None:
    t = truth(8, K=64, N=32, lowest=1)
    tensors = pack_gptq(t)
    for name in ("qweight", "qzeros"):
        unsigned = tensors[name].to(torch.int64) & 0xFFFFFFFF
        tensors[name] = tensors[name].view(torch.uint32) if dtype == torch.uint32 else unsigned.to(dtype)
    if dtype == torch.float64:  # zero points stay integers: float ones are AWQ's products
        tensors["qzeros"] = tensors["qzeros"].to(torch.int64)
    same(read(tensors, gptq_config(t)).weight, t)


@pytest.mark.parametrize("value", [2**32, -(2**31) - 1, 2**40])
def test_values_beyond_32_bits_in_a_wide_word(value: int) -> None:
    t = truth(9, K=64, N=32, lowest=1)
    tensors = pack_gptq(t)
    tensors["qweight"] = tensors["qweight"].to(torch.int64)
    tensors["qweight"][0, 0] = value
    with pytest.raises(CorruptError, match="beyond 32 bits"):
        read(tensors, gptq_config(t))


def test_fractions_in_float_words() -> None:
    t = truth(10, K=64, N=32, lowest=1)
    tensors = pack_gptq(t)
    tensors["qweight"] = tensors["qweight"].to(torch.float64) + 0.5
    with pytest.raises(CorruptError, match="no whole numbers"):
        read(tensors, gptq_config(t))


def test_narrow_words_that_fill_no_int32() -> None:
    t = truth(11, K=64, N=32, lowest=1)
    tensors = pack_gptq(t, dtype=np.int8)
    with pytest.raises(UnsupportedError, match="multiple of 4"):
        read({**tensors, "qweight": tensors["qweight"][:30], "g_idx": tensors["g_idx"][:60]}, gptq_config(t))


@pytest.mark.parametrize("keys", [("format",), ("checkpoint_format",), ("format", "checkpoint_format"), ()])
@pytest.mark.parametrize(("label", "offset"), [("gptq", 1), ("gptq_v2", 0), ("gptq_p", 0)])
def test_label_under_either_key(keys: tuple[str, ...], label: str, offset: int) -> None:
    """optimum writes one of the keys, GPTQModel both; planar (gptq_p) is v2 at four bits; without a label it is v1."""
    t = truth(30, lowest=1)
    config = {key: value for key, value in gptq_config(t).items() if key != "checkpoint_format"}
    found = read(pack_gptq(t, offset=offset if keys else 1), {**config, **dict.fromkeys(keys, label)})
    same(found.weight, t)
    assert found.zero_rule == ("true" if keys and not offset else "minus-one")


@pytest.mark.parametrize(
    "more", [{"act_group_aware": True}, {"meta": {"act_group_aware": True, "static_groups": False}}]
)
def test_groups_that_knew_the_activations_are_ordinary(more: dict[str, Any]) -> None:
    """GPTQModel permutes whole groups and back before it packs: nothing of it is left in the file."""
    t = truth(31, K=128, lowest=1)
    found = read(pack_gptq(t), gptq_config(t, **more))
    same(found.weight, t)
    assert found.weight.g_idx is None
    assert found.notes == ()


def test_runtime_buffers_and_keys_of_kernels_are_no_part_of_a_layer() -> None:
    t = truth(32, lowest=1)
    config = gptq_config(t, use_exllama=True, exllama_config={"version": 2}, max_input_length=4096, use_cuda_fp16=True)
    same(read(pack_gptq(t), config).weight, t)


def test_d1_zero_bias_is_reported_and_not_dropped() -> None:
    t = truth(12, lowest=1)
    for bias, zero in ((torch.zeros(t.N), True), (torch.full((t.N,), 0.5), False)):
        found = read({**pack_gptq(t), "bias": bias.half()}, gptq_config(t))
        assert found.bias is not None
        assert torch.equal(found.bias, bias.half())
        assert found.zero_bias is zero
    assert read(pack_gptq(t), gptq_config(t)).bias is None


def test_bias_of_another_length() -> None:
    t = truth(13, lowest=1)
    with pytest.raises(CorruptError, match=r"down_proj\.bias"):
        read({**pack_gptq(t), "bias": torch.zeros(t.N + 1)}, gptq_config(t))


@pytest.mark.parametrize("flag", [True, None])
def test_d3_quantised_head(flag: bool | None) -> None:
    t = truth(14, N=40, lowest=1)
    config = gptq_config(t) if flag is None else gptq_config(t, lm_head=flag)
    found = census(checkpoint(lm_head=pack_gptq(t)), config)
    (module,) = found.modules
    assert (module.name, module.K, module.N) == ("lm_head", 64, 40)
    assert [n for n in found.notes if n.level == "conflict"] == []


def test_d3_head_that_the_config_denies() -> None:
    t = truth(15, lowest=1)
    found = census(checkpoint(lm_head=pack_gptq(t)), gptq_config(t, lm_head=False))
    assert [m.name for m in found.modules] == ["lm_head"]
    (note,) = [n for n in found.notes if n.level == "conflict"]
    assert note.where == "lm_head"


def test_d4_plain_head() -> None:
    t = truth(16, lowest=1)
    tensors = checkpoint(model__layers__0__mlp__up_proj=pack_gptq(t)) | {"lm_head.weight": torch.zeros(8, 4).half()}
    found = census(tensors, gptq_config(t, lm_head=True))
    assert found.plain == ("lm_head.weight",)
    assert found.plain_layers == ("lm_head",)
    (note,) = [n for n in found.notes if n.level == "conflict"]
    assert "lm_head: true" in note.text


def test_e9_unfilled_layer_is_reported() -> None:
    t = truth(17, lowest=1)
    tensors = {name: torch.zeros_like(x) for name, x in pack_gptq(t).items()}
    found = read(tensors, gptq_config(t))
    assert found.unfilled
    assert any("never filled" in n.text for n in found.notes)
    assert not read(pack_gptq(t), gptq_config(t)).unfilled


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_not_finite(value: float) -> None:
    t = truth(18, lowest=1)
    tensors = pack_gptq(t)
    tensors["scales"][1, 3] = value
    with pytest.raises(CorruptError, match=r"down_proj\.scales: got 1 values"):
        read(tensors, gptq_config(t))


def test_g3_zero_and_subnormal_scales() -> None:
    t = truth(19, lowest=1)
    t.s[0] = 0
    t.s[1, ::2] = 5.96e-8
    weight = read(pack_gptq(t), gptq_config(t)).weight
    same(weight, t)
    plain = weight.dequantize()
    assert bool(torch.isfinite(plain).all())
    assert not bool(plain[:32].any())
    assert bool(plain[32:].any())


def test_negative_scales_are_legal() -> None:
    t = truth(20, lowest=1)
    t.s.neg_()
    same(read(pack_gptq(t), gptq_config(t)).weight, t)


def test_float32_scales_beyond_float16_are_kept() -> None:
    t = truth(21, dtype=torch.float32, lowest=1)
    t.s[0, 0], t.s[1, 1] = 1e6, 1e-20
    same(read(pack_gptq(t), gptq_config(t)).weight, t)


def test_one_scale_for_all_is_not_gptq() -> None:
    t = truth(22, lowest=1)
    with pytest.raises(UnsupportedError, match="known 4-bit format"):
        census(checkpoint(layer={**pack_gptq(t), "scales": torch.ones(1).half()}), gptq_config(t))


@pytest.mark.parametrize("missing", ["scales", "qzeros"])
def test_a_missing_sibling_is_named(missing: str) -> None:
    t = truth(23, lowest=1)
    tensors = pack_gptq(t)
    del tensors[missing]
    with pytest.raises(CorruptError, match=rf"layer\.{missing}: got no such tensor"):
        census(checkpoint(layer=tensors), gptq_config(t))


def test_zero_words_that_fit_no_width() -> None:
    t = truth(24, N=32, lowest=1)
    tensors = pack_gptq(t)
    tensors["qzeros"] = torch.zeros((t.G, 9), dtype=torch.int32)
    with pytest.raises(CorruptError, match="9 words a row for 32 columns"):
        census(checkpoint(layer=tensors), gptq_config(t))


def test_experts_stacked_in_one_tensor() -> None:
    parts = [truth(seed, lowest=1) for seed in (25, 26, 27)]
    packed = [pack_gptq(t) for t in parts]
    stacked = {name: torch.stack([p[name] for p in packed]) for name in packed[0]}
    found = read(stacked, gptq_config(parts[0]))
    assert found.weight.experts == 3
    for i, t in enumerate(parts):
        same(found.weight.expert(i), t)
