"""One safetensors file, written tensor by tensor in any order and from any thread.

Where each tensor goes follows from the header, which is fixed before the first byte: so the file is the same whatever
the order of writing. ``safetensors.save_file`` (0.8) wants the whole file in memory, does not flush it to the disk,
ignores the umask and puts metadata keys in random order; the bytes are otherwise the same, which a test holds fast.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from w4plugin.checkpoint import disk
from w4plugin.checkpoint.header import encode_header, nbytes

METADATA = {"format": "pt"}
"""What loaders expect under ``__metadata__``."""

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""dtype (safetensors spelling) and shape by tensor name."""


class ShardWriter:
    """A safetensors file in the making: ``write`` each tensor once, then ``finish``."""

    def __init__(self, path: Path, tensors: Layout) -> None:
        """Create ``path`` + ``.tmp`` with its header; the name itself appears in :meth:`finish`."""
        self.path = path
        self._beside = path.with_name(path.name + ".tmp")
        header, order = encode_header(dict(tensors), METADATA)
        self._at: dict[str, tuple[int, int]] = {}
        at = len(header)
        for name in order:
            size = nbytes(*tensors[name])
            self._at[name] = (at, size)
            at += size
        self.nbytes = at
        self.hashes: dict[str, str] = {}
        self._lock = threading.Lock()
        self._descriptor = disk.create(self._beside, at)
        disk.write_at(self._beside, self._descriptor, memoryview(header), 0)

    def write(self, name: str, blocks: Iterable[memoryview]) -> None:
        """The bytes of one tensor, in order; they are hashed on the way."""
        at, size = self._at[name]
        end, digest = at + size, hashlib.sha256()
        for block in blocks:
            disk.write_at(self._beside, self._descriptor, block, at)
            digest.update(block)
            at += len(block)
        assert at == end, (name, at, end)
        with self._lock:
            assert name not in self.hashes, name
            self.hashes[name] = digest.hexdigest()

    def flush(self) -> None:
        """Wait until what has been written is on the disk; others may write meanwhile."""
        disk.sync(self._beside, self._descriptor)

    def finish(self) -> None:
        """Flush the file and give it its name. Every tensor must have been written."""
        missing = self._at.keys() - self.hashes.keys()
        assert not missing, sorted(missing)[:3]
        self.flush()
        self.abandon()
        disk.rename(self._beside, self.path)

    def abandon(self) -> None:
        """Close the file; without :meth:`finish` it never gets its name."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def raw(tensor: Tensor) -> Tensor:
    """uint8 ``[bytes]``: a tensor as it stands in a file, without a copy where it is contiguous."""
    # a single element may be contiguous with any stride, which view() does not take
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor as they stand in a file, without a copy where it is contiguous."""
    return raw(tensor).numpy().data
