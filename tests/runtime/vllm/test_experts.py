"""Layers of experts loaded and run on every rank of 1, 2 and 4, cut or spread, against the plain weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.vllm.checkpoints import FORMATS, Recipe
from tests.runtime.vllm.experts import AT, EXACT, Experts, Sizes, finish, load, make, rank, run
from tests.runtime.vllm.layers import opened, save
from w4plugin.errors import CorruptError, UnsupportedError, UsageError, W4Error
from w4plugin.kernels import PreparedExperts, Target
from w4plugin.runtime import mixture
from w4plugin.runtime.pieces import EXPERTS_TENSORS
from w4plugin.runtime.vllm import versions
from w4plugin.runtime.vllm.experts import (
    DequantizedExpertsMethod,
    W4ExpertsMethod,
    check_layer,
    refuse_without_kernels,
)
from w4plugin.runtime.vllm.inventory import Inventory


def near(found: torch.Tensor, wanted: torch.Tensor, bound: float = EXACT) -> None:
    assert found.shape == wanted.shape
    worst = float((found - wanted).abs().max())
    assert worst <= bound, f"differs by up to {worst}"


RECIPES = {
    "gptq symmetric": Recipe("gptq", group_size=32, sym=True),
    "gptq_v2": Recipe("gptq_v2", group_size=64),
    "gptq_v2 act-order": Recipe("gptq_v2", group_size=32, act_order="each"),
    "gptq one group": Recipe("gptq", group_size=192),
    "gptq short last group": Recipe("gptq_v2", group_size=128),
    "auto-round": Recipe("auto-round", group_size=32),
    "awq": Recipe("awq", group_size=64),
    "awq-gemv-fast": Recipe("awq-gemv-fast", group_size=64),
    "compressed-tensors": Recipe("compressed-tensors", group_size=32),
    "compressed-tensors act-order": Recipe("compressed-tensors act-order", group_size=32, act_order="each"),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_shards_recombine(name: str, ranks: int, tmp_path: Path) -> None:
    """192 inner rows in groups of 64 or 128 on 2 or 4 ranks cut groups; act-order scatters them over all ranks."""
    made = Experts.drawn(tmp_path, RECIPES[name])
    routed = made.routed()
    config, out = made.opened(), torch.zeros(5, made.sizes.hidden)
    for i in range(ranks):
        with rank(i, ranks):
            layer = load(make(config, made.sizes, ranks, made.words), made.stream())
        assert isinstance(layer.quant_method, W4ExpertsMethod)
        out += run(layer, *routed)
    near(out, made.reference(*routed))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", [Experts.drawn, Experts.stacked])
def test_spread_experts_recombine(form: Callable[..., Any], ranks: int, tmp_path: Path) -> None:
    """Six experts on four ranks are two, two, one and one; nothing of an absent expert is kept or computed."""
    made = Experts.drawn(tmp_path, Recipe("gptq_v2", group_size=32, act_order="each"))
    made = made.stacked() if form is Experts.stacked else made
    routed = made.routed(tokens=9)
    config, out, held = made.opened(), torch.zeros(9, made.sizes.hidden), []
    for i in range(ranks):
        with rank(i, ranks, whole=True):
            layer = load(make(config, made.sizes, ranks, made.words), made.stream())
        held.append(layer.gate_up.shape[0])
        out += run(layer, *routed)
    assert held == {2: [3, 3], 4: [2, 2, 1, 1]}[ranks]
    near(out, made.reference(*routed))


NAMES: dict[str, Callable[[Path], Experts]] = {
    "Mixtral's words": lambda p: Experts.drawn(p, Recipe("gptq", group_size=32), words="mixtral"),
    "gate and up in one": lambda p: Experts.drawn(p, Recipe("gptq_v2", group_size=32, act_order="each")).fused(),
    "stacks": lambda p: Experts.drawn(p, Recipe("gptq_v2", group_size=32, act_order="each")).stacked(),
    "stacks, gate and up in one": lambda p: Experts.drawn(p, Recipe("gptq", group_size=32)).fused().stacked(),
    "stacks of compressed-tensors": lambda p: Experts.drawn(p, Recipe("compressed-tensors", group_size=32)).stacked(),
    "stacks of awq": lambda p: Experts.drawn(p, Recipe("awq", group_size=32)).stacked(),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_names(name: str, ranks: int, tmp_path: Path) -> None:
    made = NAMES[name](tmp_path)
    routed = made.routed()
    config, out = made.opened(), torch.zeros(5, made.sizes.hidden)
    for i in range(ranks):
        with rank(i, ranks):
            out += run(load(make(config, made.sizes, ranks, made.words), made.stream()), *routed)
    near(out, made.reference(*routed))


@pytest.mark.parametrize("whole", [False, True])
def test_models_that_look_the_parameters_up_themselves(whole: bool, tmp_path: Path) -> None:
    """As vLLM's DeepSeek does: a mapping of names to parameters, and their weight loaders with expert and shard."""
    made = Experts.drawn(tmp_path, Recipe("gptq", group_size=32))
    made.tensors["2.up_proj"]["bias"] = torch.zeros(made.sizes.inner)
    shard_of = dict(zip(made.words, ("w1", "w3", "w2"), strict=True))
    routed, config, out = made.routed(), made.opened(), torch.zeros(5, made.sizes.hidden)
    for i in range(2):
        with rank(i, 2, whole=whole):
            runner = make(config, made.sizes, 2, made.words)
            params = dict(runner.routed_experts.named_parameters())
            for name, tensor in made.stream():
                expert, word, suffix = name.split(".")
                held = f"{'w2' if shard_of[word] == 'w2' else 'w13'}_{suffix}"
                loader, where = params[held].weight_loader, f"{AT}.{held}"
                taken = loader(
                    params[held], tensor, where, shard_id=shard_of[word], expert_id=int(expert), return_success=True
                )
                assert taken is (not whole or int(expert) // 3 == i)
            out += run(finish(runner), *routed)
    near(out, made.reference(*routed))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations(activation: str, tmp_path: Path) -> None:
    act = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda h: torch.nn.functional.gelu(h, approximate="tanh"),
    }[activation]
    made = Experts.drawn(tmp_path, Recipe("gptq", group_size=32))
    routed = made.routed()
    with rank(0, 1):
        layer = load(make(made.opened(), made.sizes, 1, made.words, activation=activation), made.stream())
    near(run(layer, *routed), made.reference(*routed, act=act))


def test_routing_weight_on_the_input(tmp_path: Path) -> None:
    made = Experts.drawn(tmp_path, Recipe("gptq", group_size=32), Sizes(topk=1))
    x, weights, ids = made.routed()
    with rank(0, 1):
        layer = load(make(made.opened(), made.sizes, 1, made.words, apply_router_weight_on_input=True), made.stream())
    near(run(layer, x, weights, ids), made.reference(x * weights, torch.ones_like(weights), ids))


def test_layer_holds_the_operators_tensors_and_no_source(tmp_path: Path) -> None:
    made = Experts.drawn(tmp_path, Recipe("gptq", group_size=32))
    with rank(0, 1):
        runner = make(made.opened(), made.sizes, 1, made.words)
        assert all(p.numel() == 0 for p in runner.parameters())
        layer = load(runner, made.stream())
    absent = {"gate_up_g_idx", "down_g_idx"}
    if layer.w4_experts == "cpu":  # its scales hold the zero points
        absent |= {"gate_up_zeros", "down_zeros"}
    assert {name for name, _ in layer.named_parameters()} == set(EXPERTS_TENSORS) - absent
    assert layer.quant_method.loading is None
    assert layer.w4_experts == layer.quant_method.backend
    with pytest.raises(UsageError, match=r"experts.*new engine"):
        list(runner.load_weights(made.stream()))


def test_registered_tensors_are_the_operators_arguments() -> None:
    names = [a.name for a in torch.ops.w4plugin.w4a16_experts.default._schema.arguments]
    assert names[:12] == ["x", "topk_weights", "topk_ids", *EXPERTS_TENSORS, "expert_map"]
    assert names[12:16] == ["inner", "gate_up_group_size", "down_group_size", "gated"]
    assert names[16:] == ["activation", "apply_router_weight_on_input", "backend"]
    assert set(EXPERTS_TENSORS) <= {*PreparedExperts.__dataclass_fields__}


def test_dummy_experts_have_the_layers_shape(tmp_path: Path) -> None:
    made = Experts.drawn(tmp_path, Recipe("gptq", group_size=32))
    with rank(0, 2):
        runner = make(made.opened(), made.sizes, 2, made.words)
        runner.routed_experts.quant_method.dummy = True
        layer = finish(runner)
    assert bool(run(layer, *made.routed()).isfinite().all())


def test_plain_experts_stay_vllms(tmp_path: Path) -> None:
    made = Experts.drawn(tmp_path, Recipe("gptq", group_size=32))
    packed = {f"model.layers.1.mlp.experts.{name}": t for name, t in made.tensors.items()}
    plain = {f"{AT}.{name}": {"weight": t} for name, t in made.plain.items()}
    config = opened(save(tmp_path, packed | plain, made.quant))
    inventory = config.inventory
    assert inventory is not None
    assert inventory.mixture(AT) is not None
    with rank(0, 1):
        assert config._experts_method(torch.nn.Module(), AT) is None
        with pytest.raises(CorruptError, match=r"layers\.2\.mlp\.experts"):
            config._experts_method(torch.nn.Module(), "model.layers.2.mlp.experts")


def _mixed(folder: Path, *names: str) -> Experts:
    """Experts of which some weights are plain, as calibration leaves those that no token reached."""
    made = Experts.drawn(folder, Recipe("gptq_v2", group_size=32, act_order="each"))
    return replace(made, tensors=made.tensors | {name: {"weight": made.plain[name].half()} for name in names})


def test_f8_mixed_experts_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"experts\.2\.up_proj: got a plain weight.*1 more.*MIXED_EXPERTS=deq"):
        _mixed(tmp_path, "2.up_proj", "3.up_proj").opened()


@pytest.mark.parametrize("whole", [False, True])
def test_f8_mixed_experts_become_plain_if_the_user_says_so(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters that vLLM's own method runs on, on either of two ranks."""
    monkeypatch.setenv(mixture.VARIABLE, "dequantize")
    names = ("2.gate_proj", "2.up_proj", "2.down_proj", "4.down_proj")
    made = _mixed(tmp_path, *names)
    config = made.opened()
    plain = made.plain | {name: made.plain[name].half().float() for name in names}
    for i in range(2):
        with rank(i, 2, whole=whole):
            runner = make(config, made.sizes, 2, made.words)
            layer = runner.routed_experts
            assert isinstance(layer.quant_method, DequantizedExpertsMethod)
            list(runner.load_weights(made.stream()))
            layer.quant_method.arrivals.check()
        inner = made.sizes.inner if whole else made.sizes.inner // 2
        cut = slice(0, inner) if whole else slice(i * inner, (i + 1) * inner)
        for place, e in enumerate(range(3 * i, 3 * i + 3) if whole else range(6)):
            gate, up, down = (plain[f"{e}.{word}"] for word in made.words)
            assert torch.equal(layer.w13_weight[place], torch.cat([gate[cut], up[cut]]))
            assert torch.equal(layer.w2_weight[place], down[:, cut])


def test_unknown_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mixture.VARIABLE, "ignore")
    with pytest.raises(UsageError, match=r"refuse \| dequantize"):
        mixture.policy()


def _other(recipe: Recipe, sizes: Sizes, name: str) -> Callable[[Experts], None]:
    """Take one weight from experts drawn otherwise."""

    def change(made: Experts) -> None:
        made.tensors[name] = Experts.drawn(made.folder, recipe, sizes, seed=9).tensors[name]

    return change


def _without(*names: str) -> Callable[[Experts], None]:
    return lambda made: [made.tensors.pop(name) for name in names] and None


def _twice(made: Experts) -> None:
    made.tensors["1.w1"] = made.tensors["1.gate_proj"]


def _unknown(made: Experts) -> None:
    made.tensors["1.proj_in"] = made.tensors.pop("1.gate_proj")


PLAIN = Recipe("gptq_v2", group_size=32)
HEADERS: dict[str, tuple[Callable[[Experts], None], type[W4Error], str]] = {
    "a missing expert": (
        _without("2.gate_proj", "2.up_proj", "2.down_proj"), CorruptError, r"experts\.2: got no tensors"
    ),
    "a missing last expert": (
        _without("5.gate_proj", "5.up_proj", "5.down_proj"), CorruptError, r"experts\.5: got no tensors"
    ),
    "a missing projection": (_without("3.up_proj"), CorruptError, r"experts\.3: got no up projection"),
    "an expert of another size": (
        _other(PLAIN, Sizes(inner=128), "4.gate_proj"), CorruptError, r"4\.gate_proj.*N = 128.*size of the others"
    ),
    "an expert of another group": (
        _other(replace(PLAIN, group_size=16), Sizes(), "4.down_proj"), UnsupportedError,
        r"4\.down_proj: got groups of 16; wanted groups of 32.*0\.down_proj.*dequantize",
    ),
    "up in other groups than gate": (
        _other(replace(PLAIN, group_size=16), Sizes(), "0.up_proj"), UnsupportedError,
        r"0\.up_proj: got groups of 16; wanted groups of 32.*0\.gate_proj",
    ),
    "a projection twice": (_twice, CorruptError, r"1\.w1: got expert 1 twice"),
    "a projection of an unknown name": (_unknown, UnsupportedError, r"1\.proj_in.*gate_proj \|.*dequantize"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_rule_a_layer_out(name: str, tmp_path: Path) -> None:
    """Before an engine starts."""
    change, error, message = HEADERS[name]
    made = Experts.drawn(tmp_path, PLAIN)
    change(made)
    inventory = Inventory.open(str(made.written()), None)

    class Config:
        num_experts = 6

    with pytest.raises(error, match=message):
        inventory.refuse_what_cannot_be_served(Config())


def test_expert_that_the_config_does_not_have(tmp_path: Path) -> None:
    made = Experts.drawn(tmp_path, PLAIN)
    inventory = Inventory.open(str(made.written()), None)

    class Config:
        num_local_experts = 4

    with pytest.raises(CorruptError, match=r"experts\.[45].*got an expert 5.*the 4 experts"):
        inventory.refuse_what_cannot_be_served(Config())
    with rank(0, 1), pytest.raises(CorruptError, match="got 6 experts; wanted 4"):
        make(made.opened(), Sizes(experts=4), 1, made.words)


def _own_order(made: Experts) -> None:
    """Another act-order for up than for gate."""
    made.tensors["1.up_proj"]["g_idx"] = made.tensors["1.up_proj"]["g_idx"].flip(0)


def _scales(dtype: torch.dtype) -> Callable[[Experts], None]:
    def change(made: Experts) -> None:
        made.tensors["1.down_proj"]["scales"] = made.tensors["1.down_proj"]["scales"].to(dtype)

    return change


def _nan(made: Experts) -> None:
    made.tensors["1.down_proj"]["scales"][0, 0] = float("nan")


def _unfilled(made: Experts) -> None:
    for suffix in ("qweight", "qzeros", "scales"):
        made.tensors["1.down_proj"][suffix] *= 0


DATA: dict[str, tuple[Callable[[Experts], None], type[W4Error], str]] = {
    "up with another act-order than gate": (_own_order, UnsupportedError, r"1\.up_proj.*g_idx.*1\.gate_proj.*deq"),
    "an expert with scales of another dtype": (
        _scales(torch.float32), UnsupportedError, r"1\.down_proj: got 6 groups of 32 with float32 scales; wanted.*16"
    ),
    "NaN scales": (_nan, CorruptError, r"1\.down_proj.*NaN"),
    "an expert that was never filled": (_unfilled, CorruptError, r"1\.down_proj.*all 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_data_that_rules_a_layer_out(name: str, tmp_path: Path) -> None:
    change, error, message = DATA[name]
    made = Experts.drawn(tmp_path, Recipe("gptq_v2", group_size=32, act_order="each"))
    change(made)
    with rank(0, 1), pytest.raises(error, match=message):
        load(make(made.opened(), made.sizes, 1, made.words), made.stream())


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    made = Experts.drawn(tmp_path, PLAIN)
    stream = ((n, t) for n, t in made.stream() if n != "3.down_proj.scales")
    with rank(0, 1), pytest.raises(CorruptError, match=r"no .*3\.down_proj\.scales"):
        load(make(made.opened(), made.sizes, 1, made.words), stream)


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    made = Experts.drawn(tmp_path, PLAIN)
    with rank(0, 1):
        runner = make(made.opened(), made.sizes, 1, made.words)
        with pytest.raises(UnsupportedError, match=r"experts\.3\.proj_in\.qweight"):
            list(runner.load_weights(iter([("3.proj_in.qweight", torch.zeros(1))])))
        with pytest.raises(CorruptError, match=r"3\.up_proj\.w_scale"):
            list(runner.load_weights(iter([("3.up_proj.w_scale", torch.zeros(1))])))


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_bias_of_an_expert(value: float, tmp_path: Path) -> None:
    """AutoGPTQ gives every expert a bias of zeros; another one has no place."""
    made = Experts.drawn(tmp_path, PLAIN)
    made.tensors["2.down_proj"]["bias"] = torch.full((64,), value)
    routed = made.routed()
    with rank(0, 1):
        runner = make(made.opened(), made.sizes, 1, made.words)
        if value:
            with pytest.raises(UnsupportedError, match=r"2\.down_proj\.bias"):
                load(runner, made.stream())
        else:
            near(run(load(runner, made.stream()), *routed), made.reference(*routed))


def test_sizes_that_are_not_the_architectures(tmp_path: Path) -> None:
    made = Experts.drawn(tmp_path, PLAIN)
    with rank(0, 1), pytest.raises(CorruptError, match=r"192 inner.*wanted 64 and 256"):
        make(made.opened(), Sizes(inner=256), 1, made.words)
    with rank(0, 16), pytest.raises(UnsupportedError, match=r"down_proj.*multiples of 8"):
        load(make(made.opened(), made.sizes, 16, made.words), made.stream())


def test_ranks_that_cannot_share_an_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM stops at an assertion without a word; spread experts stay whole."""
    inventory = Inventory.open(str(Experts.drawn(tmp_path, PLAIN).written()), None)
    monkeypatch.setattr(versions, "engine_arguments", lambda: SimpleNamespace(tensor_parallel_size=5))
    with pytest.raises(UnsupportedError, match=r"192 inner features on 5 ranks.*enable-expert-parallel"):
        inventory.refuse_what_cannot_be_served(object())
    asked = SimpleNamespace(tensor_parallel_size=5, enable_expert_parallel=True)
    monkeypatch.setattr(versions, "engine_arguments", lambda: asked)
    inventory.refuse_what_cannot_be_served(object())


def test_what_vllm_may_ask_of_a_layer_that_nothing_here_can_do(tmp_path: Path) -> None:
    made = Experts.drawn(tmp_path, PLAIN)
    asked = {
        "has_bias": ({"has_bias": True}, "with a bias"),
        "an activation": ({"activation": "swigluoai"}, "activation swigluoai"),
        "a limit": ({"swiglu_limit": 7.0}, r"swiglu_limit = 7\.0"),
    }
    for settings, message in asked.values():
        with rank(0, 1), pytest.raises(UnsupportedError, match=f"{AT}.*{message}"):
            make(made.opened(), made.sizes, 1, made.words, **settings)


def test_lora_would_go_over_the_experts(tmp_path: Path) -> None:
    made = Experts.drawn(tmp_path, PLAIN)
    config = made.opened()
    assert config.inventory is not None
    layer = config.inventory.mixture(AT)
    assert layer is not None
    asked = SimpleNamespace(has_bias=False, is_lora_enabled=True, num_logical_experts=6)
    with pytest.raises(UnsupportedError, match=r"LoRA.*merge the adapter"):
        check_layer(layer, asked)
    asked.is_lora_enabled = False
    check_layer(layer, asked)


def test_every_format_that_holds_experts_is_among_the_recipes() -> None:
    tried = {recipe.format for recipe in RECIPES.values()}
    assert set(FORMATS) - tried <= {"awq-gemv", "awq-marlin", "gptq-marlin"}  # need other sizes; decoded the same way


def test_a_gpu_without_kernels_for_experts_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"experts packed in 4 bits.*sm_75"):
        refuse_without_kernels("layers.0.mlp.experts", Target(torch.device("cuda"), torch.float16, "sm_75"))
    for arch in ("sm_80", "sm_90"):
        refuse_without_kernels("layers.0.mlp.experts", Target(torch.device("cuda"), torch.float16, arch))
    refuse_without_kernels("layers.0.mlp.experts", Target(torch.device("cpu"), torch.float16, "cpu"))
