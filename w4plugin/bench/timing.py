"""Time of a call as a model would see it: in a CUDA graph or on the host, with weights that come from memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

LAUNCHES = (
    (1024, 1, 4), (1024, 4, 4), (2048, 2, 4), (2048, 4, 8), (4096, 1, 8), (4096, 2, 8), (4096, 4, 8), (4096, 8, 8),
)  # fmt: skip
"""Words a block, blocks a program and warps with which reading alone is tried; as many programs as that takes."""

WAVES = (2, 4)
"""Programs a multiprocessor with which it is tried too, in blocks of 4096 words: all of them run at once."""


def cold_copies(size: int, cold_mb: float) -> int:
    """How many copies of a weight of so many bytes to take in turn for it to come from memory, two at least."""
    return int(min(400, max(2, -(-cold_mb * 2**20 // size))))


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
    words = torch.ones(1, 2**28, dtype=torch.int32, device="cuda")
    return words.numel() * 4 / (microseconds(reader(words, 4096, 8, 8), 1, 100) * 1e-6)


def reader(words: Tensor, block: int, each: int, warps: int) -> Callable[[int], Tensor]:
    """``reader(...)(i)`` reads ``words[i]`` on a GPU and keeps one word a program."""
    from w4plugin.bench.stream_kernel import stream

    count = words.shape[1]
    programs, whole = -(-count // (block * each)), count % (block * each) == 0
    out = torch.empty(programs, dtype=torch.int32, device=words.device)

    def call(i: int) -> Tensor:
        stream[(programs,)](words[i], out, count, block, each, whole, num_warps=warps)
        return out

    return call


def reading(
    shapes: Iterable[tuple[int, int]], cold_mb: float, budget_ms: float = 4, device: str = "cuda"
) -> dict[str, float]:
    """Microseconds in which the packed words of each K x N are read, by the best launch, the key being "KxN".

    Args:
        shapes: (K, N) of each weight.
        cold_mb: as of a plan: copies of a weight's words take turns through so many MiB.
        budget_ms: time each launch at least so long.
        device: "cuda" or "cpu".
    """
    if device == "cuda":
        few = torch.zeros(1, 2**16, dtype=torch.int32, device=device)
        for launch in LAUNCHES:
            reader(few, *launch)(0)  # compiles, while the device idles
        wake()
    found = {}
    for k, n in shapes:
        count = k // 8 * n
        copies = cold_copies(4 * count, cold_mb)
        words = torch.randint(-(2**31), 2**31 - 1, (copies, count), dtype=torch.int32, device=device)
        if device == "cuda":
            best = min(microseconds(reader(words, *launch), copies, budget_ms) for launch in launches(count))
        else:
            best = microseconds(lambda i, words=words: words[i].amax(), copies, budget_ms, device)  # type: ignore[misc]
        found[f"{k}x{n}"] = best
    return found


def launches(count: int) -> list[tuple[int, int, int]]:
    """What to try for so many words."""
    at_once = [torch.cuda.get_device_properties(0).multi_processor_count * each for each in WAVES]
    return list(dict.fromkeys([*LAUNCHES, *((4096, -(-count // (4096 * programs)), 8) for programs in at_once)]))


def wake() -> None:
    """Half a second of products, for a GPU that may have idled: its clocks are low then.

    They leave it at its power limit, which reading bears and a kernel that also unpacks does not.
    """
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        for _ in range(50):
            x @ x
        torch.cuda.synchronize()


def matrix_rate(dtype: torch.dtype, device: str = "cuda") -> float:
    """Operations a second of the dense library on a large square product."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / (microseconds(lambda _: a @ b, 1, 200, device) * 1e-6)
