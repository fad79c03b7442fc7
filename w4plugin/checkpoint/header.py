"""The header of a safetensors file, read and checked without touching the data behind it.

    u64 little-endian length | JSON of that length | tensor data, back to back, to the last byte of the file

A header is trusted only after everything it says has been compared with the file: its own length, every dtype, shape
and pair of offsets, no gap and no overlap between tensors, and the file's size. A shard that was cut short in a
download is therefore refused here, before any work, and not read as zeros later.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from w4plugin.checkpoint.json_text import parse_json
from w4plugin.errors import CorruptError, StorageError, UnsafeError, UnsupportedError

MAX_HEADER = 100_000_000
"""Bytes a header may have; the limit that the safetensors library sets."""

DTYPE_BITS = {
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F32": 32, "U32": 32, "I32": 32, "BF16": 16, "F16": 16, "U16": 16,
    "I16": 16, "F8_E8M0": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "F6_E3M2": 6, "F6_E2M3": 6, "F4": 4,
    "BOOL": 8,
}  # fmt: skip
"""Bits of one element, in the order in which the safetensors library lays tensors out in a file."""


class Span(NamedTuple):
    """One tensor of a file.

    Attributes:
        dtype: the safetensors spelling.
        shape: its axes.
        start: first byte, counted from the start of the file.
        stop: one past the last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What one file says it holds.

    Attributes:
        path: the file.
        size: its length in bytes.
        spans: tensors by name, in the order of their data.
        metadata: the ``__metadata__`` strings.
        raw: the bytes of length and JSON, for a fingerprint.
    """

    path: Path
    size: int
    spans: dict[str, Span]
    metadata: dict[str, str]
    raw: bytes


def read_header(path: Path, size: int | None = None) -> Header:
    """Read and check the header of ``path``.

    Args:
        path: a safetensors file.
        size: length of the file where ``path`` does not show it (a file that lies on a server).

    Raises:
        CorruptError: the header is damaged or contradicts the file.
        UnsupportedError: a dtype that safetensors does not name.
        StorageError: the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = header_length(str(path.name), start, size)
            text = file.read(length)
    except OSError as fault:
        raise StorageError(str(path), got=fault.strerror or str(fault), wanted="a readable file") from fault
    return parse_header(path, start + text, size)


def open_regular(path: Path) -> Any:
    """``path`` for reading, unless it is a pipe, a device or anything else that could block or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafeError(path.name, got="a pipe, device or folder", wanted="a regular file")
    return os.fdopen(descriptor, "rb")


def header_length(where: str, start: bytes, size: int) -> int:
    """Length of the JSON that the first eight bytes announce, checked against the file's size."""
    if len(start) < 8:
        raise CorruptError(where, got=f"{size} bytes", wanted="a safetensors file", todo=_AGAIN)
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER:
        raise CorruptError(
            where,
            got=f"a header length of {length}",
            wanted=f"at most {MAX_HEADER}: not a safetensors file, or damaged",
        )
    if 8 + length > size:
        raise CorruptError(where, got=f"{size} bytes", wanted=f"{8 + length} for its header alone", todo=_AGAIN)
    return length


def parse_header(path: Path, raw: bytes, size: int) -> Header:
    """Check ``raw`` (length and JSON) of a file of ``size`` bytes."""
    where = path.name
    text = raw[8:]
    if text[:1] != b"{":
        raise CorruptError(where, got=f"a header that begins with {text[:1]!r}", wanted="b'{'", todo=_AGAIN)
    entries = _entries(where, text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptError(f"{where}: __metadata__", got=_short(metadata), wanted="strings by name")
    data = len(raw)
    found = [(name, _span(where, name, entry, data)) for name, entry in entries.items()]
    found.sort(key=lambda item: (item[1].start, item[1].stop))
    end, before = data, "the header"
    for name, span in found:
        if span.start != end:
            fault = "overlaps" if span.start < end else f"leaves {span.start - end} bytes unused after"
            raise CorruptError(
                f"{where}: {name}", got=f"data that {fault} {before}", wanted="tensors back to back", todo=_AGAIN
            )
        end, before = span.stop, name
    if size < end:
        raise CorruptError(
            where, got=f"{size} bytes", wanted=f"{end}, as its header says ({end - size} are missing)", todo=_AGAIN
        )
    if size > end:
        raise CorruptError(
            where, got=f"{size} bytes", wanted=f"{end}, as its header says: {size - end} are unaccounted"
        )
    return Header(path, size, dict(found), metadata, raw)


def _entries(where: str, text: bytes) -> dict[str, Any]:
    """The object in ``text``, with no key twice.

    The strict parser calls Python for every tensor, which a header of a hundred thousand would notice. Where no string
    holds an escape, counting quotation marks proves the same: a repeated key leaves more strings than the object.
    """
    if b"\\" not in text:
        try:
            entries = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError):
            return parse_json(where, text)
        metadata = entries.get("__metadata__", {}) if isinstance(entries, dict) else None
        if isinstance(metadata, dict):
            named = "__metadata__" in entries
            strings = 5 * (len(entries) - named) + named + 2 * len(metadata)
            if text.count(b'"') == 2 * strings:
                return dict(entries)
    return parse_json(where, text)


def _span(where: str, name: str, entry: Any, data: int) -> Span:
    """One entry of the header, checked by itself."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        extra = len(entry) - 3
    except (TypeError, KeyError, ValueError):
        extra = -1
    if extra:
        raise CorruptError(f"{where}: {name}", got=_short(entry), wanted="dtype, shape and two data_offsets")
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise UnsupportedError(f"{where}: {name}", got=f"dtype {_short(dtype)}", wanted=", ".join(DTYPE_BITS))
    # bool is an int to Python: type() tells them apart
    if type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
        raise CorruptError(f"{where}: {name}", got=f"shape {_short(shape)}", wanted="a list of sizes")
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
        raise CorruptError(f"{where}: {name}", got=f"data_offsets [{start}, {stop}]", wanted="0 <= start <= stop")
    wanted = math.prod(shape) * bits
    if (stop - start) * 8 != wanted:
        raise CorruptError(
            f"{where}: {name}", got=f"{stop - start} bytes", wanted=f"{wanted / 8:g} for {dtype} {shape}"
        )
    return Span(dtype, tuple(shape), data + start, data + stop)


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor's data."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def encode_header(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> tuple[bytes, list[str]]:
    """Length and JSON of a file that holds ``tensors`` (dtype and shape by name), and the order of their data.

    Byte for byte what ``safetensors.save_file`` writes, for at most one metadata key (it puts several in random order):
    tensors sorted by dtype, widest first, then by name; compact JSON; padded with spaces to a multiple of eight.
    """
    rank = {dtype: i for i, dtype in enumerate(DTYPE_BITS)}
    order = sorted(tensors, key=lambda name: (rank[tensors[name][0]], name))
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name in order:
        dtype, shape = tensors[name]
        stop = at + nbytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


_AGAIN = "If it was downloaded, download it again."


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
