"""Opening checkpoints: shards, indexes, stale and doubled tensors, pickles, and data as safetensors reads it."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from tests.checkpoint import models
from tests.formats import samples
from tests.formats.samples import truth
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.output import Request
from w4plugin.checkpoint.repack import repack
from w4plugin.checkpoint.verify import verify
from w4plugin.errors import CorruptError, UnsafeError, UnsupportedError, UsageError, W4Error


@pytest.mark.parametrize("source", models.REAL, ids=lambda p: p.name)
def test_data_is_what_safetensors_reads(source: Path) -> None:
    checkpoint = Checkpoint.open(source)
    (file,) = source.glob("*.safetensors")
    theirs = load_file(file)
    assert list(checkpoint.headers) == sorted(theirs)
    for name, tensor in theirs.items():
        mine = checkpoint.tensor(name)
        assert mine.dtype == tensor.dtype
        assert torch.equal(mine, tensor)
        assert b"".join(bytes(b) for b in checkpoint.blocks(name, 1000)) == bytes(
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        )
        assert checkpoint.nbytes(name) == tensor.nbytes


def test_shards_with_an_index(tmp_path: Path) -> None:
    single, sharded = models.awq(tmp_path / "one"), models.awq(tmp_path / "many", shards=3)
    one, many = Checkpoint.open(single), Checkpoint.open(sharded)
    assert one.headers == many.headers
    assert len(many.files) == 3
    assert all(torch.equal(one.tensor(n).view(torch.uint8), many.tensor(n).view(torch.uint8)) for n in one.headers
               if one.headers[n].shape)  # fmt: skip


def test_h5_stale_tensors_are_ignored(tmp_path: Path) -> None:
    source = models.awq(tmp_path / "in", shards=2)
    first, second = sorted(source.glob("*.safetensors"))
    moved = load_file(second)
    name = next(iter(moved))
    stale = {**load_file(first), name: torch.ones(3), "unknown.weight": torch.ones(2)}
    want = Checkpoint.open(source).tensor(name)
    save_file(stale, first, {"format": "pt"})
    checkpoint = Checkpoint.open(source)
    assert torch.equal(checkpoint.tensor(name), want)
    assert "unknown.weight" not in checkpoint.headers
    notes = {(n.level, n.where) for n in checkpoint.notes}
    assert ("warning", first.name) in notes
    repack(source, tmp_path / "out")
    assert verify(source, tmp_path / "out")["ok"]


def test_h5_the_same_tensor_in_two_files_without_an_index(tmp_path: Path) -> None:
    t = truth()
    tensors = models.layers({models.name(0): samples.pack_awq(t)})
    source = models.folder(tmp_path / "in", tensors, samples.awq_config(t))
    (source / "model.safetensors").rename(source / "a.safetensors")
    name = f"{models.name(0)}.scales"
    save_file({name: tensors[name].clone(), "b.weight": torch.ones(2)}, source / "b.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(source)
    assert "b.weight" in checkpoint.headers
    assert any("the same bytes" in n.text for n in checkpoint.notes)
    save_file({name: tensors[name] * 2}, source / "b.safetensors", {"format": "pt"})
    with pytest.raises(CorruptError, match=r"scales: got different contents in a\.safetensors and b\.safetensors"):
        Checkpoint.open(source)
    save_file({name: tensors[name].float()}, source / "b.safetensors", {"format": "pt"})
    with pytest.raises(CorruptError, match="no index to choose"):
        Checkpoint.open(source)


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    source = models.awq(tmp_path / "in", shards=2)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.9.mlp.down_proj.qweight"] = "model-00001-of-00002.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptError, match=r"model\.layers\.9\.mlp\.down_proj\.qweight"):
        Checkpoint.open(source)


def test_h1_a_cut_shard_is_refused_before_any_work(tmp_path: Path) -> None:
    source = models.awq(tmp_path / "in", shards=3)
    last = sorted(source.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(CorruptError, match=rf"{last.name}: .*100 are missing"):
        repack(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_mutated_folders_raise_only_our_errors(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any bytes changed or cut anywhere: one of our errors and nothing written, or a whole output that verifies."""
    folder = tmp_path_factory.mktemp("mutated")
    kind, shards = data.draw(st.sampled_from(models.FORMATS)), data.draw(st.sampled_from([1, 2]))
    source = models.of_format(folder / "in", kind, shards=shards)
    names = sorted(p.name for p in source.iterdir() if p.suffix in (".json", ".safetensors") and "token" not in p.name)
    path = source / data.draw(st.sampled_from(names))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(1, 4))] = data.draw(st.binary(min_size=0, max_size=4))
    path.write_bytes(raw)
    out = folder / "out"
    try:
        repack(source, Request(out))
    except W4Error:
        assert not out.exists()
        assert not (folder / "out.partial").exists()
    else:
        result = verify(source, out)
        assert result["ok"], result["mismatches"]


class Exploding:
    """What a hostile pickle does."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.mark}",)


def pickled_model(path: Path) -> Path:
    source = models.awq(path)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    return source


def test_h9_a_pickle_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for how in ("torch", "plain", "legacy"):
        source = models.awq(tmp_path / how)
        (source / "model.safetensors").unlink()
        content = {"a.qweight": torch.zeros(2), "evil": Exploding(mark)}
        with open(source / "pytorch_model.bin", "wb") as file:
            if how == "plain":
                pickle.dump(content, file)
            else:
                torch.save(content, file, _use_new_zipfile_serialization=how == "torch")
        with pytest.raises(UnsafeError, match="--allow-pickle"):
            Checkpoint.open(source)
        with pytest.raises((UnsafeError, CorruptError), match=r"pytorch_model\.bin") as caught:
            Checkpoint.open(source, allow_pickle=True)
        assert "weights_only=False" not in str(caught.value)
        assert not mark.exists()


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
@pytest.mark.parametrize("legacy", [False, True])
def test_h9_a_pickle_of_tensors_is_read_when_asked(tmp_path: Path, wrapper: str | None, legacy: bool) -> None:
    want = models.awq(tmp_path / "want")
    source = models.awq(tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    content = tensors if wrapper is None else {wrapper: tensors, "epoch": 3}
    torch.save(content, source / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    checkpoint = Checkpoint.open(source, allow_pickle=True)
    assert checkpoint.pickled
    repack(checkpoint, tmp_path / "out")
    assert verify(want, tmp_path / "out")["ok"]
    assert verify(checkpoint, tmp_path / "out")["ok"]


def test_pickles_in_shards_and_of_odd_layout(tmp_path: Path) -> None:
    source = models.awq(tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    base = torch.arange(12.0).reshape(3, 4)
    tensors["transposed.weight"], tensors["shared.weight"] = base.t(), base[:, 1:]
    names = sorted(tensors)
    weight_map = {n: f"pytorch_model-{i % 2 + 1:05d}-of-00002.bin" for i, n in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        torch.save({n: tensors[n] for n in names if weight_map[n] == file}, source / file)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint.open(source, allow_pickle=True)
    repack(checkpoint, tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after["transposed.weight"], base.t())
    assert torch.equal(after["shared.weight"], base[:, 1:])
    assert verify(checkpoint, tmp_path / "out")["ok"]


def test_awq_search_results_are_explained(tmp_path: Path) -> None:
    torch.save({"scale": [("a", ("b",), torch.ones(3))], "clip": []}, tmp_path / "llama-w4-g128.pt")
    with pytest.raises(UnsupportedError, match="result of AWQ's scale search"):
        Checkpoint.open(tmp_path, allow_pickle=True)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04broken", b"\x80\x04nonsense", b"hello"])
def test_files_that_are_no_pickle(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises((CorruptError, UnsafeError), match=r"pytorch_model\.bin"):
        Checkpoint.open(tmp_path, allow_pickle=True)


def test_r8_llm_awq_pickle_becomes_safetensors(tmp_path: Path) -> None:
    t = truth(K=128, N=32, size=64, dtype=torch.bfloat16)
    tensors = {**models.layers({models.name(0): samples.pack_fast(t, "scaled_zeros")}), **models.plain()}
    (tmp_path / "in").mkdir()
    torch.save(tensors, tmp_path / "in" / "llama-w4-g64-awq-v2.pt")
    (tmp_path / "in" / "config.json").write_text(json.dumps({**models.CONFIG, "quantization_config": {
        "quant_method": "awq", "backend": "llm-awq", "w_bit": 4, "q_group_size": 64}}))  # fmt: skip
    checkpoint = Checkpoint.open(tmp_path / "in", allow_pickle=True)
    report = repack(checkpoint, tmp_path / "out")
    assert report["modules"][0]["from"] == "llm-awq"
    assert verify(checkpoint, tmp_path / "out")["ok"]


def test_models_that_are_nowhere(tmp_path: Path) -> None:
    for model in (tmp_path / "nothing", tmp_path / "nothing" / "at" / "all"):
        with pytest.raises(UsageError, match="nothing there"):
            Checkpoint.open(model)
    with pytest.raises(UsageError, match="--revision"):
        Checkpoint.open(models.REAL[0], revision="main")
