"""The header reader against files that lie, and the header writer against the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from w4plugin.checkpoint.header import DTYPE_BITS, MAX_HEADER, encode_header, nbytes, read_header
from w4plugin.checkpoint.pickled import TORCH_DTYPE
from w4plugin.checkpoint.writer import ShardWriter, tensor_bytes
from w4plugin.errors import CorruptError, StorageError, UnsafeError, UnsupportedError


def write(path: Path, header: dict | str | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list, start: int, stop: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6, dtype=torch.int32).reshape(2, 3), "a": torch.ones(3, dtype=torch.float16)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "m.safetensors")
    assert header.metadata == {"format": "pt"}
    assert {name: (s.dtype, s.shape) for name, s in header.spans.items()} == {"b": ("I32", (2, 3)), "a": ("F16", (3,))}
    data = (tmp_path / "m.safetensors").read_bytes()
    assert np.frombuffer(data[header.spans["b"].start : header.spans["b"].stop], "<i4").tolist() == [0, 1, 2, 3, 4, 5]


def test_h1_shard_shorter_than_its_header(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(64)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptError, match=r"m\.safetensors: got .* bytes; wanted .* \(100 are missing\)"):
        read_header(path)


@pytest.mark.parametrize("keep", [0, 7, 8, 20])
def test_h2_cut_inside_the_header(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(64)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptError, match=r"m\.safetensors"):
        read_header(path)


def test_h2_absurd_header_length(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CorruptError, match=f"header length of {2**40}; wanted at most {MAX_HEADER}"):
        read_header(path)


def test_h2_overlap_and_gap(tmp_path: Path) -> None:
    overlap = write(
        tmp_path / "o.safetensors", {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12)
    )
    with pytest.raises(CorruptError, match="b: got data that overlaps a"):
        read_header(overlap)
    gap = write(tmp_path / "g.safetensors", {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, bytes(20))
    with pytest.raises(CorruptError, match="leaves 4 bytes unused after a"):
        read_header(gap)


def test_h2_duplicate_keys(tmp_path: Path) -> None:
    one = json.dumps(entry("F32", [2], 0, 8))
    for name in ("a", "\\u0061"):  # with an escape the slow path must find it too
        text = f'{{"a":{one},"{name}":{one}}}'
        with pytest.raises(CorruptError, match="'a' twice"):
            read_header(write(tmp_path / "d.safetensors", text, bytes(8)))
    hidden = f'{{"a":5,"a":{one}}}'
    with pytest.raises(CorruptError, match="'a' twice"):
        read_header(write(tmp_path / "d.safetensors", hidden, bytes(8)))
    inner = '{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}'
    with pytest.raises(CorruptError, match="'dtype' twice"):
        read_header(write(tmp_path / "d.safetensors", inner, bytes(8)))


@pytest.mark.parametrize(
    "header",
    [
        "[]", "{", "\x00", '{"a": 1}', '{"a": {"dtype": "F32"}}', '{"__metadata__": {"a": 1}}', '{"__metadata__": []}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": 1}}',
        '{"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}}',
        '{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [4294967296, 4294967296, 4294967296], "data_offsets": [0, 8]}}',
        '{"a\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}',
        "[" * 100000, '{"a":' * 100000,
    ],
)  # fmt: skip
def test_h2_headers_that_are_not_headers(tmp_path: Path, header: str) -> None:
    with pytest.raises(CorruptError, match=r"m\.safetensors"):
        read_header(write(tmp_path / "m.safetensors", header, bytes(8)))


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    text = json.dumps({"a": entry("F32", [2], 0, 8)})
    for codec in ("utf-16", "utf-16-le", "utf-32-le"):
        with pytest.raises(CorruptError):
            read_header(write(tmp_path / "m.safetensors", text.encode(codec), bytes(8)))
    with pytest.raises(CorruptError, match="not UTF-8"):
        read_header(write(tmp_path / "m.safetensors", b'{"\xff": 1}', bytes(8)))


def test_unknown_dtype_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="dtype 'INT4'"):
        read_header(write(tmp_path / "m.safetensors", {"a": entry("INT4", [2], 0, 1)}, bytes(1)))


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"a": entry("F32", [2], 0, 8)}, bytes(9))
    with pytest.raises(CorruptError, match="as its header says"):
        read_header(path)


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(UnsafeError, match="regular file"):
        read_header(tmp_path / "m.safetensors")
    with pytest.raises(StorageError, match="No such file"):
        read_header(tmp_path / "missing.safetensors")


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda n: n != "__metadata__")
TENSORS = st.dictionaries(
    NAMES,
    st.tuples(st.sampled_from(sorted(TORCH_DTYPE)), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(TENSORS, st.integers(0, 2**32))
def test_writer_equals_save_file(tmp_path_factory: pytest.TempPathFactory, spec: dict, seed: int) -> None:
    folder = tmp_path_factory.mktemp("writer")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (dtype, shape) in spec.items():
        size = nbytes(dtype, shape)
        raw = torch.randint(0, 2 if dtype == "BOOL" else 256, (size,), generator=generator, dtype=torch.uint8)
        tensors[name] = (
            raw.view(TORCH_DTYPE[dtype]).reshape(shape) if size else torch.empty(shape, dtype=TORCH_DTYPE[dtype])
        )
    save_file(tensors, folder / "theirs.safetensors", metadata={"format": "pt"})
    writer = ShardWriter(folder / "ours.safetensors", spec)
    for name, tensor in reversed(tensors.items()):
        writer.write(name, [tensor_bytes(tensor)])
    writer.finish()
    assert (folder / "ours.safetensors").read_bytes() == (folder / "theirs.safetensors").read_bytes()
    assert read_header(folder / "ours.safetensors").raw == encode_header(spec, {"format": "pt"})[0]
    back = load_file(folder / "ours.safetensors")
    assert all(torch.equal(tensor_bytes_of(back[n]), tensor_bytes_of(t)) for n, t in tensors.items())


def tensor_bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_writer_obeys_the_umask(tmp_path: Path) -> None:
    import os

    before = os.umask(0o027)
    try:
        writer = ShardWriter(tmp_path / "m.safetensors", {"a": ("U8", (1,))})
        writer.write("a", [memoryview(b"x")])
        writer.finish()
    finally:
        os.umask(before)
    assert (tmp_path / "m.safetensors").stat().st_mode & 0o777 == 0o640


def test_every_dtype_of_the_table_has_its_width() -> None:
    for name, dtype in TORCH_DTYPE.items():
        assert torch.empty(0, dtype=dtype).element_size() * 8 == DTYPE_BITS[name]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_headers_raise_only_our_errors(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    path = folder / "m.safetensors"
    save_file({"a": torch.zeros(3, 5), "b.qweight": torch.zeros(8, dtype=torch.int32)}, path, metadata={"format": "pt"})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 200))
        raw[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(raw))))
    path.write_bytes(raw[:cut])
    try:
        header = read_header(path)
    except (CorruptError, UnsupportedError):
        return
    assert sum(s.stop - s.start for s in header.spans.values()) == header.size - len(header.raw)
