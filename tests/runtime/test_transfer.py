"""Copies to a device through buffers: nothing lost, nothing overwritten early, errors heard.

Without a GPU a buffer is played by one that copies as late as it may: when it is waited for.

python3 -m pytest -m gpu tests/runtime/test_transfer.py
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from w4plugin.runtime import transfer
from w4plugin.runtime.transfer import CHUNK, PAGE, Later, Stage, as_bytes, parts, release, staged, to_device

SMALL = 2 * PAGE
"""Bytes of a buffer here, so that many parts are little data."""

CUDA = torch.device("cuda")
CPU = torch.device("cpu")
DTYPES = (torch.int32, torch.float16, torch.bfloat16, torch.uint8, torch.float32)


@dataclass
class Late:
    """A buffer whose copy happens when it is waited for: one that is filled again before that sends the wrong bytes."""

    memory: Tensor
    target: Tensor | None = None

    def send(self, target: Tensor) -> None:
        assert self.target is None, "sent again before the copy before was waited for"
        self.target = target

    def wait(self) -> None:
        if self.target is not None:
            self.target.copy_(self.memory[: self.target.numel()])
            self.target = None


@dataclass
class Device:
    """Makes late buffers, and finishes their copies as a device would some time."""

    chunk: int = SMALL
    made: list[Late] = field(default_factory=list)

    def make(self) -> Late:
        self.made.append(Late(torch.full((self.chunk,), 0xEE, dtype=torch.uint8)))
        return self.made[-1]

    def synchronize(self) -> None:
        for buffer in self.made:
            buffer.wait()


def noise(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def stage(device: Device, threads: int = 3, buffers: int = 4) -> Stage:
    return Stage(device.make, threads, buffers)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """``to_device`` to "cuda" with late buffers of the real size, the copy being made on the host."""
    device, empty = Device(CHUNK), torch.empty

    class Current:
        def __init__(self, device: torch.device) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    def on_host(*size: Any, device: Any = None, **rest: Any) -> Tensor:
        return empty(*size, device="cpu", **rest)

    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", on_host)
    monkeypatch.setattr(transfer, "pinned", device.make)
    monkeypatch.setattr(transfer, "_stages", {})
    yield device
    release()


@pytest.mark.parametrize("chunk", [1, 100, PAGE, SMALL, CHUNK])
@pytest.mark.parametrize("threads", [1, 3, 4])
def test_parts_cover_all_bytes_in_order(chunk: int, threads: int) -> None:
    for size in (0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 6 * chunk + 5, 25 * chunk):
        cut = parts(size, chunk, threads)
        assert [at for part in cut for at in (part.start, part.stop)][1:-1:2] == [part.start for part in cut[1:]]
        assert not cut or (cut[0].start, cut[-1].stop) == (0, size)
        assert bool(cut) == bool(size)
        assert all(0 < part.stop - part.start <= chunk for part in cut)


def test_parts_are_shared_out_evenly() -> None:
    assert [part.stop - part.start for part in parts(6 * CHUNK, CHUNK, 4)] == [3 << 20] * 8
    assert [part.stop - part.start for part in parts(CHUNK, CHUNK, 4)] == [1 << 20] * 4


@pytest.mark.parametrize("size", [0, 1, SMALL - 1, SMALL, SMALL + 1, 4 * SMALL, 61 * SMALL + 17])
def test_all_bytes_arrive_and_the_source_may_change_after_return(device: Device, size: int) -> None:
    source, target = noise(size), torch.zeros(size, dtype=torch.uint8)
    wanted = source.clone()
    at_work = stage(device)
    assert at_work.send(source, target)
    source.fill_(0xAA)
    device.synchronize()
    assert torch.equal(target, wanted)
    assert len(device.made) == len(at_work.free) == 4
    at_work.release()


def test_a_buffer_is_waited_for_before_it_is_filled_again(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    copy = np.copyto

    def watched(buffer: Any, part: Any) -> None:
        (found,) = (late for late in device.made if late.memory.data_ptr() == buffer.ctypes.data)
        assert found.target is None, "the device still reads this"
        filled.append(len(part))
        copy(buffer, part)

    monkeypatch.setattr(np, "copyto", watched)
    at_work = stage(device, threads=4, buffers=5)
    for seed in range(3):  # the second call finds buffers that the first has sent
        source, target = noise(40 * SMALL, seed), torch.zeros(40 * SMALL, dtype=torch.uint8)
        assert at_work.send(source, target)
    device.synchronize()
    assert torch.equal(target, source)
    assert filled == [SMALL] * 120
    at_work.release()


def test_threads_fill_side_by_side(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    both, copy = threading.Barrier(2, timeout=60), np.copyto

    def meet(buffer: Any, part: Any) -> None:
        both.wait()
        copy(buffer, part)

    monkeypatch.setattr(np, "copyto", meet)
    at_work = stage(device, threads=2)
    assert at_work.send(noise(8 * SMALL), torch.zeros(8 * SMALL, dtype=torch.uint8))
    at_work.release()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 7), (3, 5), (33, 1024)])
def test_every_dtype_by_its_bytes(device: Device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = noise(4 * (int(np.prod(shape)) or 1)).view(dtype)[: int(np.prod(shape))].view(shape)
    target = torch.zeros(shape, dtype=dtype)
    at_work = stage(device)
    assert at_work.send(as_bytes(source), as_bytes(target))
    device.synchronize()
    assert torch.equal(as_bytes(target), as_bytes(source))
    at_work.release()


def test_an_error_of_a_thread_is_raised_and_the_next_call_works(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, copy = itertools.count(), np.copyto

    def ninth_fails(buffer: Any, part: Any) -> None:
        if next(calls) == 8:
            raise OSError("the disk is gone")
        copy(buffer, part)

    at_work = stage(device)
    source, target = noise(30 * SMALL), torch.zeros(30 * SMALL, dtype=torch.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", ninth_fails)
        with pytest.raises(OSError, match="the disk is gone"):
            at_work.send(source, target)
    assert at_work.workers is None
    assert not any(thread.name.startswith("w4plugin-transfer") for thread in threading.enumerate())
    assert at_work.send(source, target)
    device.synchronize()
    assert torch.equal(target, source)
    at_work.release()


def test_an_error_of_the_device_is_raised_and_no_thread_reads_on(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: Late, target: Tensor) -> None:
        raise RuntimeError("device lost")

    at_work = stage(device)
    with monkeypatch.context() as patch:
        patch.setattr(Late, "send", lost)
        with pytest.raises(RuntimeError, match="device lost"):
            at_work.send(noise(9 * SMALL), torch.zeros(9 * SMALL, dtype=torch.uint8))
    assert at_work.workers is None
    assert at_work.send(noise(SMALL), torch.zeros(SMALL, dtype=torch.uint8))
    at_work.release()


@pytest.mark.parametrize("size", [0, 1, SMALL, 4 * SMALL, 5 * SMALL, 61 * SMALL + 17])
def test_something_else_is_done_once_while_threads_fill(
    device: Device, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Every thread that has a part waits for the other work to begin: it does not wait for them."""
    begun, copy, order = threading.Event(), np.copyto, []

    def after(buffer: Any, part: Any) -> None:
        assert begun.wait(60)
        copy(buffer, part)

    def other() -> None:
        order.append("other")
        begun.set()

    monkeypatch.setattr(np, "copyto", after)
    at_work = stage(device)
    source, target = noise(size), torch.zeros(size, dtype=torch.uint8)
    assert at_work.send(source, target, other)
    device.synchronize()
    assert order == ["other"]
    assert torch.equal(target, source)
    at_work.release()


def test_an_error_of_the_other_work_is_raised_and_the_next_call_works(device: Device) -> None:
    def broken() -> None:
        raise ValueError("a scale is not a number")

    at_work = stage(device)
    source, target = noise(30 * SMALL), torch.zeros(30 * SMALL, dtype=torch.uint8)
    with pytest.raises(ValueError, match="a scale is not a number"):
        at_work.send(source, target, broken)
    assert at_work.workers is None
    assert at_work.send(source, target)
    device.synchronize()
    assert torch.equal(target, source)
    at_work.release()


def test_a_copy_that_waits_for_no_thread_calls_nothing() -> None:
    calls: list[int] = []
    to_device(noise(2 * CHUNK), CPU, lambda: calls.append(1))
    to_device(noise(8), CPU, lambda: calls.append(1))
    assert not calls


def test_a_large_copy_calls_it(played: Device) -> None:
    calls: list[int] = []
    to_device(noise(3 * CHUNK), CUDA, lambda: calls.append(1))
    assert calls == [1]


def test_later_keeps_one_thing_and_does_it_once() -> None:
    later, done = Later(), []
    later.settle()
    later.put_off(lambda: done.append("a"))
    assert not done
    later.put_off(lambda: done.append("b"))
    assert done == ["a"]
    later.settle()
    later.settle()
    assert done == ["a", "b"]

    def broken() -> None:
        raise ValueError("once")

    later.put_off(broken)
    with pytest.raises(ValueError, match="once"):
        later.put_off(lambda: done.append("c"))
    later.settle()
    assert done == ["a", "b"], "what was broken is not tried again, and nothing was put off behind it"


def test_two_threads_at_once(device: Device) -> None:
    at_work = stage(device)

    def many(first: int) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for seed in range(first, first + 40):
            source = noise(seed * 977, seed)
            pairs.append((source.clone(), torch.zeros_like(source)))
            assert at_work.send(source, pairs[-1][1])
            source.zero_()
            if seed % 16 == 0:
                at_work.release()  # also in between
        return pairs

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(many, 0), pool.submit(many, 40)]
        pairs = [pair for future in done for pair in future.result(timeout=120)]
    device.synchronize()
    assert all(torch.equal(wanted, found) for wanted, found in pairs)
    at_work.release()


def test_release_ends_threads_and_drops_buffers(device: Device) -> None:
    at_work = stage(device)
    at_work.release()
    assert at_work.send(noise(SMALL), torch.zeros(SMALL, dtype=torch.uint8))
    at_work.release()
    assert at_work.workers is None
    assert not at_work.free
    assert at_work.send(noise(SMALL), torch.zeros(SMALL, dtype=torch.uint8))
    assert len(device.made) == 8
    at_work.release()


def test_without_pinned_memory_one_warning(
    played: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left() -> Late:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(transfer, "pinned", none_left)
    source = noise(2 * CHUNK)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(to_device(source, CUDA), source)
    (record,) = caplog.records
    assert "no pinned memory (CUDA error: out of memory)" in record.getMessage()
    assert "5 GB/s" in record.getMessage()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_tensor_goes_through_the_buffers(played: Device, dtype: torch.dtype) -> None:
    source = noise(3 * CHUNK + 4096).view(dtype).view(1024, -1)
    source = source.requires_grad_() if dtype.is_floating_point else source
    wanted = source.detach().clone()
    out = to_device(source, CUDA)
    source.detach().zero_()
    played.synchronize()
    assert len(played.made) == transfer.BUFFERS
    assert not out.requires_grad
    assert (out.dtype, out.shape) == (dtype, wanted.shape)
    assert torch.equal(as_bytes(out), as_bytes(wanted))


def test_a_view_at_an_odd_offset_goes_through_the_buffers(played: Device) -> None:
    whole = noise(2 * CHUNK + 7)
    out = to_device(whole[7:], CUDA)
    played.synchronize()
    assert torch.equal(out, whole[7:])


def test_what_goes_through_buffers() -> None:
    large = torch.zeros(CHUNK // 2, 4, dtype=torch.float16)
    assert staged(large, CUDA)
    assert staged(large, torch.device("cuda", 1))
    assert not staged(large, CPU)
    assert not staged(large.to("meta"), CUDA)
    assert not staged(large.mT, CUDA)
    assert not staged(large[:, :2], CUDA)
    assert not staged(torch.zeros(()).expand(CHUNK), CUDA)
    assert not staged(torch.zeros(CHUNK - 1, dtype=torch.uint8), CUDA)
    assert not staged(torch.zeros(CHUNK, 0), CUDA)
    assert not staged(torch.zeros(()), CUDA)


def test_on_the_host_it_is_a_plain_copy() -> None:
    large = torch.zeros(CHUNK // 2, 4, dtype=torch.float16)
    for source in (large, large.mT, large[:, 1], torch.zeros(()), torch.zeros(0), torch.zeros(3).expand(2, 3)):
        out = to_device(source.requires_grad_(), CPU)
        assert torch.equal(out, source)
        assert not out.requires_grad
        assert not out.numel() or out.data_ptr() != source.data_ptr()
    assert not transfer._stages, "threads or pinned memory for a copy that needs none"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", [-4, 0, 4, 5 * CHUNK, 30 * CHUNK + 4096])
def test_gpu_equals_plain_copy(dtype: torch.dtype, more: int) -> None:
    source = noise(CHUNK + more).view(dtype)
    wanted = source.to(CUDA, copy=True)
    out = to_device(source, CUDA)
    source.view(torch.uint8).fill_(0xAA)
    assert (out.device, out.dtype) == (wanted.device, dtype)
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("current", [False, True])
def test_gpu_on_a_busy_side_stream_with_the_source_overwritten(current: bool) -> None:
    stream = torch.cuda.current_stream() if current else torch.cuda.Stream()
    pairs = []
    with torch.cuda.stream(stream):
        for seed in range(4):
            source = noise(20 * CHUNK, seed)
            wanted = source.clone()
            torch.cuda._sleep(200_000_000)  # the buffers are sent and unread when they are wanted again
            out = to_device(source, CUDA)
            source.fill_(0xAA)
            pairs.append((wanted, out + 1))  # sees the copy without a wait of the host
        assert all(torch.equal(found.cpu(), wanted + 1) for wanted, found in pairs)


@pytest.mark.gpu
def test_gpu_under_a_default_device_and_in_inference_mode() -> None:
    release()
    source = noise(9 * CHUNK)
    with CUDA:
        assert torch.equal(to_device(source, CUDA).cpu(), source)
    with torch.inference_mode():
        assert torch.equal(to_device(source, CUDA).cpu(), source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", None)  # nothing of this went the plain way
        assert torch.equal(to_device(source, CUDA).cpu(), source)
    assert len(transfer._stages[0].free) == transfer.BUFFERS
    release()
    assert not transfer._stages[0].free


@pytest.mark.gpu
def test_gpu_sources_that_are_not_in_one_run() -> None:
    whole = noise(8 * CHUNK + 7)
    for source in (whole[7:], whole[: 8 * CHUNK].view(2 * CHUNK, 4).mT, whole[:1].expand(CHUNK), whole[:0]):
        assert torch.equal(to_device(source, CUDA).cpu(), source)


@pytest.mark.gpu
def test_gpu_two_threads_with_streams_of_their_own() -> None:
    def many(first: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for seed in range(first, first + 12):
                source = noise((1 + seed % 5) * CHUNK + 4 * seed, seed)
                wanted = source.clone()
                out = to_device(source, CUDA)
                source.fill_(0xAA)
                assert torch.equal(out.cpu(), wanted)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(many, 0), pool.submit(many, 100)]:
            future.result(timeout=300)
