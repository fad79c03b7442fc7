"""Which files of a folder count, and which names in them may be opened."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from w4plugin.checkpoint import weight_files
from w4plugin.checkpoint.source import local
from w4plugin.errors import CorruptError, StorageError, UnsafeError, UsageError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        save_file({"a": torch.zeros(1)}, folder / name)


def index(folder: Path, weight_map: object, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def find(folder: Path, base: object = None, allow_pickle: bool = False) -> weight_files.WeightFiles:
    return weight_files.find(local(folder), base, allow_pickle=allow_pickle)


@pytest.mark.parametrize(
    ("present", "base", "chosen"),
    [
        (["model.safetensors"], None, ["model.safetensors"]),
        (["gptq_model-4bit-128g.safetensors"], None, ["gptq_model-4bit-128g.safetensors"]),
        (["gptq_model-4bit--1g.safetensors", "autogptq_model_awq_gptq.safetensors"], None,
         ["gptq_model-4bit--1g.safetensors"]),
        (["model.safetensors", "adapter_model.safetensors", "other.safetensors"], None, ["model.safetensors"]),
        (["mine.safetensors", "other.safetensors"], "mine", ["mine.safetensors"]),
        (["mine.safetensors", "other.safetensors"], "../mine", ["mine.safetensors", "other.safetensors"]),
        (["vicuna-13B-4bit-128g.no-act-order.safetensors"], None, ["vicuna-13B-4bit-128g.no-act-order.safetensors"]),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], None,
         ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        (["adapter_model.safetensors"], None, ["adapter_model.safetensors"]),
        (["4bit-128g.pt"], None, ["4bit-128g.pt"]),
        (["pytorch_model.bin", "training_args.bin", "optimizer.pt"], None, ["pytorch_model.bin"]),
    ],
)  # fmt: skip
def test_which_files(tmp_path: Path, present: list[str], base: str | None, chosen: list[str]) -> None:
    touch(tmp_path, *present)
    found = find(tmp_path, base, allow_pickle=True)
    assert list(found.names) == chosen
    assert {note.where for note in found.notes} == {n for n in present if n not in chosen and not n.endswith(
        ("training_args.bin", "optimizer.pt"))}  # fmt: skip


def test_index_decides(tmp_path: Path) -> None:
    touch(tmp_path, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors")
    index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    found = find(tmp_path)
    assert found.names == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert [note.where for note in found.notes] == ["model.safetensors"]


def test_two_indexes(tmp_path: Path) -> None:
    touch(tmp_path, "x.safetensors", "y.safetensors")
    index(tmp_path, {"a": "x.safetensors"}, "x.safetensors.index.json")
    index(tmp_path, {"a": "y.safetensors"}, "y.safetensors.index.json")
    with pytest.raises(CorruptError, match="2 indexes"):
        find(tmp_path)
    assert find(tmp_path, "y").names == ("y.safetensors",)
    index(tmp_path, {"a": "x.safetensors"})
    assert find(tmp_path).index == "model.safetensors.index.json"


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/abs.safetensors", "a/../../x.safetensors", "a/x.safetensors", "..", ".", "",
     "x\0.safetensors", "..\\x.safetensors", " x.safetensors", "x.safetensors\n"],
)  # fmt: skip
def test_h3_names_that_are_paths(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    touch(tmp_path, "x.safetensors")
    touch(folder, "y.safetensors")
    index(folder, {"a": name, "b": "y.safetensors"})
    with pytest.raises(UnsafeError, match="one plain name"):
        find(folder)


def test_h3_an_index_names_only_weights(tmp_path: Path) -> None:
    touch(tmp_path, "y.safetensors")
    index(tmp_path, {"a": "config.json"})
    with pytest.raises(UnsafeError, match=r"ends in \.safetensors"):
        find(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x", {"a": 1}, {"a": None}])
def test_index_that_is_not_one(tmp_path: Path, weight_map: object) -> None:
    touch(tmp_path, "model.safetensors")
    index(tmp_path, weight_map)
    with pytest.raises(CorruptError, match="index"):
        find(tmp_path)


def test_h8_shard_named_in_the_index_is_absent(tmp_path: Path) -> None:
    touch(tmp_path, "model-00001-of-00002.safetensors")
    index(tmp_path, {
        "model.layers.0.q_proj.qweight": "model-00001-of-00002.safetensors",
        "model.layers.1.q_proj.qweight": "model-00002-of-00002.safetensors",
        "model.layers.1.q_proj.scales": "model-00002-of-00002.safetensors",
    })  # fmt: skip
    with pytest.raises(CorruptError, match=r"no file model-00002-of-00002.*missing: model\.layers\.1\.q_proj"):
        find(tmp_path)


def test_h8_a_part_is_missing_without_an_index(tmp_path: Path) -> None:
    touch(tmp_path, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    with pytest.raises(CorruptError, match=r"2 of 3 files model-.*also part 2"):
        find(tmp_path)


def test_h9_pickles_only_when_asked(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsafeError, match="--allow-pickle"):
        find(tmp_path)
    assert find(tmp_path, allow_pickle=True).pickled
    touch(tmp_path, "model.safetensors")
    assert find(tmp_path, allow_pickle=True).names == ("model.safetensors",)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no weight file"):
        find(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UsageError, match=r"only model\.gguf"):
        find(tmp_path)
    with pytest.raises(UsageError, match="nothing there"):
        local(tmp_path / "missing")
    with pytest.raises(UsageError, match="a file"):
        local(tmp_path / "model.gguf")


def test_links_stay_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    touch(tmp_path, "outside.safetensors")
    touch(folder, "inside.safetensors")
    (folder / "good.safetensors").symlink_to("inside.safetensors")
    (folder / "bad.safetensors").symlink_to("../outside.safetensors")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    assert local(folder).file("good.safetensors").name == "good.safetensors"
    with pytest.raises(UnsafeError, match="leaves the checkpoint's folder"):
        local(folder).file("bad.safetensors")
    with pytest.raises(StorageError, match=r"loop\.safetensors"):
        local(folder).file("loop.safetensors")
    os.mkfifo(folder / "pipe")
    with pytest.raises(UnsafeError, match="regular file"):
        local(folder).file("pipe")
    (tmp_path / "alias").symlink_to(folder)  # the user's own link to the folder is the user's business
    assert local(tmp_path / "alias").file("inside.safetensors").exists()


def test_links_of_a_hub_cache_lead_to_its_blobs(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    touch(repo / "blobs", "aa")
    touch(tmp_path, "secret")
    (snapshot / "model.safetensors").symlink_to("../../blobs/aa")
    (snapshot / "stolen.safetensors").symlink_to("../../../secret")
    source = local(snapshot)
    assert source.file("model.safetensors").exists()
    assert source.label() == "org/name@0123456789abcdef0123456789abcdef01234567"
    with pytest.raises(UnsafeError, match="leaves"):
        source.file("stolen.safetensors")


def test_configs_are_read_strictly(tmp_path: Path) -> None:
    for text, match in (
        (b"[]", "a JSON list"), (b"{", "not JSON"), (b"\xff", "UTF-8"), (b'{"a": 1, "a": 2}', "'a' twice"),
        (b'{"a": NaN}', "NaN"), (b'{"a": {}, "a": {}}', "'a' twice"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(CorruptError, match=match):
            weight_files.read_json(local(tmp_path), "config.json")
    (tmp_path / "config.json").write_bytes(b'{"a": 1, "a": 1}')
    assert weight_files.read_json(local(tmp_path), "config.json") == {"a": 1}
