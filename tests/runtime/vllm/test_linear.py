"""Layers of vLLM loaded and multiplied on every rank of 1, 2, 4 and 8, against the plain weights."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from tests.formats.samples import Truth
from tests.runtime.vllm.checkpoints import FORMATS, Recipe, Tensors, draw, plain_weight
from tests.runtime.vllm.layers import load, opened, rank_of, save
from w4plugin.errors import CorruptError, UnsupportedError, UsageError
from w4plugin.kernels import Prepared
from w4plugin.runtime.pieces import TENSORS
from w4plugin.runtime.vllm import fingerprint
from w4plugin.runtime.vllm.config import W4Config
from w4plugin.runtime.vllm.linear import W4LinearMethod

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEADS, KV_HEADS, DIM = 8, 2, 16
EXACT = 2e-5
"""Of outputs of unit size in float32: K = 192 products, each rounded at 6e-8, in another order."""


class Made:
    """A checkpoint of one layer's weights, and what they mean."""

    def __init__(self, folder: Path, recipe: Recipe, sizes: dict[str, tuple[int, int]], **plain: torch.Tensor) -> None:
        rng = np.random.default_rng(0)
        self.truths: dict[str, Truth] = {name: draw(rng, n, k, recipe) for name, (n, k) in sizes.items()}
        pack, spell = FORMATS[recipe.format]
        self.tensors: dict[str, Tensors] = {name: pack(truth) for name, truth in self.truths.items()}
        self.tensors.update({name: {"weight": weight} for name, weight in plain.items()})
        self.plain = {name: plain_weight(truth) for name, truth in self.truths.items()} | dict(plain)
        prefixed = {f"model.layers.0.{name}": found for name, found in self.tensors.items()}
        quant = spell(max(self.truths.values(), key=lambda t: t.K))
        self.config = opened(save(folder, prefixed, quant), PACKED)

    def at(self, name: str) -> str:
        return f"model.layers.0.{name}"


def multiply(layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
    return layer.quant_method.apply(layer, x, layer.bias)


def near(found: torch.Tensor, wanted: torch.Tensor, bound: float = EXACT) -> None:
    assert found.shape == wanted.shape
    worst = float((found - wanted).abs().max())
    assert worst <= bound, f"differs by up to {worst}"


RECIPES = {
    "gptq_v2": Recipe("gptq_v2", group_size=32),
    "gptq act-order": Recipe("gptq", group_size=32, act_order="each"),
    "awq": Recipe("awq", group_size=64),
    "awq-gemv": Recipe("awq-gemv", group_size=64),
    "awq-gemv-fast": Recipe("awq-gemv-fast", group_size=64),
    "compressed-tensors act-order": Recipe("compressed-tensors act-order", group_size=32, act_order="each"),
    "short last group": Recipe("gptq_v2", group_size=128),
}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", RECIPES)
def test_shards_recombine(name: str, ranks: int, tmp_path: Path) -> None:
    """K = 192 in groups of 64 on 2, 4 or 8 ranks cuts groups; act-order scatters them over all ranks."""
    k = 192
    sizes = {"q_proj": (HEADS * DIM, k), "k_proj": (KV_HEADS * DIM, k), "v_proj": (KV_HEADS * DIM, k)}
    sizes |= {"gate_proj": (64, k), "up_proj": (64, k), "down_proj": (32, k)}
    made = Made(tmp_path, RECIPES[name], sizes)
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(5, k))).float()
    q, kv, gate, up, down = [], {}, [], [], torch.zeros(5, 32)
    for rank in range(ranks):
        with rank_of(rank, ranks):
            torch.set_default_dtype(torch.float32)
            layer = QKVParallelLinear(
                k, DIM, HEADS, KV_HEADS, bias=False, quant_config=made.config, prefix=made.at("qkv_proj")
            )
            load(layer, {s: made.tensors[f"{s}_proj"] for s in "qkv"}, hung=bool(rank % 2))
            heads, kv_heads = HEADS // ranks, max(1, KV_HEADS // ranks)
            parts = multiply(layer, x).split([heads * DIM, kv_heads * DIM, kv_heads * DIM], -1)
            q.append(parts[0])
            kv.setdefault(rank * KV_HEADS // ranks, parts[1:])
            layer = MergedColumnParallelLinear(
                k, [64, 64], bias=False, quant_config=made.config, prefix=made.at("gate_up_proj")
            )
            load(layer, {0: made.tensors["gate_proj"], 1: made.tensors["up_proj"]})
            halves = multiply(layer, x).chunk(2, -1)
            gate.append(halves[0])
            up.append(halves[1])
            row = RowParallelLinear(k, 32, bias=False, quant_config=made.config, prefix=made.at("down_proj"))
            load(row, {None: made.tensors["down_proj"]})
            down += multiply(row, x[:, rank * k // ranks : (rank + 1) * k // ranks])
    outputs = {"q_proj": torch.cat(q, -1), "gate_proj": torch.cat(gate, -1), "up_proj": torch.cat(up, -1)}
    for i, part in enumerate(("k_proj", "v_proj")):
        outputs[part] = torch.cat([kv[head][i] for head in sorted(kv)], -1)
    for part, found in {**outputs, "down_proj": down}.items():
        near(found, x @ made.plain[part].t())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layers_of_one_weight(ranks: int, tmp_path: Path) -> None:
    sizes = {"column": (48, 64), "replicated": (24, 64), "shared_head": (100, 64), "qkv_proj": (12 * DIM, 64)}
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32, act_order="each"), sizes)
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 64))).float()
    found: dict[str, list[torch.Tensor]] = {name: [] for name in sizes}
    for rank in range(ranks):
        with rank_of(rank, ranks):
            at, quant = made.at, {"quant_config": made.config}
            layers = {
                "column": ColumnParallelLinear(64, 48, bias=False, prefix=at("column"), **quant),
                "replicated": ReplicatedLinear(64, 24, bias=False, prefix=at("replicated"), **quant),
                "shared_head": ParallelLMHead(100, 64, prefix=at("shared_head"), **quant),
                "qkv_proj": QKVParallelLinear(64, DIM, 8, 2, bias=False, prefix=at("qkv_proj"), **quant),
            }
            for name, layer in layers.items():
                load(layer, {None: made.tensors[name]})
                found[name].append(multiply(layer, x))
    near(torch.cat(found["column"], -1), x @ made.plain["column"].t())
    for output in found["replicated"]:
        near(output, x @ made.plain["replicated"].t())
    logits = torch.cat(found["shared_head"], -1)
    near(logits[:, :100], x @ made.plain["shared_head"].t())
    assert not logits[:, 100:].any()
    plain = made.plain["qkv_proj"].split([8 * DIM, 2 * DIM, 2 * DIM])
    kv_heads = max(1, 2 // ranks)
    for rank, output in enumerate(found["qkv_proj"]):
        first = rank * 2 // ranks
        q = plain[0].chunk(ranks)[rank]
        k, v = (p[first * DIM : (first + kv_heads) * DIM] for p in plain[1:])
        near(output, x @ torch.cat([q, k, v]).t())


def test_b2_indices_of_act_order_stay_in_the_stream_of_weights() -> None:
    """vLLM 0.33 drops every g_idx before a layer sees it, unless the quantisation config says otherwise."""
    names = [f"model.layers.0.mlp.down_proj.{suffix}" for suffix in ("qweight", "qzeros", "scales", "g_idx")]
    stream = [(name, torch.zeros(1)) for name in names]
    assert [name for name, _ in W4Config.get_checkpoint_weight_mapper().apply(stream)] == names


def test_plain_weight_among_packed_ones(tmp_path: Path) -> None:
    v_proj = torch.randn(KV_HEADS * DIM, 64)
    sizes = {"q_proj": (HEADS * DIM, 64), "k_proj": (KV_HEADS * DIM, 64)}
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), sizes, v_proj=v_proj)
    x = torch.randn(4, 64)
    with rank_of(1, 2):
        layer = QKVParallelLinear(
            64, DIM, HEADS, KV_HEADS, bias=False, quant_config=made.config, prefix=made.at("qkv_proj")
        )
        load(layer, {s: made.tensors[f"{s}_proj"] for s in "qkv"})
    assert [piece.backend == "" for piece in layer.w4_pieces] == [False, True]
    halves = [made.plain[f"{s}_proj"].chunk(2)[1] for s in "qkv"]
    near(multiply(layer, x), x @ torch.cat(halves).t())


def test_equal_weights_become_one_multiplication_and_leave_no_source(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq", group_size=32), {"gate_proj": (64, 64), "up_proj": (64, 64)})
    with rank_of(0, 1):
        layer = MergedColumnParallelLinear(
            64, [64, 64], bias=False, quant_config=made.config, prefix=made.at("gate_up_proj")
        )
        load(layer, {0: made.tensors["gate_proj"], 1: made.tensors["up_proj"]})
    (piece,) = layer.w4_pieces
    assert piece.n == 128
    held = {name for name, _ in layer.named_parameters()}
    assert held == {name for name in piece.names if name is not None}
    assert "qzeros" not in held
    assert layer.quant_method.loading is None


def test_values_may_be_keys(tmp_path: Path) -> None:
    """A model without v_proj: vLLM sends the key weight to both shards."""
    made = Made(
        tmp_path, Recipe("gptq_v2", group_size=32), {"q_proj": (HEADS * DIM, 64), "k_proj": (KV_HEADS * DIM, 64)}
    )
    x = torch.randn(4, 64)
    with rank_of(0, 1):
        layer = QKVParallelLinear(
            64, DIM, HEADS, KV_HEADS, bias=False, quant_config=made.config, prefix=made.at("qkv_proj")
        )
        load(layer, {"q": made.tensors["q_proj"], "k": made.tensors["k_proj"], "v": made.tensors["k_proj"]})
    near(multiply(layer, x), x @ torch.cat([made.plain["q_proj"], made.plain["k_proj"], made.plain["k_proj"]]).t())


def test_bias_is_added_once(tmp_path: Path) -> None:
    """To one multiplication, and to two whose outputs lie side by side."""
    for order in ("", "each"):
        recipe = Recipe("gptq_v2", group_size=32, act_order=order)
        made = Made(tmp_path / f"order{order}", recipe, {"gate_proj": (64, 64), "up_proj": (64, 64)})
        with rank_of(0, 1):
            layer = MergedColumnParallelLinear(
                64,
                [64, 64],
                bias=True,
                quant_config=made.config,
                prefix=made.at("gate_up_proj"),
                params_dtype=torch.float32,
            )
            layer.bias.data = torch.arange(128.0)
            load(layer, {0: made.tensors["gate_proj"], 1: made.tensors["up_proj"]})
        assert len(layer.w4_pieces) == (2 if order else 1)
        x = torch.randn(4, 64)
        plain = torch.cat([made.plain["gate_proj"], made.plain["up_proj"]])
        near(multiply(layer, x), x @ plain.t() + layer.bias)


def test_layer_that_is_plain_in_the_file_stays_vllms(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"up_proj": (64, 64)}, router=torch.randn(8, 64))
    with rank_of(0, 1):
        layer = ReplicatedLinear(64, 8, bias=False, quant_config=made.config, prefix=made.at("router"))
        unknown = ReplicatedLinear(64, 8, bias=False, quant_config=made.config, prefix="visual.merger")
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)
    assert isinstance(unknown.quant_method, UnquantizedLinearMethod)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"gate_proj": (64, 64), "up_proj": (64, 64)})
    with rank_of(0, 1):
        layer = MergedColumnParallelLinear(
            64, [64, 64], bias=False, quant_config=made.config, prefix=made.at("gate_up_proj")
        )
        incomplete = {name: t for name, t in made.tensors["up_proj"].items() if name != "scales"}
        with pytest.raises(CorruptError, match=r"up_proj\.scales"):
            load(layer, {0: made.tensors["gate_proj"], 1: incomplete})


def test_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"down_proj": (64, 64)})
    for (k, n), found in {(128, 64): "K = 64", (64, 128): "N = 64"}.items():
        with rank_of(0, 1):
            layer = ReplicatedLinear(k, n, bias=False, quant_config=made.config, prefix=made.at("down_proj"))
            with pytest.raises(CorruptError, match=rf"model\.layers\.0\.down_proj.*{found}"):
                load(layer, {None: made.tensors["down_proj"]})


def test_rows_that_do_not_fill_words_are_refused_by_name(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"down_proj": (64, 72)})
    with rank_of(0, 2):
        layer = RowParallelLinear(72, 64, bias=False, quant_config=made.config, prefix=made.at("down_proj"))
        with pytest.raises(UnsupportedError, match=r"down_proj.*multiples of 8"):
            load(layer, {None: made.tensors["down_proj"]})


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_bias_without_a_place(value: float, tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"down_proj": (64, 64)})
    tensors = {made.at("down_proj"): {**made.tensors["down_proj"], "bias": torch.full((64,), value)}}
    config = opened(save(tmp_path / "biased", tensors, FORMATS["gptq_v2"][1](made.truths["down_proj"])))
    with rank_of(0, 1):
        layer = ReplicatedLinear(64, 64, bias=False, quant_config=config, prefix=made.at("down_proj"))
        if value:
            with pytest.raises(UnsupportedError, match=r"down_proj\.bias"):
                load(layer, {None: made.tensors["down_proj"]})
        else:
            load(layer, {None: made.tensors["down_proj"]})


def test_unfilled_layer_is_refused(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"down_proj": (64, 64)})
    empty = {n: torch.zeros_like(t) if n != "g_idx" else t for n, t in made.tensors["down_proj"].items()}
    with rank_of(0, 1):
        layer = ReplicatedLinear(64, 64, bias=False, quant_config=made.config, prefix=made.at("down_proj"))
        with pytest.raises(CorruptError, match="all 0"):
            load(layer, {None: empty})


def test_loading_again_in_place_is_refused(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"down_proj": (64, 64)})
    with rank_of(0, 1):
        layer = ReplicatedLinear(64, 64, bias=False, quant_config=made.config, prefix=made.at("down_proj"))
        loader = layer.qweight.weight_loader
        load(layer, {None: made.tensors["down_proj"]})
        with pytest.raises(UsageError, match=r"down_proj\.qweight.*new engine"):
            loader(torch.nn.Parameter(torch.empty(0)), made.tensors["down_proj"]["qweight"])


def test_dummy_weights_have_the_layers_shape(tmp_path: Path) -> None:
    made = Made(tmp_path, Recipe("gptq_v2", group_size=32), {"down_proj": (64, 96)})
    with rank_of(0, 2):
        layer = RowParallelLinear(96, 64, bias=False, quant_config=made.config, prefix=made.at("down_proj"))
        layer.quant_method.dummy = True
        layer.quant_method.process_weights_after_loading(layer)
    output = multiply(layer, torch.randn(2, 48))
    assert output.shape == (2, 64)
    assert bool(output.isfinite().all())


def test_registered_tensors_are_the_operators_arguments() -> None:
    """In its order, and under the names of a prepared weight's fields."""
    assert set(TENSORS) <= {field.name for field in fields(Prepared)}
    names = [a.name for a in torch.ops.w4plugin.w4a16_linear.default._schema.arguments]
    assert names == ["x", *TENSORS, "bias", "n", "group_size", "backend"]


def test_what_was_compiled_for_enters_the_cache_key() -> None:
    """Equal layers give equal keys, another backend, order or merge another; a foreign config object is left alone."""
    one, same, other, more = {}, {}, {}, {"platform": 1}
    for config, layers in ((one, "ab"), (same, "ab"), (other, "ba"), (more, "ab")):
        for layer in layers:
            fingerprint.add(config, layer, (layer,))
    assert one == same
    assert one != other
    assert more == {"platform": 1, **one}
    fingerprint.add(object(), "a", ())


def test_method_is_known_to_vllms_second_generation_loaders() -> None:
    from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED

    assert W4LinearMethod.__name__ in WEIGHT_LOADER_V2_SUPPORTED
