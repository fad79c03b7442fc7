"""Tensors of a file onto a GPU, as fast as the host can read them; no host of models is imported.

CUDA copies from memory-mapped files at 5 GB/s: one thread of the driver takes every page fault and moves every byte
into pinned memory of its own. Here some threads do that side by side, and the device fetches what is already there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

CHUNK = 4 << 20
"""Bytes of a buffer, and of the smallest tensor that takes this way: of less there is little to save."""

THREADS = min(4, os.cpu_count() or 1)

BUFFERS = 2 * THREADS
"""One that a thread fills and one that the device reads, for every thread: 32 MiB at most."""

PAGE = 4096


@dataclass
class Later:
    """One thing to do when the processor next waits for a copy, at the latest before the next one is put off.

    A weight's decoding is some milliseconds of Python, in which the device and the threads that copy would stand still.
    """

    work: Callable[[], None] | None = None

    def put_off(self, work: Callable[[], None]) -> None:
        self.settle()
        self.work = work

    def settle(self) -> None:
        """Do it now. What it raises comes out here, and it is not tried again."""
        work, self.work = self.work, None
        if work is not None:
            work()


def to_device(tensor: Tensor, device: torch.device, meanwhile: Callable[[], None] | None = None) -> Tensor:
    """A copy on ``device``, detached; ``tensor`` may be overwritten once this returns.

    ``meanwhile`` is called where this would wait for threads that copy, and is not where nothing is waited for.

    The caller's current stream of ``device`` sees the copy; another stream has to wait for that one. The first large
    tensor for a CUDA device starts threads and pins 32 MiB, which stay until :func:`release`: hosts say of a layer that
    it is loaded, not of a model, and pinning for each layer would cost what it saves.
    """
    tensor = tensor.detach()
    if not staged(tensor, device):
        return tensor.to(device, copy=True)
    with torch.cuda.device(device):
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        # setdefault is one step to other threads, and a Stage that loses the race owns nothing yet
        stage = _stages.setdefault(torch.cuda.current_device(), Stage(pinned))
        if not stage.send(as_bytes(tensor), as_bytes(out), meanwhile):
            out.copy_(tensor)
    return out


def release() -> None:
    """End the threads and give pinned memory back to torch, which keeps it for whoever pins next."""
    for stage in list(_stages.values()):
        stage.release()


def staged(tensor: Tensor, device: torch.device) -> bool:
    """Whether this copy goes through buffers: large, in one run on the host, to a CUDA device."""
    return device.type == "cuda" and tensor.device.type == "cpu" and tensor.nbytes >= CHUNK and tensor.is_contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: uint8 ``[bytes]``, no copy."""
    return tensor.view(-1).view(torch.uint8)


class Buffer(Protocol):
    """Memory of the host that a device reads while the host goes on."""

    @property
    def memory(self) -> Tensor:
        """uint8 ``[bytes]``."""

    def send(self, target: Tensor) -> None:
        """Start to copy the first bytes into ``target``, uint8 ``[bytes or fewer]``, on the current stream."""

    def wait(self) -> None:
        """Return once what was sent last has been read; at once where nothing was."""


@dataclass(frozen=True)
class Pinned:
    """A buffer for the current CUDA device.

    Attributes:
        memory: uint8 ``[CHUNK]``, pinned.
        sent: recorded behind every copy; put down, not spun on, since the threads that fill need the cores.
    """

    memory: Tensor
    sent: torch.cuda.Event

    def send(self, target: Tensor) -> None:
        target.copy_(self.memory[: target.numel()], non_blocking=True)
        self.sent.record()

    def wait(self) -> None:
        self.sent.synchronize()


def pinned() -> Pinned:
    # a host that loads under `with torch.device("cuda")` means its weights, so the buffer says where it is
    memory = torch.empty(CHUNK, dtype=torch.uint8, device="cpu", pin_memory=True)
    return Pinned(memory, torch.cuda.Event(blocking=True))


@dataclass
class Stage:
    """Buffers on the way to one device, and the threads that fill them.

    One call at a time: two would share the same cores. Only the calling thread speaks to the device: streams, the
    current device and inference mode are a thread's own, and a new thread's first call may start a context on device 0.

    Attributes:
        make: a buffer; a RuntimeError means that there is none to be had.
        threads, buffers: how many.
        free: buffers that no thread fills, first those sent longest ago; empty until the first call.
        workers: the threads; None until the first call.
        refused: whether ``make`` failed; it is not asked again.
    """

    make: Callable[[], Buffer]
    threads: int = THREADS
    buffers: int = BUFFERS
    free: deque[Buffer] = field(default_factory=deque)
    workers: ThreadPoolExecutor | None = None
    refused: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, source: Tensor, target: Tensor, meanwhile: Callable[[], None] | None = None) -> bool:
        """Copy uint8 ``[bytes]`` to the device; on return all of ``source`` has been read. False: nothing was done.

        ``meanwhile`` is called on this thread, once, when the others have as much to do as there are buffers; it must
        not send anything itself.

        Raises:
            Exception: what a thread, the device or ``meanwhile`` raised; no thread reads ``source`` any more, and the
                next call starts with threads and buffers of its own.
        """
        with self.lock:
            if not self._started():
                return False
            try:
                self._send(source, target, meanwhile)
            except BaseException:
                self._stop()
                raise
            return True

    def release(self) -> None:
        """Give up threads and buffers; the next call makes new ones."""
        with self.lock:
            self._stop()

    def _started(self) -> bool:
        if self.workers is None and not self.refused:
            try:
                self.free.extend([self.make() for _ in range(self.buffers)])
            except RuntimeError as error:
                self.refused = True
                logger.warning(
                    "no pinned memory (%s), so weights go to the device by unpinned copies: about 5 GB/s, most of the "
                    "time that loading takes",
                    error,
                )
            else:
                self.workers = ThreadPoolExecutor(self.threads, thread_name_prefix="w4plugin-transfer")
        return not self.refused

    def _send(self, source: Tensor, target: Tensor, meanwhile: Callable[[], None] | None) -> None:
        assert self.workers is not None
        read = source.numpy()
        filling: deque[tuple[Future[None], Buffer, slice]] = deque()
        for part in parts(len(read), self.free[0].memory.numel(), self.threads):
            if not self.free and meanwhile is not None:
                meanwhile()
                meanwhile = None
            while filling and (not self.free or filling[0][0].done()):
                self._pass_on(filling, target)
            buffer = self.free.popleft()
            buffer.wait()
            # numpy copies without the GIL, and takes pages' faults there
            filled = self.workers.submit(np.copyto, buffer.memory.numpy()[: part.stop - part.start], read[part])
            filling.append((filled, buffer, part))
        if meanwhile is not None:
            meanwhile()
        while filling:
            self._pass_on(filling, target)

    def _pass_on(self, filling: deque[tuple[Future[None], Buffer, slice]], target: Tensor) -> None:
        """Send the part that was begun first, once it is filled."""
        filled, buffer, part = filling.popleft()
        filled.result()
        buffer.send(target[part])
        self.free.append(buffer)

    def _stop(self) -> None:
        """Wait for the threads. Not for the device: torch keeps pinned memory from others while a copy reads it."""
        workers, self.workers = self.workers, None
        self.free.clear()
        if workers is not None:
            workers.shutdown(cancel_futures=True)


_stages: dict[int, Stage] = {}
"""By the device's index."""


def parts(size: int, chunk: int, threads: int) -> list[slice]:
    """Cut ``size`` bytes into parts of at most ``chunk``, as even as pages allow, so that no thread has the most of it.

    A tensor of six chunks for four threads becomes eight parts, not a second round for two of them.
    """
    count = -(-size // (chunk * threads)) * threads
    step = min(chunk, -(-size // (count * PAGE)) * PAGE) if count else chunk
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
