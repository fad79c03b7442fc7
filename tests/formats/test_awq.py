"""AWQ in its four layouts (cases E4, E5, G6; section 4)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.formats.samples import (
    awq_config,
    census,
    checkpoint,
    gptq_config,
    levels,
    pack_awq,
    pack_ct,
    pack_fast,
    pack_gemv,
    pack_gptq,
    pack_marlin,
    pack_v0,
    read,
    same,
    truth,
)
from w4plugin import reference
from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.quant_config import QuantConfig


def test_the_test_word() -> None:
    t = truth(0, K=8, N=8, size=8)
    t.q[:] = np.arange(8)
    assert pack_awq(t)["qweight"][0, 0].item() == 0x75316420
    same(read(pack_awq(t), awq_config(t)).weight, t)


@pytest.mark.parametrize("version", ["GEMM", "gemm", "exllama", "ipex", None])
def test_versions_that_mean_gemm(version: str | None) -> None:
    t = truth(1, K=128, N=64, size=32)
    config = awq_config(t)
    config["version"] = version
    found = read(pack_awq(t), config)
    same(found.weight, t)
    assert found.notes == ()


def test_a6_true_zeros_of_zero_stay_zero() -> None:
    t = truth(2, K=64, N=16, size=32)
    t.z[np.random.default_rng(0).random(t.z.shape) < 0.2] = 0
    assert (t.z == 0).any()
    same(read(pack_awq(t), awq_config(t)).weight, t)


def test_zero_point_false_with_zero_points_full_of_eight() -> None:
    t = truth(3, sym=True)
    found = read(pack_awq(t), awq_config(t, zero_point=False))
    same(found.weight, t)
    assert found.weight.symmetric
    assert found.notes == ()


def test_zero_point_false_without_zero_points() -> None:
    t = truth(4, sym=True)
    tensors = pack_awq(t)
    del tensors["qzeros"]
    found = read(tensors, awq_config(t, zero_point=False))
    same(found.weight, t)
    assert levels(found) == ["info"]
    with pytest.raises(CorruptError, match=r"qzeros: got no such tensor"):
        read(tensors, awq_config(t, zero_point=True))


def test_zero_point_false_with_other_zero_points() -> None:
    t = truth(5)
    found = read(pack_awq(t), awq_config(t, zero_point=False))
    same(found.weight, t)
    assert levels(found) == ["conflict"]


def test_short_last_group_of_other_writers() -> None:
    t = truth(6, K=80, N=16, size=32)
    same(read(pack_awq(t), awq_config(t)).weight, t)


def test_e4_gemv_padding_is_ignored() -> None:
    t = truth(7, K=1152, N=32, size=128)
    tensors = pack_gemv(t)
    assert (t.G, tuple(tensors["scales"].shape)) == (9, (32, 16))
    found = read(tensors, awq_config(t, "GEMV"))
    same(found.weight, t)
    assert found.notes == ()


@pytest.mark.parametrize("pack", [pack_gemv, pack_fast])
@pytest.mark.parametrize(
    ("K", "size", "said"), [(1024, 128, 256), (1024, 64, 128), (2048, 256, 128), (1024, 1024, 128)]
)
def test_padding_tells_the_group_size_when_the_config_is_wrong(pack, K: int, size: int, said: int) -> None:  # type: ignore[no-untyped-def]
    t = truth(8, K=K, N=8, size=size)
    version = "gemv" if pack is pack_gemv else "gemv_fast"
    found = read(pack(t), {**awq_config(t, version), "group_size": said})
    same(found.weight, t)
    assert levels(found) == ["conflict"]


@pytest.mark.parametrize("pack", [pack_gemv, pack_fast])
def test_padding_without_any_config(pack) -> None:  # type: ignore[no-untyped-def]
    t = truth(9, K=1152, N=8, size=128)
    same(read(pack(t), None).weight, t)


def test_padding_that_fits_nothing() -> None:
    t = truth(10, K=1152, N=8, size=128)
    tensors = pack_gemv(t)
    tensors["scales"][:, 10] = 1
    with pytest.raises(CorruptError, match="16 groups allocated and 11 used"):
        read(tensors, awq_config(t, "gemv"))


def test_gemv_that_looks_like_gptq_with_groups_of_eight() -> None:
    t = truth(11, K=256, N=16, size=32)
    tensors = pack_gemv(t)
    assert tensors["qweight"].shape[1] == tensors["scales"].shape[1]
    (module,) = census(checkpoint(layer=tensors), awq_config(t, "gemv")).modules
    assert module.format == "awq-gemv"
    same(read(tensors, awq_config(t, "gemv")).weight, t)
    other = truth(12, K=128, N=32, size=8, lowest=1)
    shaped = pack_gptq(other, g_idx=False)
    assert shaped["qweight"].shape[0] == shaped["scales"].shape[0]
    (module,) = census(checkpoint(layer=shaped), gptq_config(other)).modules
    assert module.format == "gptq"
    same(read(shaped, gptq_config(other)).weight, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["awq-gemv-fast", "llm-awq"])
def test_g6_rounded_products_give_exact_zeros_within_the_bound(dtype: torch.dtype, name: str) -> None:
    t = truth(13, K=1152, N=64, size=128, dtype=dtype)
    t.s.copy_(torch.rand(t.s.shape, generator=torch.Generator().manual_seed(1)) * 0.1 + 1e-4)
    key, config = ("qzeros", awq_config(t, "gemv_fast")) if name == "awq-gemv-fast" else ("scaled_zeros", {})
    config = config or {"quant_method": "awq", "backend": "llm-awq", "group_size": 128, "bits": 4}
    tensors = pack_fast(t, key)
    found = read(tensors, config)
    same(found.weight, t)
    assert found.zero_rule == "rounded-product"
    stored = {k: v.float().numpy() if v.is_floating_point() else v.numpy() for k, v in tensors.items()}
    exact = reference.dequantize(name, stored, 128, stored="BF16" if dtype == torch.bfloat16 else "F16")
    assert np.array_equal(exact.q, t.q)
    assert np.array_equal(exact.z, t.z)
    assert exact.original is not None
    assert exact.bound is not None
    difference = np.abs(exact.weight() - exact.original)
    assert bool((difference <= exact.bound).all())
    assert difference.max() > 0  # the bound is not idle: products were rounded


def test_products_that_are_no_zero_points() -> None:
    t = truth(14, K=256, N=8, size=128)
    tensors = pack_fast(t)
    tensors["qzeros"][0, 0] = -tensors["scales"][0, 0] * 3.5
    with pytest.raises(CorruptError, match=r"0\.50 away from a whole zero point"):
        read(tensors, awq_config(t, "gemv_fast"))
    tensors["qzeros"][0, 0] = -tensors["scales"][0, 0] * 17
    with pytest.raises(CorruptError, match="a zero point of 17"):
        read(tensors, awq_config(t, "gemv_fast"))


def test_a_product_beside_a_scale_of_zero() -> None:
    t = truth(15, K=256, N=8, size=128)
    tensors = pack_fast(t)
    tensors["scales"][0, 0] = 0
    with pytest.raises(UnsupportedError, match="a product beside a scale of 0"):
        read(tensors, awq_config(t, "gemv_fast"))
    tensors["qzeros"][0, 0] = 0
    assert read(tensors, awq_config(t, "gemv_fast")).weight.full_zeros()[0, 0] == 0


@pytest.mark.parametrize("size", [128, -1])
def test_e5_marlin_of_autoawq_and_of_autogptq(size: int) -> None:
    t = truth(16, K=256, N=256, size=size, sym=True)
    same(read(pack_marlin(t, "qweight", "scales"), awq_config(t, "Marlin", zero_point=False)).weight, t)
    for config in (
        gptq_config(t, is_marlin_format=True),
        gptq_config(t, "marlin"),
        {"quant_method": "marlin", "bits": 4, "group_size": t.stated},
    ):
        same(read({**pack_marlin(t), "workspace": torch.zeros(32, dtype=torch.int32)}, config).weight, t)


def test_e5_one_group_is_told_by_the_scales_and_not_by_the_config() -> None:
    t = truth(17, K=128, N=256, size=-1, sym=True)
    found = read(pack_marlin(t), {**gptq_config(t, "marlin"), "group_size": 128})
    same(found.weight, t)
    assert found.notes == ()


def test_gptq_v0_is_not_read_as_n_groups() -> None:
    t = truth(18, K=64, N=24, size=-1, dtype=torch.float32)
    found = read({**pack_v0(t), "bias": torch.zeros(24)}, None)
    assert found.weight.G == 1
    same(found.weight, t)


def test_gptq_v0_products_that_are_no_multiples() -> None:
    t = truth(19, K=64, N=24, size=-1, dtype=torch.float32)
    tensors = pack_v0(t)
    tensors["zeros"][2] += tensors["scales"][2] * 0.4
    with pytest.raises(CorruptError, match=r"0\.40 away"):
        read(tensors, None)


def test_config_that_names_another_layout_than_the_tensors() -> None:
    t = truth(20, K=1152, N=32, size=128)
    found = census(checkpoint(layer=pack_gemv(t)), awq_config(t, "gemm"))
    assert [m.format for m in found.modules] == ["awq-gemv"]
    (note,) = [n for n in found.notes if n.level == "conflict"]
    assert "the config says awq gemm; the tensors are awq-gemv" in note.text


def test_tensors_of_gptq_under_an_awq_config() -> None:
    t = truth(21, lowest=1)
    config = awq_config(t)
    found = census(checkpoint(layer=pack_gptq(t)), config)
    assert [m.format for m in found.modules] == ["gptq"]
    assert [n.level for n in found.notes] == ["conflict"]
    assert QuantConfig.from_dict(config).sym is False


def test_llm_awq_v2_without_any_config() -> None:
    """Its files are bare pickles: the padding of the scales tells the groups."""
    t = truth(24, K=1152, N=8, size=128, dtype=torch.bfloat16)
    found = read(pack_fast(t, "scaled_zeros"), None)
    same(found.weight, t)


@pytest.mark.parametrize("config", [None, {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True}])
def test_llm_awq_v1_is_gemv_and_before_that_gemm(config: dict[str, object] | None) -> None:
    t = truth(25, K=1152, N=32, size=128)
    for pack, name in ((pack_gemv, "awq-gemv"), (pack_awq, "awq")):
        (module,) = census(checkpoint(layer=pack(t)), config).modules
        assert module.format == name
        same(read(pack(t), config).weight, t)


@pytest.mark.parametrize(("rows", "columns"), [(3, 128), (4, 96)])
def test_fast_layouts_that_fill_no_tile_are_refused_by_shape(rows: int, columns: int) -> None:
    """Four outputs share a row and 64 inputs a span."""
    for zeros in ("qzeros", "scaled_zeros"):
        tensors = {
            "qweight": torch.zeros(rows, columns, dtype=torch.int16),
            "scales": torch.ones(8, 4 * rows + (rows == 3)).half(),
            zeros: torch.zeros(8, 4 * rows + (rows == 3)).half(),
        }
        with pytest.raises(UnsupportedError, match=r"layer: got .*qweight I16"):
            census(checkpoint(layer=tensors), {"quant_method": "awq", "version": "gemv_fast", "group_size": 32})


@pytest.mark.parametrize("bits", [2, 8])
def test_other_widths_are_named_and_not_read(bits: int) -> None:
    t = truth(26, K=64, N=32, size=32)
    tensors = {
        "qweight": torch.zeros(64, 32 * bits // 32, dtype=torch.int32),
        "qzeros": torch.zeros(2, 32 * bits // 32, dtype=torch.int32),
        "scales": torch.ones(2, 32).half(),
    }
    found = census(checkpoint(layer=tensors), {**awq_config(t), "bits": bits})
    assert found.modules == ()
    assert [(m.format, m.bits, m.K, m.N) for m in found.other_width] == [("awq", bits, 64, 32)]


SQUARE = {
    "gptq": (pack_gptq, True),
    "awq": (pack_awq, False),
    "awq-gemv": (pack_gemv, False),
    "awq-gemv-fast": (pack_fast, False),
    "gptq-marlin": (pack_marlin, True),
    "compressed-tensors": (pack_ct, True),
}


@pytest.mark.parametrize("name", SQUARE)
@pytest.mark.parametrize("size", [32, 64, 128])
def test_square_layers_are_told_apart_by_shapes_alone(name: str, size: int) -> None:
    pack, sym = SQUARE[name]
    t = truth(27, K=512, N=512, size=128 if name == "gptq-marlin" else size, sym=sym)
    (module,) = census(checkpoint(layer=pack(t)), None).modules
    assert module.format == name
    same(read(pack(t), {"quant_method": "gptq", "sym": True, "bits": 4} if sym else None).weight, t)


def test_experts_stacked_in_one_tensor() -> None:
    parts = [truth(seed, N=16) for seed in (22, 23)]
    packed = [pack_awq(t) for t in parts]
    found = read({name: torch.stack([p[name] for p in packed]) for name in packed[0]}, awq_config(parts[0]))
    for i, t in enumerate(parts):
        same(found.weight.expert(i), t)
