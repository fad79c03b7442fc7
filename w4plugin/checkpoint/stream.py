"""From a list of jobs to the shards of a new checkpoint: a few jobs at a time, each read, converted and written whole.

Memory is bounded by what the jobs in flight cost, never by the model. Which thread does which job, and when, changes
nothing in the files: every tensor's place is fixed by the header before the first byte.

A header needs the shapes before the data is converted, and some follow only from data (a trivial ``g_idx`` is
dropped, an all-zero bias too). So each job carries a prediction. Where the data proves it wrong nothing more is
written, the rest of the pass only learns, and a second pass writes with the truth.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from w4plugin.checkpoint import bounded, disk
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.header import nbytes
from w4plugin.checkpoint.pickled import SAFETENSORS_DTYPE
from w4plugin.checkpoint.staging import Staging
from w4plugin.checkpoint.writer import ShardWriter, tensor_bytes
from w4plugin.errors import UsageError

INDEX = "model.safetensors.index.json"

FLUSH = 256 << 20
"""Bytes of a shard after which its flush to the disk begins, so that disk and cores work at the same time."""

Shape = tuple[str, tuple[int, ...]]
Progress = Callable[[int], None]


class Product(NamedTuple):
    """What a job made: CPU tensors by full name, and facts for the report."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """One module or one plain tensor of the output.

    Attributes:
        name: module, or tensor for a copy.
        predicted: dtype and shape of each tensor it will make.
        make: reads and converts; None copies the tensor ``name`` of the source bit for bit.
        cost: bytes of memory while it runs.
        reads: bytes it reads, for the progress.
    """

    name: str
    predicted: Mapping[str, Shape]
    make: Callable[[], Product] | None
    cost: int
    reads: int


@dataclass(frozen=True)
class Streamed:
    """The finished shards.

    Attributes:
        shards: tensor names by file.
        hashes: sha256 of each tensor's bytes.
        facts: what each job reported.
        total: bytes of tensor data.
    """

    shards: Mapping[str, Sequence[str]]
    hashes: Mapping[str, str]
    facts: Mapping[str, Mapping[str, Any]]
    total: int


def copy_job(checkpoint: Checkpoint, name: str) -> Job:
    """A job that carries one tensor over as it is."""
    header = checkpoint.headers[name]
    size = checkpoint.nbytes(name)
    return Job(name, {name: (header.dtype, header.shape)}, None, min(size, 16 << 20), size)


def run(
    jobs: Sequence[Job],
    checkpoint: Checkpoint,
    staging: Staging,
    *,
    max_shard_size: int | str = "5GB",
    workers: int | None = None,
    progress: Progress = lambda count: None,
) -> Streamed:
    """Do all jobs and leave the shards, and an index when there are several, in the staging folder.

    Raises:
        W4Error: of the first job (in order) that failed; the staging folder then holds no whole checkpoint.
    """
    jobs = sorted(jobs, key=lambda job: (natural(job.name), job.name))
    while True:
        layouts = {job.name: staging.corrections.get(job.name, job.predicted) for job in jobs}
        shards = _shards(jobs, layouts, max_shard_size)
        once = _Pass(checkpoint, staging, layouts, progress)
        once.run(shards, workers)
        if not once.wrong:
            return _finish(staging, shards, layouts, once)
        staging.restart({**staging.corrections, **once.wrong})


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key under which layer 2 comes before layer 10."""
    return [
        (int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)
    ]


def _shards(jobs: Sequence[Job], layouts: Mapping[str, Mapping[str, Any]], limit: int | str) -> dict[str, list[Job]]:
    """Jobs by file: whole jobs in order, as many as fit."""
    from huggingface_hub import split_state_dict_into_shards_factory  # imported here: it takes a third of a second

    by_name = {job.name: job for job in jobs}

    def size(job: Job) -> int:
        return sum(nbytes(dtype, tuple(shape)) for dtype, shape in layouts[job.name].values())

    try:
        split = split_state_dict_into_shards_factory(
            by_name, get_storage_size=size, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
        )
    except ValueError as fault:
        raise UsageError("--max-shard-size", got=repr(limit), wanted="a size like 5GB or 500MB") from fault
    return {file: [by_name[name] for name in names] for file, names in split.filename_to_tensors.items()}


@dataclass
class _Shard:
    """A file in the making, shared by the threads that fill it."""

    writer: ShardWriter
    remaining: int
    sizes: Mapping[str, int]
    unflushed: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


class _Pass:
    """One pass over the jobs."""

    def __init__(
        self, checkpoint: Checkpoint, staging: Staging, layouts: Mapping[str, Mapping[str, Any]], progress: Progress
    ) -> None:
        self._checkpoint, self._staging, self._layouts, self._progress = checkpoint, staging, layouts, progress
        self._lock = threading.Lock()
        self._open: dict[str, _Shard] = {}
        self._flushes: list[Future[None]] = []
        self.wrong: dict[str, dict[str, Any]] = {}
        self.done: dict[str, Mapping[str, Any]] = {}

    def run(self, shards: Mapping[str, Sequence[Job]], workers: int | None) -> None:
        """Every job of every shard that is not finished yet, in order, as the budget allows."""
        todo: list[tuple[str, Job]] = []
        for file, jobs in shards.items():
            facts = self._staging.finished(file)
            if facts is None:
                todo += [(file, job) for job in jobs]
            else:
                self.done[file] = facts
                self._progress(sum(job.reads for job in jobs))
        # flushing a shard waits for the disk and needs no core: it must not hold up a worker
        with ThreadPoolExecutor(1, thread_name_prefix="w4plugin-flush") as self._flusher:
            try:
                bounded.run((self._task(file, shards[file], job) for file, job in todo), workers)
            finally:
                self._flusher.shutdown(wait=True)
                for shard in self._open.values():
                    shard.writer.abandon()
        for flush in self._flushes:
            flush.result()

    def _task(self, file: str, jobs: Sequence[Job], job: Job) -> bounded.Task:
        shard = self._shard(file, jobs)
        return job.cost, partial(self._do, file, shard, job)

    def _shard(self, file: str, jobs: Sequence[Job]) -> _Shard:
        if file not in self._open:
            layouts = {job.name: {n: (d, tuple(s)) for n, (d, s) in self._layouts[job.name].items()} for job in jobs}
            tensors = {name: shape for layout in layouts.values() for name, shape in layout.items()}
            sizes = {job: sum(nbytes(*shape) for shape in layout.values()) for job, layout in layouts.items()}
            self._open[file] = _Shard(ShardWriter(self._staging.folder / file, tensors), len(jobs), sizes)
        return self._open[file]

    def _do(self, file: str, shard: _Shard, job: Job) -> None:
        if job.make is None:
            if not self.wrong:
                shard.writer.write(job.name, self._checkpoint.blocks(job.name))
        else:
            product = job.make()
            made = {name: _shape(tensor) for name, tensor in product.tensors.items()}
            told = {name: (dtype, tuple(shape)) for name, (dtype, shape) in self._layouts[job.name].items()}
            if made != told:
                with self._lock:
                    self.wrong[job.name] = {name: [dtype, list(shape)] for name, (dtype, shape) in made.items()}
            if not self.wrong:
                for name, tensor in product.tensors.items():
                    shard.writer.write(name, [tensor_bytes(tensor.cpu())])
            shard.facts[job.name] = product.facts
        self._progress(job.reads)
        with self._lock:
            shard.remaining -= 1
            shard.unflushed += shard.sizes[job.name]
            if shard.unflushed >= FLUSH and shard.remaining:
                shard.unflushed = 0
                self._flushes.append(self._flusher.submit(shard.writer.flush))
            last = shard.remaining == 0
            if last and not self.wrong:
                self._flushes.append(self._flusher.submit(self._finish, file, shard))

    def _finish(self, file: str, shard: _Shard) -> None:
        shard.writer.finish()
        facts = {"hashes": shard.writer.hashes, "facts": shard.facts}
        self._staging.finish(file, facts)
        self.done[file] = facts


def _shape(tensor: Tensor) -> Shape:
    return SAFETENSORS_DTYPE[tensor.dtype], tuple(tensor.shape)


def _finish(
    staging: Staging, shards: Mapping[str, Sequence[Job]], layouts: Mapping[str, Mapping[str, Any]], once: _Pass
) -> Streamed:
    names = {file: [name for job in jobs for name in layouts[job.name]] for file, jobs in shards.items()}
    total = sum(nbytes(dtype, tuple(shape)) for layout in layouts.values() for dtype, shape in layout.values())
    if len(names) > 1:
        weight_map = {name: file for file, inside in names.items() for name in inside}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        disk.write_file(staging.folder / INDEX, (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode())
    hashes = {name: sha for facts in once.done.values() for name, sha in facts["hashes"].items()}
    facts = {name: fact for done in once.done.values() for name, fact in done["facts"].items()}
    return Streamed(names, dict(sorted(hashes.items())), dict(sorted(facts.items())), total)
