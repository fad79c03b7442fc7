"""The operator as torch sees it: schema, fake, compile, CUDA graph, gradient, leading dimensions, strides, cost."""

from __future__ import annotations

import importlib.util
import time

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import Case, Sample, activations, backends, check, sample
from w4plugin import kernels
from w4plugin.kernels import op
from w4plugin.kernels.backend import Prepared

F16, BF16 = torch.float16, torch.bfloat16
CASE = Case(256, 48, 64)


def arguments(x: Tensor, p: Prepared, bias: Tensor | None = None) -> tuple[object, ...]:
    return (x, p.qweight, p.scales, p.zeros, p.g_idx, p.counters, bias, p.N, p.group_size, p.backend)


def each(device: torch.device, dtype: torch.dtype = F16, case: Case = CASE) -> list[tuple[Sample, Prepared]]:
    s = sample(case, device)
    return [(s, kernels.prepare(s.weight, dtype=dtype, backend=name)) for name in backends(device, dtype, s.weight)]


def test_opcheck(device: torch.device) -> None:
    for case in (CASE, Case(256, 48, 64, order="act"), Case(256, 48, 64, False)):
        for _, p in each(device, case=case):
            x = activations(3, case.k, F16, device)
            bias = activations(1, case.n, F16, device)[0]
            torch.library.opcheck(torch.ops.w4plugin.w4a16_linear.default, arguments(x, p))
            torch.library.opcheck(torch.ops.w4plugin.w4a16_linear.default, arguments(x.requires_grad_(), p, bias))
            if op.registry.get(p.backend).backward is not None:
                grad = activations(3, case.n, F16, device)
                inputs = (grad, p.qweight, p.scales, p.zeros, p.g_idx, p.K, p.group_size, p.backend)
                torch.library.opcheck(torch.ops.w4plugin.w4a16_linear_backward.default, inputs)


def test_h13_a_second_registration_changes_nothing(device: torch.device) -> None:
    """A plugin loaded twice, or a second copy of the package in the process."""
    op.register()
    assert len(op._LIBRARIES) == 1
    spec = importlib.util.spec_from_file_location("w4plugin_again", op.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again._LIBRARIES == []
    s, p = each(device)[0]
    x = activations(2, CASE.k, F16, device)
    check(kernels.linear(x, p), x, s.exact)


def test_compiled_whole_with_any_m(device: torch.device) -> None:
    for s, p in each(device):
        seen: list[object] = []

        def backend(graph: torch.fx.GraphModule, inputs: object, seen: list[object] = seen) -> object:
            seen.append(graph)
            return graph.forward

        run = torch.compile(lambda x, p=p: kernels.linear(x, p) * 2, fullgraph=True, dynamic=True, backend=backend)
        for m in (5, 3, 17, 9):  # no size of the weight, or dynamo would take them for one
            x = activations(m, CASE.k, F16, device)
            assert torch.equal(run(x), kernels.linear(x, p) * 2), p.backend
            check(run(x) / 2, x, s.exact, where=p.backend)
        assert len(seen) == 1, f"{p.backend}: compiled {len(seen)} times for four values of M"


@pytest.mark.gpu
def test_compiled_by_inductor(device: torch.device) -> None:
    for s, p in each(device):
        run = torch.compile(lambda x, p=p: kernels.linear(x, p).relu(), fullgraph=True, dynamic=True)
        for m in (5, 3, 17):
            x = activations(m, CASE.k, F16, device)
            assert torch.equal(run(x), kernels.linear(x, p).relu()), p.backend
            check(kernels.linear(x, p), x, s.exact, where=p.backend)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 64, 256, 2100])
def test_cuda_graph(m: int, device: torch.device) -> None:
    """Captured once, replayed with other inputs, interleaved with eager calls."""
    case = Case(4096, 1024)
    for s, p in each(device, case=case):
        x = activations(m, case.k, F16, device)
        kernels.linear(x, p)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [kernels.linear(x, p) for _ in range(3)]
        for seed in range(3):
            x.copy_(activations(m, case.k, F16, device, seed=10 + seed))
            want = kernels.linear(x, p)
            graph.replay()
            torch.cuda.synchronize()
            for out in outs:
                assert torch.equal(out, want), p.backend
            check(want, x, s.exact, where=p.backend)


@pytest.mark.gpu
def test_no_synchronisation(device: torch.device) -> None:
    for order in (None, "act", "random"):
        for _, p in each(device, case=Case(512, 256, 64, order=order)):
            for m in (1, 64, 2100):
                x = activations(m, 512, F16, device)
                kernels.linear(x, p)
                torch.cuda.set_sync_debug_mode("error")
                try:
                    kernels.linear(x, p)
                finally:
                    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_layers_on_two_streams(device: torch.device) -> None:
    case = Case(4096, 1024)
    for name in backends(device, F16):
        weights = [sample(case, device, seed=i) for i in range(2)]
        prepared = [kernels.prepare(s.weight, dtype=F16, backend=name) for s in weights]
        x = activations(1, case.k, F16, device)
        want = [kernels.linear(x, p) for p in prepared]
        streams = [torch.cuda.Stream() for _ in prepared]
        torch.cuda.synchronize()
        got: list[list[Tensor]] = [[], []]
        for _ in range(200):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    got[i].append(kernels.linear(x, prepared[i]))
        torch.cuda.synchronize()
        assert all(torch.equal(y, want[i]) for i in range(2) for y in got[i]), name


def test_no_rows_and_leading_dimensions(device: torch.device) -> None:
    for s, p in each(device):
        for shape in ((0,), (2, 0), (3, 0, 5)):
            assert kernels.linear(torch.empty(*shape, CASE.k, dtype=F16, device=device), p).shape == (*shape, CASE.n)
        x = activations(6, CASE.k, F16, device)
        flat = kernels.linear(x, p)
        check(flat, x, s.exact, where=p.backend)
        assert torch.equal(kernels.linear(x.view(2, 3, CASE.k), p), flat.view(2, 3, CASE.n))
        assert torch.equal(kernels.linear(x[:1].view(CASE.k), p), kernels.linear(x[:1], p)[0])


def test_strided_activations(device: torch.device) -> None:
    wide = activations(12, 2 * CASE.k + 24, F16, device)
    views = {
        "rows apart": wide[:, 8 : 8 + CASE.k],
        "rows at odd addresses": wide[:, 3 : 3 + CASE.k],
        "every second row": wide[::2, : CASE.k],
        "columns apart": wide[:, : 2 * CASE.k : 2],
        "transposed": activations(CASE.k, 12, F16, device).t(),
        "expanded": wide[:1, : CASE.k].expand(12, CASE.k),
    }
    for s, p in each(device):
        for name, x in views.items():
            check(kernels.linear(x, p), x, s.exact, where=f"{p.backend}: {name}")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("order", [None, "act", "random"])
def test_gradient(order: str | None, dtype: torch.dtype, device: torch.device) -> None:
    case = Case(128, 48, 32, order=order)
    for s, p in each(device, dtype, case):
        if op.registry.get(p.backend).backward is None:
            continue
        x = activations(2 * 5, case.k, dtype, device).view(2, 5, case.k).requires_grad_()
        bias = activations(1, case.n, dtype, device)[0].requires_grad_()
        dy = activations(2 * 5, case.n, dtype, device, seed=7).view(2, 5, case.n)
        kernels.linear(x, p, bias).backward(dy)
        assert x.grad is not None
        assert bias.grad is not None
        check(x.grad.view(10, -1), dy.view(10, -1), s.exact.t(), where=p.backend)
        torch.testing.assert_close(bias.grad, dy.view(10, -1).sum(0))


def test_gradient_in_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight larger than the scratch: pieces of columns, forwards (many rows) and backwards."""
    from w4plugin.kernels import plain, portable, tiles

    monkeypatch.setattr(portable, "SCRATCH", 2 * 256 * 16)
    monkeypatch.setattr(plain, "SCRATCH", 256 * 16)
    monkeypatch.setattr(tiles, "choose", lambda problem: None)
    for s, p in each(device):
        x = activations(5, CASE.k, F16, device).requires_grad_()
        bias = activations(1, CASE.n, F16, device)[0]
        for b in (None, bias):
            x.grad = None
            y = kernels.linear(x, p, b)
            check(y.detach(), x.detach(), s.exact, b, p.backend)
            if op.registry.get(p.backend).backward is not None:
                dy = activations(5, CASE.n, F16, device, seed=7)
                y.backward(dy)
                assert x.grad is not None
                check(x.grad, dy, s.exact.t(), where=p.backend)


def test_a_cached_call_costs_little_python() -> None:
    """The operator's own share of a call, with a backend that does nothing: under 15 us on a slow core."""
    from w4plugin.kernels import registry
    from w4plugin.kernels.backend import Backend

    s = sample(CASE, torch.device("cpu"))
    p = kernels.prepare(s.weight, dtype=F16, backend="plain")
    x = activations(1, CASE.k, F16, torch.device("cpu"))
    out = torch.empty(1, CASE.n, dtype=F16)
    idle = Backend("plain", lambda *_: None, lambda _: p, lambda _: s.weight, lambda *_: out)
    real = registry.get
    registry.get = lambda name: idle  # type: ignore[assignment]
    try:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(2000):
                kernels.linear(x, p)
            best = min(best, (time.perf_counter() - start) / 2000)
    finally:
        registry.get = real  # type: ignore[assignment]
    assert best < 15e-6, f"{best * 1e6:.1f} us"


@pytest.mark.gpu
@pytest.mark.alone
def test_a_cached_launch_costs_little_python(device: torch.device) -> None:
    """Everything a call does on the host, launch included, with kernels too small to hide it."""
    s = sample(Case(128, 64, 128), device)
    p = kernels.prepare(s.weight, dtype=F16)
    x = activations(1, 128, F16, device)
    dense = s.weight.dequantize().t().contiguous()

    def cost(call: object) -> float:
        best = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(500):
                call()  # type: ignore[operator]
            best = min(best, (time.perf_counter() - start) / 500)
        return best

    ours = cost(lambda: kernels.linear(x, p))
    theirs = cost(lambda: torch.nn.functional.linear(x, dense))
    print(f"host time of a call: {ours * 1e6:.1f} us, a dense linear {theirs * 1e6:.1f} us")
    assert ours - theirs < 15e-6, f"{ours * 1e6:.1f} us against {theirs * 1e6:.1f} us"
