"""An opened checkpoint: headers of all its tensors at once, the data of one tensor when asked.

Data is read with ``pread`` into memory of its own instead of being mapped: a mapped file counts towards the process's
memory as far as it was touched, and one that is cut short while it is mapped kills the process. Every read checks that
the file is still the one whose header was read.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4plugin.checkpoint import hub, pickled, weight_files
from w4plugin.checkpoint.header import Header, Span, read_header
from w4plugin.checkpoint.source import Source
from w4plugin.checkpoint.writer import raw
from w4plugin.errors import CorruptError, StorageError, UnsupportedError, UsageError
from w4plugin.formats.census import Census, find_modules
from w4plugin.formats.format import Module, TensorHeader
from w4plugin.formats.registry import read_module
from w4plugin.note import Note
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import W4Tensor

CONFIG = "config.json"

QUANT_CONFIGS = ("quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json")
"""Files beside config.json in which producers put the quantisation config."""

BLOCK = 16 << 20
"""Bytes that are copied or compared at a time."""


@dataclass(frozen=True)
class WeightFile:
    """One file that was read.

    Attributes:
        path: where it lies.
        size: bytes.
        stamp: modification time in nanoseconds and inode, which a change of the file changes.
        header: sha256 of its safetensors header; of nothing for a pickle.
        metadata: its ``__metadata__``.
    """

    path: Path
    size: int
    stamp: tuple[int, int]
    header: str
    metadata: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        source: where it lies and what to call it.
        config: ``config.json``, empty when there is none.
        configs: every config file by name, ``config.json`` included.
        files: the weight files.
        headers: dtype and shape of every tensor, sorted by name.
        holder: which file holds which tensor.
        pickled: the weights are pickles, and were allowed.
        notes: what was ignored or interpreted while opening.
    """

    source: Source
    config: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    files: tuple[WeightFile, ...]
    headers: Mapping[str, TensorHeader]
    holder: Mapping[str, WeightFile]
    pickled: bool
    notes: tuple[Note, ...]
    _spans: Mapping[str, Span]
    _loaded: Mapping[str, Tensor]

    @staticmethod
    def open(
        model: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | None = None,
        allow_pickle: bool = False,
        headers_only: bool = False,
    ) -> Checkpoint:
        """Open a folder or a hub id by its headers alone.

        Args:
            model: folder, or hub id such as ``org/name``.
            revision: branch, tag or commit on the hub.
            cache_dir: the hub's cache; None means its usual place.
            token: for private and gated repositories.
            allow_pickle: read tensors out of ``.bin`` and ``.pt`` files, running no code of theirs.
            headers_only: of a hub repository that is not in the cache, fetch headers alone; a tensor that is asked for
                is fetched by itself then.

        Raises:
            UsageError: there is no such model, or it holds no weights.
            CorruptError, UnsafeError: a damaged or hostile file.
            StorageError: disk or network failed.
        """
        source = hub.locate(
            model,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            pickles=allow_pickle,
            headers_only=headers_only,
        )
        return open_source(source, allow_pickle=allow_pickle, token=token)

    @cached_property
    def quant_config(self) -> QuantConfig:
        """What all config files and the files' own metadata say about the quantisation."""
        metadata: dict[str, str] = {}
        for file in self.files:
            for key, value in file.metadata.items():
                metadata.setdefault(key, value)
        return QuantConfig.from_files(self.configs, metadata)

    @cached_property
    def census(self) -> Census:
        """Quantised modules, layers of another width, and plain tensors, as the headers show them."""
        return find_modules(self.headers, self.quant_config)

    @property
    def modules(self) -> tuple[Module, ...]:
        """The modules packed in 4 bits."""
        return self.census.modules

    def weight(self, name: str) -> W4Tensor:
        """One packed module's weight, decoded; ``name`` as in ``modules``, without a suffix.

        Raises:
            UsageError: no packed module of that name.
            CorruptError, UnsupportedError: its tensors contradict each other, or cannot be read exactly.
        """
        found = next((module for module in self.modules if module.name == name), None)
        if found is None:
            known = ", ".join(module.name for module in self.modules[:3])
            raise UsageError(name, got="no module packed in 4 bits", wanted=f"one of modules: {known}, ...")
        tensors = {suffix: self.tensor(full) for suffix, full in found.tensors.items()}
        return read_module(found, tensors, self.quant_config).weight

    def nbytes(self, name: str) -> int:
        """Bytes of one tensor's data."""
        if self.pickled:
            loaded = self._loaded[name]
            return loaded.numel() * loaded.element_size()
        span = self._spans[name]
        return span.stop - span.start

    def tensor(self, name: str) -> Tensor:
        """One tensor, in memory of its own.

        Raises:
            StorageError: the file cannot be read, or changed since it was opened.
            UnsupportedError: torch has no such dtype.
        """
        if self.pickled:
            return self._loaded[name].contiguous()
        span = self._spans[name]
        dtype = pickled.TORCH_DTYPE.get(span.dtype)
        if dtype is None:
            raise UnsupportedError(f"{self.holder[name].name}: {name}", got=span.dtype, wanted="a dtype of torch")
        data = torch.empty(span.stop - span.start, dtype=torch.uint8)
        file = self.holder[name]
        if file.name in self.source.remote:
            part = hub.fetch_part(self.source, file.name, span.start, span.stop) if data.numel() else b""
            data.numpy()[:] = memoryview(part)
        else:
            with _opened(file) as descriptor:
                _fill(file, descriptor, data.numpy().data, span.start)
        return data.view(dtype).reshape(span.shape) if data.numel() else torch.empty(span.shape, dtype=dtype)

    def blocks(self, name: str, size: int = BLOCK) -> Iterator[memoryview]:
        """The bytes of one tensor, ``size`` at a time; a block is valid until the next one is asked for."""
        if self.pickled:
            data = raw(self._loaded[name]).numpy()
            yield from (data[at : at + size].data for at in range(0, len(data), size))
            return
        span, file = self._spans[name], self.holder[name]
        buffer = memoryview(bytearray(min(size, span.stop - span.start)))
        with _opened(file) as descriptor:
            for at in range(span.start, span.stop, size):
                block = buffer[: min(size, span.stop - at)]
                _fill(file, descriptor, block, at)
                yield block


def open_source(source: Source, *, allow_pickle: bool = False, token: str | None = None) -> Checkpoint:
    """:meth:`Checkpoint.open` of a folder that has been found already."""
    names = source.names()
    configs = {name: weight_files.read_json(source, name) for name in (CONFIG, *QUANT_CONFIGS) if name in names}
    inner = configs.get(CONFIG, {}).get("quantization_config")
    naming = [inner if isinstance(inner, dict) else {}, *configs.values()]
    base = next((c["model_file_base_name"] for c in naming if c.get("model_file_base_name")), None)
    found = weight_files.find(source, base, allow_pickle=allow_pickle)
    remote = hub.fetch_headers(source, [n for n in found.names if n in source.remote], token) if source.remote else {}
    with _no_collection():
        return _open_pickles(source, configs, found) if found.pickled else _open_headers(source, configs, found, remote)


def _open_headers(
    source: Source, configs: Mapping[str, Any], found: weight_files.WeightFiles, remote: Mapping[str, Header]
) -> Checkpoint:
    notes = list(found.notes)
    files: list[WeightFile] = []
    spans: dict[str, Span] = {}
    holder: dict[str, WeightFile] = {}
    for name in found.names:
        if name in remote:
            header = remote[name]
            file = WeightFile(header.path, header.size, (0, 0), sha256(header.raw).hexdigest(), header.metadata)
        else:
            path = source.file(name, named_by=found.index or "")
            header = read_header(path)
            file = _weight_file(path, sha256(header.raw).hexdigest(), header.metadata)
        files.append(file)
        stale = []
        for tensor, span in header.spans.items():
            if found.assigned is not None and found.assigned.get(tensor) != name:
                stale.append(tensor)
            elif tensor in spans:
                _require_equal(tensor, (holder[tensor], spans[tensor]), (file, span))
                notes.append(Note("info", tensor, f"stands in {holder[tensor].name} and in {name}, the same bytes"))
            else:
                spans[tensor], holder[tensor] = span, file
        if stale:
            notes.append(_stale(name, found, stale))
    headers = {name: TensorHeader(spans[name].dtype, spans[name].shape) for name in sorted(spans)}
    _require_assigned(found, headers)
    return Checkpoint(
        source, configs.get(CONFIG, {}), configs, tuple(files), headers, holder, False, tuple(notes), spans, {}
    )


def _open_pickles(source: Source, configs: Mapping[str, Any], found: weight_files.WeightFiles) -> Checkpoint:
    notes = list(found.notes)
    files: list[WeightFile] = []
    loaded: dict[str, Tensor] = {}
    holder: dict[str, WeightFile] = {}
    for name in found.names:
        path = source.file(name, named_by=found.index or "")
        file = _weight_file(path, sha256().hexdigest(), {})
        files.append(file)
        tensors, other = pickled.load(path)
        if other:
            notes.append(
                Note("info", name, f"entries that are not tensors are ignored: {', '.join(sorted(other)[:6])}")
            )
        for tensor, value in tensors.items():
            if found.assigned is not None and found.assigned.get(tensor) != name:
                notes.append(_stale(name, found, [tensor]))
            elif tensor not in loaded:
                loaded[tensor], holder[tensor] = value, file
            elif loaded[tensor].dtype != value.dtype or not torch.equal(loaded[tensor], value):
                raise _doubled(tensor, holder[tensor], file)
    headers = {
        name: TensorHeader(pickled.SAFETENSORS_DTYPE[loaded[name].dtype], tuple(loaded[name].shape))
        for name in sorted(loaded)
    }
    _require_assigned(found, headers)
    return Checkpoint(
        source, configs.get(CONFIG, {}), configs, tuple(files), headers, holder, True, tuple(notes), {}, loaded
    )


def _weight_file(path: Path, header: str, metadata: Mapping[str, str]) -> WeightFile:
    try:
        status = path.stat()
    except OSError as fault:
        raise StorageError(str(path), got=fault.strerror or str(fault), wanted="a readable file") from fault
    return WeightFile(path, status.st_size, (status.st_mtime_ns, status.st_ino), header, metadata)


def _stale(name: str, found: weight_files.WeightFiles, stale: list[str]) -> Note:
    assert found.assigned is not None
    unknown = [t for t in stale if t not in found.assigned]
    shown = ", ".join((unknown or stale)[:3]) + (" ..." if len(unknown or stale) > 3 else "")
    if unknown:
        return Note("warning", name, f"{len(unknown)} tensors that {found.index} does not know are ignored: {shown}")
    return Note("info", name, f"{len(stale)} tensors that {found.index} assigns to another file are ignored: {shown}")


def _require_assigned(found: weight_files.WeightFiles, headers: Mapping[str, TensorHeader]) -> None:
    """Every tensor of an index must lie in the file it names."""
    missing = [name for name in found.assigned or () if name not in headers]
    if missing:
        first = missing[0]
        assert found.assigned is not None
        raise CorruptError(
            f"{found.index}: {first}",
            got=f"{len(missing)} tensors that are not in the files it names",
            wanted=f"{first} in {found.assigned[first]}",
            todo="Download the checkpoint again; a shard or the index is from another one.",
        )


def _require_equal(tensor: str, one: tuple[WeightFile, Span], other: tuple[WeightFile, Span]) -> None:
    """Two copies of a tensor without an index to choose must be the same bytes."""
    (file, span), (file2, span2) = one, other
    same = span[:2] == span2[:2]
    with _opened(file) as descriptor, _opened(file2) as descriptor2:
        for at in range(0, span.stop - span.start if same else 0, BLOCK):
            size = min(BLOCK, span.stop - span.start - at)
            blocks = [memoryview(bytearray(size)) for _ in range(2)]
            _fill(file, descriptor, blocks[0], span.start + at)
            _fill(file2, descriptor2, blocks[1], span2.start + at)
            same = same and blocks[0] == blocks[1]
    if not same:
        raise _doubled(tensor, file, file2)


def _doubled(tensor: str, one: WeightFile, other: WeightFile) -> CorruptError:
    return CorruptError(
        tensor,
        got=f"different contents in {one.name} and {other.name}, and no index to choose",
        wanted="one",
        todo="Move away the file that is not the model.",
    )


@contextmanager
def _opened(file: WeightFile) -> Iterator[int]:
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as fault:
        raise StorageError(str(file.path), got=fault.strerror or str(fault), wanted="a readable file") from fault
    try:
        status = os.fstat(descriptor)
        if (status.st_size, status.st_mtime_ns, status.st_ino) != (file.size, *file.stamp):
            raise StorageError(
                str(file.path), got="a file that changed while it was read", wanted="the same file throughout",
                todo="Run again when nothing else writes to it.",
            )  # fmt: skip
        yield descriptor
    finally:
        os.close(descriptor)


def _fill(file: WeightFile, descriptor: int, buffer: memoryview, offset: int) -> None:
    """Read until ``buffer`` is full; the system may return less than asked at a time."""
    while len(buffer):
        try:
            done = os.preadv(descriptor, [buffer], offset)
        except OSError as fault:
            raise StorageError(str(file.path), got=fault.strerror or str(fault), wanted="a readable file") from fault
        if done == 0:
            raise StorageError(str(file.path), got=f"the file's end at {offset}", wanted=f"{len(buffer)} more bytes")
        buffer, offset = buffer[done:], offset + done


@contextmanager
def _no_collection() -> Iterator[None]:
    """A pause of the cycle collector, which would walk the growing tables of headers again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
