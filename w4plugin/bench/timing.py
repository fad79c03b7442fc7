"""Time of a call as a model would see it: in a CUDA graph or on the host, with weights that come from memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor


def microseconds(call: Callable[[int], Tensor], copies: int, budget_ms: float, device: str = "cuda") -> float:
    """Median time of a call; on a GPU over replays of one graph.

    Args:
        call: ``call(i)`` works on copy i of its weight; the copies together should exceed the cache.
        copies: how many there are.
        budget_ms: repeat at least so long, and at least three times.
        device: "cuda" or "cpu".
    """
    if device == "cpu":
        return _on_host(call, copies, budget_ms)
    for i in range(2):
        call(i % copies)
    torch.cuda.synchronize()
    start = time.perf_counter()
    call(0)
    torch.cuda.synchronize()
    calls = max(2, min(max(copies, 20), int(10e-3 / max(time.perf_counter() - start, 1e-6))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % copies)
    graph.replay()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_ms and len(times) < 50):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) * 1e3 / calls


def _on_host(call: Callable[[int], Tensor], copies: int, budget_ms: float) -> float:
    call(0)
    times: list[float] = []
    while len(times) < 3 or (sum(times) * 1e3 < budget_ms and len(times) < 1000):
        start = time.perf_counter()
        call(len(times) % copies)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def bandwidth(device: str = "cuda") -> float:
    """Bytes a second that a kernel reads at best: words streamed into a reduction, 1 GiB of them (256 MiB on a CPU)."""
    if device == "cpu":
        floats = torch.ones(2**26)
        return floats.numel() * 4 / (microseconds(lambda _: floats.amax(), 1, 200, device) * 1e-6)
    import triton

    from w4plugin.bench.stream_kernel import stream

    words = torch.ones(2**28, dtype=torch.int32, device="cuda")
    block, each = 4096, 8
    programs = triton.cdiv(words.numel(), block * each)
    out = torch.empty(programs, dtype=torch.int32, device="cuda")

    def call(_: int) -> Tensor:
        stream[(programs,)](words, out, block, each, num_warps=8)
        return out

    return words.numel() * 4 / (microseconds(call, 1, 100) * 1e-6)


def matrix_rate(dtype: torch.dtype, device: str = "cuda") -> float:
    """Operations a second of the dense library on a large square product."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / (microseconds(lambda _: a @ b, 1, 200, device) * 1e-6)
