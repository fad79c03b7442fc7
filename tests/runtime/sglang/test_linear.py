"""Layers of SGLang loaded through its own weight loaders and multiplied, on every rank of 1, 2, 4 and 8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    ReplicatedParallelGroup,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from tests.runtime.sglang.layers import Made, load, opened, rank_of
from tests.runtime.vllm.checkpoints import Recipe
from w4plugin.errors import CorruptError, UnsupportedError, UsageError
from w4plugin.runtime.sglang.linear import W4LinearMethod

HEADS, KV_HEADS, DIM = 8, 2, 16
EXACT = 2e-5
"""Of outputs of unit size in float32: K = 192 products, each rounded at 6e-8, in another order."""

RECIPES = {
    "gptq_v2": Recipe("gptq_v2", group_size=32),
    "gptq symmetric": Recipe("gptq", group_size=32, sym=True),
    "gptq act-order": Recipe("gptq", group_size=32, act_order="each"),
    "auto-round": Recipe("auto-round", group_size=32),
    "awq": Recipe("awq", group_size=64),
    "awq-gemv": Recipe("awq-gemv", group_size=64),
    "awq-gemv-fast": Recipe("awq-gemv-fast", group_size=64),
    "compressed-tensors": Recipe("compressed-tensors", group_size=32),
    "compressed-tensors act-order": Recipe("compressed-tensors act-order", group_size=32, act_order="each"),
    "short last group": Recipe("gptq_v2", group_size=128),
}


def multiply(layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
    return layer.quant_method.apply(layer, x, layer.bias)


def near(found: torch.Tensor, wanted: torch.Tensor, bound: float = EXACT) -> None:
    assert found.shape == wanted.shape
    worst = float((found.detach().double() - wanted).abs().max())
    assert worst <= bound, f"differs by up to {worst}"


def draw_x(rows: int, k: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).normal(size=(rows, k))).float()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", RECIPES)
def test_shards_recombine(name: str, ranks: int, tmp_path: Path) -> None:
    """K = 192 in groups of 64 on 2, 4 or 8 ranks cuts groups; act-order scatters them over all ranks."""
    k = 192
    sizes = {"q_proj": (HEADS * DIM, k), "k_proj": (KV_HEADS * DIM, k), "v_proj": (KV_HEADS * DIM, k)}
    sizes |= {"gate_proj": (64, k), "up_proj": (64, k), "down_proj": (32, k)}
    made = Made(tmp_path, RECIPES[name], sizes)
    x = draw_x(5, k)
    quant = {"bias": False, "quant_config": made.config}
    q, kv, gate, up, down = [], {}, [], [], torch.zeros(5, 32)
    for rank in range(ranks):
        with rank_of(rank, ranks):
            qkv = QKVParallelLinear(k, DIM, HEADS, KV_HEADS, prefix=made.at("qkv_proj"), **quant)
            load(qkv, {s: made.tensors[f"{s}_proj"] for s in "qkv"})
            heads, kv_heads = HEADS // ranks, max(1, KV_HEADS // ranks)
            parts = multiply(qkv, x).split([heads * DIM, kv_heads * DIM, kv_heads * DIM], -1)
            q.append(parts[0])
            kv.setdefault(rank * KV_HEADS // ranks, parts[1:])
            merged = MergedColumnParallelLinear(k, [64, 64], prefix=made.at("gate_up_proj"), **quant)
            load(merged, {1: made.tensors["up_proj"], 0: made.tensors["gate_proj"]})
            halves = multiply(merged, x).chunk(2, -1)
            gate.append(halves[0])
            up.append(halves[1])
            row = RowParallelLinear(k, 32, prefix=made.at("down_proj"), **quant)
            load(row, {None: made.tensors["down_proj"]})
            down += multiply(row, x[:, rank * k // ranks : (rank + 1) * k // ranks])
    outputs = {"q_proj": torch.cat(q, -1), "gate_proj": torch.cat(gate, -1), "up_proj": torch.cat(up, -1)}
    for i, part in enumerate(("k_proj", "v_proj")):
        outputs[part] = torch.cat([kv[head][i] for head in sorted(kv)], -1)
    for part, found in {**outputs, "down_proj": down}.items():
        near(found, made.product(part, x))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layers_of_one_weight(ranks: int, tmp_path: Path) -> None:
    """Column parallel, on every rank whole, a head with a padded vocabulary, and q, k, v fused in the file."""
    sizes = {"column": (48, 64), "replicated": (24, 64), "lm_head": (100, 64), "qkv_proj": (12 * DIM, 64)}
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32, act_order="each"), sizes)
    x = draw_x(3, 64)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in sizes}
    at, quant = made.at, {"quant_config": made.config}
    for rank in range(ranks):
        with rank_of(rank, ranks):
            layers = {
                "column": ColumnParallelLinear(64, 48, bias=False, prefix=at("column"), **quant),
                "replicated": ReplicatedLinear(64, 24, bias=False, prefix=at("replicated"), **quant),
                "lm_head": ParallelLMHead(100, 64, prefix=at("lm_head"), **quant),
                "qkv_proj": QKVParallelLinear(64, DIM, 8, 2, bias=False, prefix=at("qkv_proj"), **quant),
            }
            for name, layer in layers.items():
                load(layer, {None: made.tensors[name]})
                found[name].append(multiply(layer, x))
    near(torch.cat(found["column"], -1), made.product("column", x))
    for output in found["replicated"]:
        near(output, made.product("replicated", x))
    logits = torch.cat(found["lm_head"], -1)
    near(logits[:, :100], made.product("lm_head", x))
    assert not logits[:, 100:].any()
    wanted = made.product("qkv_proj", x).split([8 * DIM, 2 * DIM, 2 * DIM], -1)
    kv_heads = max(1, 2 // ranks)
    for rank, output in enumerate(found["qkv_proj"]):
        start = rank * 2 // ranks * DIM
        q, *kv = output.split([8 // ranks * DIM, kv_heads * DIM, kv_heads * DIM], -1)
        near(q, wanted[0][:, rank * 8 // ranks * DIM : (rank + 1) * 8 // ranks * DIM])
        for part, both in zip(kv, wanted[1:], strict=True):
            near(part, both[:, start : start + kv_heads * DIM])


def test_bias_and_half_precision(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"column": (48, 64)})
    x, bias = draw_x(3, 64), torch.linspace(-1, 1, 48)
    with rank_of(0, 1):
        layer = ColumnParallelLinear(
            64, 48, prefix=made.at("column"), quant_config=made.config, params_dtype=torch.bfloat16
        )
        layer.bias.data.copy_(bias)
        load(layer, {None: made.tensors["column"]})
    output, left_over = layer(x.bfloat16())
    assert left_over is None
    assert output.dtype == torch.bfloat16
    # sums of unit size: bfloat16 keeps 8 bits of x, and 8 of the result and of the bias
    near(output, made.product("column", x.bfloat16()) + bias.bfloat16().double(), 0.03)


def test_weights_with_different_act_orders_and_a_plain_one_stay_apart(tmp_path: Path) -> None:
    sizes = {"q_proj": (HEADS * DIM, 64), "k_proj": (KV_HEADS * DIM, 64)}
    plain = torch.from_numpy(np.random.default_rng(5).normal(size=(KV_HEADS * DIM, 64))).float() / 8
    made = Made(tmp_path, Recipe("gptq", group_size=32, act_order="each"), sizes, v_proj=plain)
    x = draw_x(4, 64)
    with rank_of(0, 1):
        layer = QKVParallelLinear(
            64, DIM, HEADS, KV_HEADS, bias=False, prefix=made.at("qkv_proj"), quant_config=made.config
        )
        load(layer, {s: made.tensors[f"{s}_proj"] for s in "qkv"})
    assert [piece.backend == "" for piece in layer.w4_pieces] == [False, False, True]
    near(multiply(layer, x), torch.cat([made.product(f"{s}_proj", x) for s in "qkv"], -1))


def test_a_weight_repeated_on_neighbouring_ranks(tmp_path: Path) -> None:
    """A parallel group in which two ranks hold the same share."""
    made = Made(tmp_path, Recipe("awq", group_size=32), {"column": (48, 64)})
    x, halves = draw_x(3, 64), []
    for rank in range(4):
        with rank_of(rank, 4):
            layer = ColumnParallelLinear(
                64,
                48,
                bias=False,
                prefix=made.at("column"),
                quant_config=made.config,
                parallel_group=ReplicatedParallelGroup("tp", 2),
            )
            load(layer, {None: made.tensors["column"]})
            halves.append(multiply(layer, x))
    for rank, half in enumerate(halves):
        near(half, made.product("column", x).chunk(2, -1)[rank // 2])


def test_plain_layers_stay_the_hosts(tmp_path: Path) -> None:
    plain = torch.ones(32, 64)
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"column": (48, 64)}, other=plain)
    with rank_of(0, 1):
        layer = ReplicatedLinear(64, 32, bias=False, prefix=made.at("other"), quant_config=made.config)
        assert isinstance(layer.quant_method, UnquantizedLinearMethod)
        assert made.config.is_linear_unquantized(made.at("other"))
        assert not made.config.is_linear_unquantized(made.at("column"))
        embedding = VocabParallelEmbedding(64, 16, prefix="model.embed_tokens", quant_config=made.config)
        assert not isinstance(embedding.quant_method, W4LinearMethod)


def test_a_packed_embedding_is_refused(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"embed_tokens": (64, 32)})
    with rank_of(0, 1), pytest.raises(UnsupportedError, match="an embedding packed in 4 bits"):
        VocabParallelEmbedding(64, 32, prefix=made.at("embed_tokens"), quant_config=made.config)


def test_packed_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="experts packed in 4 bits"):
        Made(tmp_path, Recipe("gptq_v2", group_size=32), {"mlp.experts.0.up_proj": (64, 32)})


@pytest.mark.parametrize(("columns", "rows"), [(40, 64), (56, 64), (48, 96)])
def test_a_weight_of_another_shape_is_refused(tmp_path: Path, columns: int, rows: int) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"column": (columns, rows)})
    with rank_of(1, 2):
        layer = ColumnParallelLinear(64, 48, bias=False, prefix=made.at("column"), quant_config=made.config)
        with pytest.raises((CorruptError, UnsupportedError), match="column"):
            load(layer, {None: made.tensors["column"]})


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"column": (48, 64)})
    kept = {suffix: t for suffix, t in made.tensors["column"].items() if suffix != "scales"}
    with rank_of(0, 1):
        layer = ColumnParallelLinear(64, 48, bias=False, prefix=made.at("column"), quant_config=made.config)
        with pytest.raises(CorruptError, match=r"column\.scales"):
            load(layer, {None: kept})


def test_a_layer_that_the_file_lacks_is_refused(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"column": (48, 64)})
    with rank_of(0, 1), pytest.raises(CorruptError, match="no tensors for this layer"):
        ReplicatedLinear(64, 48, bias=False, prefix="model.layers.1.column", quant_config=made.config)
    sizes = {"q_proj": (HEADS * DIM, 64), "k_proj": (KV_HEADS * DIM, 64)}
    made = Made(tmp_path / "2", Recipe("gptq_v2", group_size=32), sizes)
    with rank_of(0, 1), pytest.raises(CorruptError, match=r"no tensors for .*v_proj"):
        QKVParallelLinear(64, DIM, HEADS, KV_HEADS, prefix=made.at("qkv_proj"), quant_config=made.config)


def test_loading_twice_is_refused(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"column": (48, 64)})
    with rank_of(0, 1):
        layer = ColumnParallelLinear(64, 48, bias=False, prefix=made.at("column"), quant_config=made.config)
        held = dict(layer.named_parameters())["scales"]
        load(layer, {None: made.tensors["column"]})
    with pytest.raises(UsageError, match="cannot be loaded again"):
        layer.quant_method.restore_weights_before_loading(layer)
    with pytest.raises(UsageError, match="cannot be loaded again"):
        held.weight_loader(held, made.tensors["column"]["scales"])


def test_a_head_of_its_own_is_untied(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"lm_head": (64, 32)})
    hf = {"tie_word_embeddings": True, "num_hidden_layers": 1}
    again = opened(made.folder, **hf)
    assert again.inventory.parts
    tied = type("Hf", (), {"_name_or_path": str(made.folder), **hf})()
    type(again).from_config({"hf_config": tied})
    assert tied.tie_word_embeddings is False
