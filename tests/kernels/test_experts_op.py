"""The experts' operator as torch sees it, and its errors: schema, fake, compile, CUDA graph, no tokens, bad input."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import activations
from tests.kernels.expert_cases import (
    ExpertSample,
    Layer,
    check_experts,
    expected,
    expert_backends,
    expert_sample,
    routing,
)
from w4plugin import kernels
from w4plugin.errors import UnsupportedError, UsageError, W4Error
from w4plugin.kernels import PreparedExperts
from w4plugin.kernels.moe import op
from w4plugin.tensor import W4Tensor

F16, BF16 = torch.float16, torch.bfloat16
LAYER = Layer(4, 64, 32, 32)


def arguments(x: Tensor, p: PreparedExperts, w: Tensor, ids: Tensor, where: Tensor | None = None) -> tuple[object, ...]:
    return (
        x, w, ids, p.gate_up, p.gate_up_scales, p.gate_up_zeros, p.gate_up_g_idx, p.down, p.down_scales, p.down_zeros,
        p.down_g_idx, where, p.I, p.gate_up_group_size, p.down_group_size, p.gated, "silu", False, p.backend,
    )  # fmt: skip


def each(device: torch.device, layer: Layer = LAYER) -> list[tuple[ExpertSample, PreparedExperts]]:
    s = expert_sample(layer, device)
    return [
        (s, kernels.prepare_experts(s.gate_up, s.down, dtype=F16, backend=name, gated=layer.gated))
        for name in expert_backends(device, F16, s)
    ]


def test_opcheck(device: torch.device) -> None:
    for layer in (LAYER, Layer(3, 64, 32, 16, False, order="act")):
        for _, p in each(device, layer):
            x = activations(3, 64, F16, device)
            w, ids = routing(3, 2, layer.experts, device)
            where = torch.arange(layer.experts, dtype=torch.int32, device=device)
            torch.library.opcheck(torch.ops.w4plugin.w4a16_experts.default, arguments(x, p, w, ids))
            torch.library.opcheck(torch.ops.w4plugin.w4a16_experts.default, arguments(x, p, w, ids.long(), where))


def test_a_second_registration_changes_nothing(device: torch.device) -> None:
    op.register()
    assert len(op._LIBRARIES) == 1
    spec = importlib.util.spec_from_file_location("w4plugin_moe_again", op.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again._LIBRARIES == []


def test_compiled_whole_with_any_number_of_tokens(device: torch.device) -> None:
    for s, p in each(device):
        seen: list[object] = []

        def backend(graph: torch.fx.GraphModule, inputs: object, seen: list[object] = seen) -> object:
            seen.append(graph)
            return graph.forward

        run = torch.compile(
            lambda x, w, ids, p=p: kernels.experts(x, p, w, ids) * 2, fullgraph=True, dynamic=True, backend=backend
        )
        for t in (5, 3, 17, 9):  # no size of the weight, or dynamo would take them for one
            x = activations(t, 64, F16, device)
            w, ids = routing(t, 2, 4, device)
            got = run(x, w, ids)
            assert torch.equal(got, kernels.experts(x, p, w, ids) * 2), p.backend
            check_experts(got / 2, expected(s, x, w, ids), p.backend)
        assert len(seen) == 1, f"{p.backend}: compiled {len(seen)} times for four numbers of tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 300, 2100])
def test_cuda_graph(tokens: int, device: torch.device) -> None:
    """Captured once, replayed with other tokens and other routing, interleaved with eager calls."""
    layer = Layer(8, 512, 256)
    for s, p in each(device, layer):
        x = activations(tokens, layer.hidden, F16, device)
        w, ids = routing(tokens, 3, layer.experts, device)
        kernels.experts(x, p, w, ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [kernels.experts(x, p, w, ids) for _ in range(3)]
        for seed in range(4):
            x.copy_(activations(tokens, layer.hidden, F16, device, seed=10 + seed))
            fresh, others = routing(tokens, 3, layer.experts, device, seed=20 + seed)
            w.copy_(fresh)
            ids.copy_(others if seed < 3 else torch.full_like(others, -1))
            want = kernels.experts(x, p, w, ids)
            graph.replay()
            torch.cuda.synchronize()
            for out in outs:
                assert torch.equal(out, want), p.backend
            check_experts(want, expected(s, x, w, ids), p.backend)


@pytest.mark.gpu
def test_no_synchronisation(device: torch.device) -> None:
    for order in (None, "act", "random"):
        for _, p in each(device, Layer(4, 256, 128, 32, order=order)):
            for tokens in (1, 16, 300):
                x = activations(tokens, 256, F16, device)
                w, ids = routing(tokens, 2, 4, device)
                where = torch.arange(4, dtype=torch.int32, device=device)
                for m in (None, where):
                    kernels.experts(x, p, w, ids, expert_map=m)
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                    try:
                        kernels.experts(x, p, w, ids, expert_map=m)
                    finally:
                        torch.cuda.set_sync_debug_mode("default")


def test_no_tokens_and_no_experts_for_them(device: torch.device) -> None:
    for _, p in each(device):
        x = torch.empty(0, 64, dtype=F16, device=device)
        w, ids = routing(0, 2, 4, device)
        assert kernels.experts(x, p, w, ids).shape == (0, 64)
        x = activations(3, 64, F16, device)
        got = kernels.experts(
            x, p, torch.empty(3, 0, device=device), torch.empty(3, 0, dtype=torch.int32, device=device)
        )
        assert got.shape == (3, 64)
        assert not got.any()


def test_strided_activations(device: torch.device) -> None:
    wide = activations(12, 2 * 64 + 24, F16, device)
    views = {
        "rows apart": wide[:, 8:72],
        "rows at odd addresses": wide[:, 3:67],
        "every second row": wide[::2, :64],
        "columns apart": wide[:, :128:2],
        "transposed": activations(64, 12, F16, device).t(),
        "expanded": wide[:1, :64].expand(12, 64),
    }
    for s, p in each(device):
        for name, x in views.items():
            w, ids = routing(x.shape[0], 2, 4, device)
            wide_ids = torch.stack([ids, ids], -1)[..., 0]
            got = kernels.experts(x, p, torch.stack([w, w], -1)[..., 0], wide_ids)
            check_experts(got, expected(s, x, w, ids), f"{p.backend}: {name}")
            assert got.is_contiguous()


def refuse(call: object, *words: str, kind: type[W4Error] = UsageError) -> None:
    with pytest.raises(kind) as caught:
        call()  # type: ignore[operator]
    for word in words:
        assert word in str(caught.value), f"{caught.value} does not say {word}"


def test_bad_calls(device: torch.device) -> None:
    x = activations(3, 64, F16, device)
    w, ids = routing(3, 2, 4, device)
    cases: list[tuple[dict[str, object], tuple[str, ...]]] = [
        ({"x": x[:, :32]}, ("x", "[3, 32]", "64")),
        ({"x": x[0]}, ("x", "[64]", "[T, H]")),
        ({"x": x.double()}, ("x", "float64", "float16")),
        ({"ids": ids[:2]}, ("topk_ids", "[2, 2]", "[3, topk]")),
        ({"ids": ids.float()}, ("topk_ids", "float32", "int32")),
        ({"w": w.half()}, ("topk_weights", "float16", "float32")),
        ({"w": w[:, :1]}, ("topk_weights", "[3, 1]", "[3, 2]")),
        ({"expert_map": ids}, ("expert_map", "[3, 2]")),
        ({"activation": "relu2"}, ("activation", "'relu2'", "gelu_tanh")),
        ({"activation": "swigluoai"}, ("activation", "'swigluoai'", "silu")),
    ]
    for _, p in each(device):
        for change, words in cases:
            a: dict[str, object] = {"x": x, "w": w, "ids": ids, **change}
            refuse(lambda a=a, p=p: kernels.experts(a.pop("x"), p, a.pop("w"), a.pop("ids"), **a), *words)
        refuse(lambda p=p: op._impl(*arguments(x[:, :32].contiguous(), p, w, ids)), "32", "64")  # past experts()
        other = replace(p, backend="fast")
        refuse(lambda other=other: kernels.experts(x, other, w, ids), "backend", "'fast'", "plain")


def test_devices(device: torch.device) -> None:
    """Called below the dispatcher, which takes any meta tensor for a question about shapes."""
    _, p = each(device)[0]
    x = activations(3, 64, F16, device)
    w, ids = routing(3, 2, 4, device)
    for place, name in ((1, "topk_weights"), (2, "topk_ids"), (4, "gate_up_scales"), (7, "down")):
        elsewhere = list(arguments(x, p, w, ids))
        elsewhere[place] = elsewhere[place].to("meta")  # type: ignore[attr-defined]
        refuse(lambda a=elsewhere: op._impl(*a), name, "meta", str(device))


def test_ids_out_of_range(device: torch.device) -> None:
    """Never a wrong read: named where the host may look, nobody otherwise."""
    for s, p in each(device):
        x = activations(3, 64, F16, device)
        w, ids = routing(3, 2, 4, device)
        beyond = ids.clone()
        beyond[1, 0], beyond[2, 1] = 4, 2**31 - 1
        if p.backend in ("plain", "cpu") and device.type == "cpu":
            refuse(lambda x=x, p=p, w=w, ids=beyond: kernels.experts(x, p, w, ids), "topk_ids", "expert 4", "0..3")
            refuse(lambda x=x, p=p, w=w, ids=ids - 5: kernels.experts(x, p, w, ids), "topk_ids", "expert -")
            continue
        for kind in (torch.int32, torch.int64):
            outside = beyond.to(kind)
            if kind == torch.int64:
                outside[2, 1] = 2**40
            outside[0, 1] = -7
            none = torch.where((outside >= 0) & (outside < 4), outside, -1)
            check_experts(kernels.experts(x, p, w, outside), expected(s, x, w, none), p.backend)
            where = torch.tensor([0, 1, 2, 9], dtype=torch.int32, device=device)  # a map that points past the stack
            none = torch.where((outside >= 0) & (outside < 3), outside, -1)
            check_experts(kernels.experts(x, p, w, outside, expert_map=where), expected(s, x, w, none), p.backend)


def test_bad_weights(device: torch.device) -> None:
    s = expert_sample(LAYER, device)
    one = s.gate_up.expert(0)
    run = kernels.prepare_experts
    refuse(lambda: run(one, s.down, dtype=F16), "prepare_experts", "two stacks")
    fewer = W4Tensor.stack_experts([s.down.expert(e) for e in range(3)])
    refuse(lambda: run(s.gate_up, fewer, dtype=F16), "prepare_experts", "[3, ", "same number of experts")
    refuse(lambda: run(s.gate_up, s.down, dtype=F16, gated=False), "N = 64", "N = 32", "without a gate")
    refuse(lambda: run(s.gate_up, s.down.shard_n(0, 32), dtype=F16), "K = 64", "K = 32")
    refuse(lambda: run(s.gate_up, s.down, dtype=F16, backend="fast"), "'fast'", "plain")
    refuse(lambda: run(s.gate_up, s.down, dtype=torch.float64), "float64", "plain: ", kind=UnsupportedError)
    gate, up = s.gate_up.shard_n(0, 32), s.gate_up.shard_n(32, 64)
    refuse(lambda: run((gate, up.shard_n(0, 16)), s.down, dtype=F16), "gate, up", "one shape")


def test_gate_and_up_with_different_orders(device: torch.device) -> None:
    s = expert_sample(Layer(3, 64, 32, 16, order="act"), device)
    gate, up = s.gate_up.shard_n(0, 32), s.gate_up.shard_n(32, 64)
    for name in expert_backends(device, F16, s):
        together = kernels.prepare_experts((gate, up), s.down, dtype=F16, backend=name)
        whole = kernels.prepare_experts(s.gate_up, s.down, dtype=F16, backend=name)
        assert all(torch.equal(t, together.tensors()[k]) for k, t in whole.tensors().items()), name
    assert up.g_idx is not None
    other = up.g_idx.clone()
    other[1] = other[1].flip(0)
    refuse(
        lambda: kernels.prepare_experts((gate, replace(up, g_idx=other)), s.down, dtype=F16),
        "g_idx", "1 of 3 experts", "expert 1", "dequantised",
        kind=UnsupportedError,
    )  # fmt: skip


def test_nbytes_counts_what_is_held(device: torch.device) -> None:
    s = expert_sample(LAYER, device)
    p = kernels.prepare_experts(s.gate_up, s.down, dtype=F16, backend="plain")
    assert p.nbytes() == 4 * (64 * 64 // 2 + 2 * 64 * 3 + 32 * 64 // 2 + 1 * 64 * 3)
