"""All or nothing: kills at every step, resuming, and folders that must not be touched."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint import models
from w4plugin.checkpoint import disk
from w4plugin.checkpoint.output import Request
from w4plugin.checkpoint.repack import repack
from w4plugin.checkpoint.staging import REPORT
from w4plugin.checkpoint.verify import verify
from w4plugin.errors import CorruptError, StorageError, UsageError

STEPS = ("create", "write_at", "sync", "sync_folder", "rename", "exchange", "make_folder", "remove", "remove_folder")

# Forks a child for each step on the disk, which repacks and dies right before that step (or, in the middle of a write,
# with half of it done), and waits for a line on stdin between two of them.
CHILD = """
import itertools, os, sys, threading
from pathlib import Path
from w4plugin.checkpoint import disk
from w4plugin.checkpoint.output import Request
from w4plugin.checkpoint.repack import repack
from huggingface_hub import ModelCard, split_state_dict_into_shards_factory  # once, not in every child

os.fsync = lambda descriptor: None  # a killed process loses nothing that it gave to the system
source, out, force = sys.argv[1:]
lock = threading.Lock()

def run(at):
    steps = itertools.count(1)
    def deadly(name, step):
        def call(*arguments):
            with lock:
                if next(steps) == at:
                    if name == "write_at" and at % 2:
                        path, descriptor, data, offset = arguments
                        step(path, descriptor, data[: len(data) // 2], offset)
                    os._exit(9)
            return step(*arguments)
        return call
    for name in STEPS:
        setattr(disk, name, deadly(name, getattr(disk, name)))
    repack(source, Request(Path(out), workers=1, max_shard_size="4KB", force=force == "force"))

for at in itertools.count(1):
    child = os.fork()
    if child == 0:
        try:
            run(at)
            os._exit(0)
        except BaseException as fault:
            print(repr(fault), file=sys.stderr, flush=True)
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("killed", at, status, flush=True)
    if not sys.stdin.readline() or status == 0:
        break
"""


def kills(source: Path, out: Path, *, force: bool = False) -> Iterator[tuple[int, bool]]:
    """(step, whether the run lived to its end) after each death; ends after the first run that lived."""
    code = CHILD.replace("STEPS", repr(STEPS))
    arguments = [sys.executable, "-c", code, str(source), str(out), "force" if force else "no"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        for line in process.stdout:
            _, at, status = line.split()
            assert status in ("0", "9"), line
            yield int(at), status == "0"
            process.stdin.write("next\n")
            process.stdin.flush()
        process.wait()
    assert process.returncode == 0


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_nothing_or_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every kill there is no OUT, or all of it; and the same command then gives the same bytes."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    source = models.gptq(tmp_path / "in", count=4, shards=2)
    repack(source, Request(tmp_path / "want", workers=1, max_shard_size="4KB"))
    want = models.contents(tmp_path / "want")
    out = tmp_path / "out"
    partial = tmp_path / "out.partial"
    deaths = resumed = 0
    for at, lived in kills(source, out):
        if out.exists():
            assert models.contents(out) == want, at
        else:
            assert not lived
            deaths += 1
            report = repack(source, Request(out, workers=1, max_shard_size="4KB"))
            assert models.contents(out) == want, at
            resumed += report["resumed"]
        assert not partial.exists()
        shutil.rmtree(out)
    assert deaths > 90
    assert resumed > 70


@pytest.mark.slow
def test_a_kill_while_an_output_is_replaced_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    source, other = models.gptq(tmp_path / "in", count=2), models.awq(tmp_path / "other", count=2)
    repack(source, Request(tmp_path / "want", workers=1, max_shard_size="4KB"))
    repack(other, tmp_path / "old")
    want, old = models.contents(tmp_path / "want"), models.contents(tmp_path / "old")
    out = tmp_path / "out"
    shutil.copytree(tmp_path / "old", out)
    seen = set()
    for at, _ in kills(source, out, force=True):
        found = models.contents(out)
        assert found in (want, old), at
        seen.add(found == want)
        repack(source, Request(out, workers=1, max_shard_size="4KB", force=True))
        assert models.contents(out) == want, at
        assert not (tmp_path / "out.partial").exists()
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "old", out)
    assert seen == {True, False}


def test_resuming_reads_only_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.gptq(tmp_path / "in", count=6)
    request = Request(tmp_path / "out", workers=1, max_shard_size="4KB")
    full = disk.rename
    done = []

    def failing(one: Path, two: Path) -> None:
        if len(done) == 3 and two.suffix == ".safetensors":
            raise StorageError(str(two), got="a full disk", wanted="space")
        done.extend([two] if two.suffix == ".safetensors" else [])
        full(one, two)

    monkeypatch.setattr(disk, "rename", failing)
    with pytest.raises(StorageError, match="a full disk"):
        repack(source, request)
    assert (tmp_path / "out.partial").is_dir()
    kept = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out.partial").glob("*.safetensors")}
    assert len(kept) == 3
    monkeypatch.setattr(disk, "rename", full)
    report = repack(source, request)
    assert report["resumed"]
    assert {n: (tmp_path / "out" / n).stat().st_mtime_ns for n in kept} == kept
    repack(source, Request(tmp_path / "again", workers=1, max_shard_size="4KB"))
    assert models.contents(tmp_path / "out") == models.contents(tmp_path / "again")


def test_another_request_does_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.gptq(tmp_path / "in", count=6, order="sequential")
    with monkeypatch.context() as patch:
        patch.setattr(disk, "exchange", None)
        patch.setattr(disk, "remove_folder", _kept(disk.remove_folder, ".w4plugin"))
        with pytest.raises(StorageError):
            repack(source, Request(tmp_path / "out", max_shard_size="4KB"))
    assert len(list((tmp_path / "out.partial").glob("*.safetensors"))) > 3
    report = repack(source, Request(tmp_path / "out", max_shard_size="4KB"), to="awq")
    assert not report["resumed"]
    assert verify(source, tmp_path / "out")["ok"]
    assert not list((tmp_path / "out").glob(".*"))


def _kept(step: object, name: str) -> object:
    def call(path: Path) -> None:
        if path.name == name:
            raise StorageError(str(path), got="it", wanted="to stay")
        step(path)  # type: ignore[operator]

    return call


def test_a_changed_source_does_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.gptq(tmp_path / "in", count=4)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "remove_folder", _kept(disk.remove_folder, ".w4plugin"))
        with pytest.raises(StorageError):
            repack(source, tmp_path / "out")
    file = source / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    report = repack(source, tmp_path / "out")
    assert not report["resumed"]
    assert verify(source, tmp_path / "out")["ok"]


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in", count=1)
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    for force, match in ((False, "not empty.*--force"), (True, f"without {REPORT}")):
        with pytest.raises(UsageError, match=match):
            repack(source, Request(out, force=force))
    assert (out / "thesis.txt").read_text() == "mine"
    (out / "thesis.txt").unlink()
    repack(source, out)  # an empty folder is as good as none
    with pytest.raises(UsageError, match="--force"):
        repack(source, out)
    repack(source, Request(out, force=True))
    assert verify(source, out)["ok"]
    assert not (tmp_path / "out.partial").exists()


def test_a_partial_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in", count=1)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="did not write"):
        repack(source, tmp_path / "out")
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "mine"


def test_places_that_are_no_new_folder(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in", count=1)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out, match in (
        (source, "inside or around"), (source / "inside", "inside or around"), (tmp_path, "inside or around"),
        (tmp_path / "file", "link or a file"), (tmp_path / "link", "link or a file"), (Path("/"), "inside or around"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=match):
            repack(source, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "in", "link"]
    assert sorted(p.name for p in source.iterdir()) == sorted([*models.SIDE_FILES, "config.json", "model.safetensors"])


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in", count=1)
    partial = tmp_path / "out.partial"
    partial.mkdir()
    other = os.open(partial, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="another run"):
        repack(source, tmp_path / "out")
    os.close(other)
    repack(source, tmp_path / "out")


def test_a_disk_without_room_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.gptq(tmp_path / "in", count=1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(StorageError, match="GB free"):
        repack(source, tmp_path / "out")


def test_what_the_system_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.gptq(tmp_path / "in", count=1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=r"No space left on device.*resumes"):
        repack(source, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.undo()
        (tmp_path / "out.partial").rename(tmp_path / "elsewhere")
    monkeypatch.undo()
    repack(source, tmp_path / "out")


def test_a_file_system_that_cannot_claim_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.gptq(tmp_path / "in", count=2)
    repack(source, tmp_path / "usual")

    class Libc:
        renameat2 = None

        @staticmethod
        def fallocate(*_: object) -> int:
            ctypes.set_errno(refusal)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc)
    refusal = errno.EOPNOTSUPP
    repack(source, tmp_path / "plain")
    assert models.contents(tmp_path / "usual") == models.contents(tmp_path / "plain")
    refusal = errno.ENOSPC
    with pytest.raises(StorageError, match="No space left on device"):
        repack(source, tmp_path / "full")


def test_writes_longer_than_a_piece_and_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PIECE", 64)
    data = os.urandom(1000)
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, block, at: whole(fd, block[:37], at))
    descriptor = disk.create(tmp_path / "x", 1100)
    disk.write_at(tmp_path / "x", descriptor, memoryview(data), 100)
    os.close(descriptor)
    assert (tmp_path / "x").read_bytes() == bytes(100) + data


def test_an_unreadable_input_leaves_no_partial_folder(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in", count=1)
    (source / "config.json").write_text("{")
    with pytest.raises(CorruptError):
        repack(source, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
