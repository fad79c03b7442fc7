"""Writing: lossless or refused, and a config that the readers of the format understand (case A6)."""

from __future__ import annotations

import itertools
import re
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.formats import samples
from tests.formats.samples import NAME, Truth, gptq_config, pack_awq, pack_gptq, read, same, truth
from w4plugin.errors import UnsupportedError, UsageError
from w4plugin.formats import Layer, conformance, formats, get, quantization_config, write_module
from w4plugin.formats.config_spelling import patterns
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import W4Tensor

WRITERS = sorted(name for name, f in formats().items() if f.write is not None)

HOLDS_ALL: dict[str, Any] = {"K": 128, "N": 32, "size": 32, "lowest": 1}


def weight(t: Truth) -> W4Tensor:
    return read(pack_gptq(t, offset=0), gptq_config(t, "gptq_v2")).weight


def written(name: str, w: W4Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return write_module(name, w), quantization_config(name, [Layer.of(NAME, w)])


def refused(name: str, w: W4Tensor) -> UnsupportedError | None:
    try:
        write_module(name, w)
    except UnsupportedError as error:
        return error
    return None


def test_writers_are_these() -> None:
    assert WRITERS == ["auto-round", "awq", "compressed-tensors", "gptq", "gptq_v2"]


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(WRITERS, WRITERS)))
def test_every_pair_round_trips_to_the_same_bytes(first: str, second: str, size: int, sym: bool) -> None:
    t = truth(1, **{**HOLDS_ALL, "size": size}, sym=sym)
    original, config = written(first, weight(t))
    there, there_config = written(second, read(original, config).weight)
    back, back_config = written(first, read(there, there_config).weight)
    same(read(there, there_config).weight, t)
    assert back_config == config
    assert back.keys() == original.keys()
    for name in back:
        assert back[name].dtype == original[name].dtype
        assert torch.equal(back[name], original[name]), name


@pytest.mark.parametrize("name", sorted(samples.MAKERS))
@pytest.mark.parametrize("to", WRITERS)
def test_every_format_read_can_be_written_or_says_why_not(name: str, to: str) -> None:
    for seed in range(6):
        sample = samples.MAKERS[name](Random(seed))
        _, decoded = conformance.check_read(get(name), sample)
        refusal = refused(to, decoded.weight)
        if refusal is not None:
            assert refusal.todo == "use gptq_v2"
            assert to != "gptq_v2"
            continue
        tensors, stated = written(to, decoded.weight)
        again = read(tensors, stated).weight
        assert torch.equal(again.qweight, decoded.weight.qweight)
        assert torch.equal(again.full_zeros(), decoded.weight.full_zeros())
        assert torch.equal(again.scales, decoded.weight.scales)
        assert torch.equal(again.groups(), decoded.weight.groups())


def test_a6_zero_points_of_zero() -> None:
    t = truth(2, K=64, N=16, size=32)
    t.z[0, ::4] = 0
    w = read(pack_awq(t), samples.awq_config(t)).weight
    with pytest.raises(UnsupportedError, match="zero points of 0") as error:
        write_module("gptq", w)
    assert error.value.todo == "use gptq_v2"
    for name in ("gptq_v2", "awq", "compressed-tensors", "auto-round"):
        same(read(*written(name, w)).weight, t)


@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "compressed-tensors"])
def test_act_order_where_there_is_a_g_idx(name: str) -> None:
    t = truth(3, **HOLDS_ALL, order="act")
    tensors, config = written(name, weight(t))
    assert read(tensors, config).notes == ()
    same(read(tensors, config).weight, t)


@pytest.mark.parametrize("name", ["awq", "auto-round"])
def test_act_order_where_there_is_none(name: str) -> None:
    with pytest.raises(UnsupportedError, match="a real act-order"):
        write_module(name, weight(truth(4, **HOLDS_ALL, order="act")))


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("awq", {"N": 36}, "N = 36"),
        ("awq", {"K": 136}, "K = 136 in groups of 32"),
        ("awq", {"dtype": torch.bfloat16}, "bfloat16"),
        ("auto-round", {"dtype": torch.float32}, "float32"),
        ("compressed-tensors", {"K": 136}, "K = 136 in groups of 32"),
    ],
)
def test_refusals(name: str, change: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        write_module(name, weight(truth(5, **{**HOLDS_ALL, **change})))


def test_gptq_v2_holds_everything() -> None:
    for change in ({"N": 35}, {"K": 136}, {"dtype": torch.float32}, {"order": "free"}, {"lowest": 0}, {"size": -1}):
        t = truth(6, **{**HOLDS_ALL, **change})
        same(read(*written("gptq_v2", weight(t))).weight, t)


def test_read_only_formats_name_the_writers() -> None:
    for name in sorted(set(formats()) - set(WRITERS)):
        with pytest.raises(UnsupportedError, match="can only be read") as error:
            write_module(name, weight(truth(7)))
        assert "gptq_v2" in error.value.wanted


def test_unknown_format() -> None:
    with pytest.raises(UsageError, match="gptq_v2") as error:
        write_module("gguf", weight(truth(8)))
    assert "awq-gemv" not in error.value.wanted, "only what can be written"


def test_unused_nibbles_of_the_last_word_are_zero() -> None:
    tensors = write_module("gptq_v2", weight(truth(9, N=12, lowest=1)))
    assert tensors["qzeros"].shape == (2, 2)
    assert bool(((tensors["qzeros"][:, 1].to(torch.int64) & 0xFFFF0000) == 0).all())


def test_stacks_of_experts() -> None:
    parts = [weight(truth(seed, lowest=1)) for seed in (10, 11)]
    stack = W4Tensor.stack_experts(parts)
    for name in WRITERS:
        again = read(*written(name, stack)).weight
        assert torch.equal(again.dequantize(), stack.dequantize())


def layers(**sizes: int) -> list[Layer]:
    return [
        Layer(n.replace("__", "."), 256, 64, size if size > 0 else 256, 1 if size < 0 else 256 // size, True, False)
        for n, size in sizes.items()
    ]


MIXED = layers(
    model__layers__0__mlp__up=128, model__layers__1__mlp__up=128, model__layers__0__mlp__down=64,
    model__layers__1__mlp__down=64, model__layers__0__attn__q=128, lm_head=-1,
)  # fmt: skip
PLAIN = ["model.embed_tokens", "model.layers.2.mlp.up", "model.layers.0.mlp.gate"]


@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "auto-round", "compressed-tensors"])
def test_config_gives_every_layer_its_own_group_size(name: str) -> None:
    config = QuantConfig.from_dict(quantization_config(name, MIXED, PLAIN))
    for layer in MIXED:
        expected = config.for_module(layer.name)
        assert expected.group_size == layer.stated_size, layer.name
        assert expected.quantized is not False
    assert config.for_module("model.layers.2.mlp.up").quantized is False


def test_config_of_gptq_v2_in_full() -> None:
    assert quantization_config("gptq_v2", MIXED, PLAIN) == {
        "bits": 4,
        "checkpoint_format": "gptq_v2",
        "desc_act": False,
        "dynamic": {
            "+:lm_head$": {"group_size": -1},
            r"+:model\.layers\.\d+\.mlp\.down$": {"group_size": 64},
            r"-:model\.layers\.2\.mlp\.up$": {},
        },
        "format": "gptq_v2",
        "group_size": 128,
        "lm_head": True,
        "meta": {"packer": "w4plugin"},
        "method": "gptq",
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": True,
    }


def test_config_of_compressed_tensors_partitions_by_kind() -> None:
    mixed = [
        Layer("a.q", 64, 8, 32, 2, True, False),
        Layer("a.k", 64, 8, 32, 2, False, False),
        Layer("a.v", 64, 8, 32, 2, True, True),
    ]
    config = quantization_config(
        "compressed-tensors", [*mixed, Layer("b.q", 64, 8, 32, 2, True, False)], ["a.gate", "x.0.y", "x.1.y"]
    )
    kinds = {
        tuple(group["targets"]): (group["weights"]["symmetric"], group["weights"]["actorder"])
        for group in config["config_groups"].values()
    }
    assert kinds == {("Linear",): (True, None), (r"re:a\.k$",): (False, None), (r"re:a\.v$",): (True, "group")}
    assert config["ignore"] == ["a.gate", r"re:x\.\d+\.y$"]
    parsed = QuantConfig.from_dict(config)
    assert [parsed.for_module(n).sym for n in ("a.q", "a.k", "a.v")] == [True, False, True]
    assert parsed.for_module("x.7.y").quantized is False


def test_awq_has_one_group_size() -> None:
    with pytest.raises(UnsupportedError, match=re.escape("[-1, 64, 128]")):
        quantization_config("awq", MIXED)


def test_awq_skips_by_substring() -> None:
    packed = layers(model__layers__0__mlp__up=128)
    config = quantization_config("awq", packed, ["model.layers.1.mlp.up", "model.embed_tokens"])
    assert config["modules_to_not_convert"] == ["model.embed_tokens", "model.layers.1.mlp.up"]
    with pytest.raises(UnsupportedError, match=r"plain model\.layers\.1\.up beside packed model\.layers\.1\.up\.up"):
        quantization_config("awq", layers(model__layers__1__up__up=128), ["model.layers.1.up"])


def test_a_router_whose_name_begins_a_packed_one_is_left_out_and_not_refused() -> None:
    """No reader would take it for a packed layer, and as a substring it would skip one."""
    packed = layers(model__layers__0__mlp__gate_proj=128)
    plain = ["lm_head", "model.layers.0.mlp.gate"]
    assert quantization_config("awq", packed, plain)["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.parametrize("name", ["awq", "auto-round", "compressed-tensors"])
def test_towers_are_listed_where_a_reader_takes_every_linear_for_a_packed_one(name: str) -> None:
    packed = layers(model__layers__0__mlp__up=128, model__layers__1__mlp__up=128)
    towers = ["visual.blocks.0.attn.qkv", "visual.blocks.1.attn.qkv", "visual.merger.mlp.2", "projector.linear_1"]
    config = QuantConfig.from_dict(quantization_config(name, packed, [*towers, "lm_head"]))
    for tower in [*towers, "lm_head"]:
        assert config.for_module(tower).quantized is False, tower
    for layer in packed:
        assert config.for_module(layer.name).quantized is not False


@pytest.mark.parametrize("name", WRITERS)
def test_a_packed_head_is_stated_where_readers_ask(name: str) -> None:
    config = quantization_config(name, layers(model__layers__0__mlp__up=128, lm_head=128))
    parsed = QuantConfig.from_dict(config).for_module("lm_head")
    assert parsed.quantized is not False
    assert config.get("lm_head", "lm_head" in config.get("extra_config", {})) is (name != "compressed-tensors")


def test_no_layers_no_config() -> None:
    with pytest.raises(UsageError, match="no layers"):
        quantization_config("gptq_v2", [])


def test_patterns_match_what_they_should_and_nothing_else() -> None:
    among = [f"m.{i}.{leaf}" for i in range(12) for leaf in ("q", "k.x", "qq")] + ["head"]
    for wanted in (
        ["m.3.q"],
        [f"m.{i}.q" for i in range(12)],
        ["m.1.q", "m.11.q"],
        ["head"],
        [n for n in among if "k" in n],
    ):
        found = patterns(wanted, among)
        assert sorted(n for n in among if any(re.match(p, n) for p in found)) == sorted(wanted)
    assert patterns([f"m.{i}.q" for i in range(12)], among) == [r"m\.\d+\.q$"]
