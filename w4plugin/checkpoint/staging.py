"""All or nothing: output grows in ``OUT.partial`` and becomes ``OUT`` by one rename at the end.

``OUT.partial/.w4plugin`` remembers what the run was asked to do and which shards are finished. A later run that is
asked the same of the same input keeps those shards; any other run starts from nothing. A finished shard has been
flushed to the disk before it is remembered, so a cut of power costs at most the shards in flight.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from w4plugin.checkpoint import disk
from w4plugin.checkpoint.json_text import parse_json
from w4plugin.errors import CorruptError, StorageError, UsageError

REPORT = "w4plugin_report.json"
"""Written beside the weights; a folder without it is not replaced even by ``--force``."""

_MEMORY = ".w4plugin"
_PLAN = "plan.json"


class Staging:
    """The output folder of one run; a context manager that tidies up when the run fails.

    After an error of the input nothing is left. After a failure of the disk, or a kill, ``OUT.partial`` stays, and the
    same command resumes.
    """

    def __init__(self, out: Path, asked: Mapping[str, Any], *, force: bool = False) -> None:
        """Claim ``out``.

        Args:
            out: the folder to make; it must not exist, or be empty, or (with ``force``) be an output of this project.
            asked: everything the output depends on; equal means that finished shards may be kept.
            force: replace ``out`` at the end.

        Raises:
            UsageError: ``out`` is taken, or another run is writing it.
        """
        self.out = out
        self.folder = out.with_name(out.name + ".partial")
        require_free(out, force=force)
        disk.make_folder(self.folder)
        self._lock = disk.lock(self.folder)
        self._memory = self.folder / _MEMORY
        self._asked = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        self.corrections: dict[str, Any] = {}
        try:
            plan = self._remembered(_PLAN)
            self.resumed = plan.get("asked") == self._asked
            if self.resumed:
                self.corrections = plan["corrections"]
            else:
                self.restart({})
        except BaseException:  # nobody will leave a context that was never entered
            os.close(self._lock)
            raise

    def restart(self, corrections: Mapping[str, Any]) -> None:
        """Drop everything written so far, and remember what was learnt about the output's layout."""
        present = sorted(self.folder.iterdir())
        if present and not self._memory.is_dir() and not (self.folder / REPORT).is_file():
            raise UsageError(
                str(self.folder), got="a folder that this project did not write", wanted="that name free for the output"
                " while it grows", todo="Move it away, or choose another name for the output.",
            )  # fmt: skip
        # The mark stays while the rest goes: a run killed here leaves a folder that the next one knows as its own.
        disk.make_folder(self._memory)
        disk.remove(self._memory / _PLAN)
        for path in [*present, *sorted(self._memory.iterdir())]:
            if path != self._memory:
                (disk.remove_folder if path.is_dir() and not path.is_symlink() else disk.remove)(path)
        self.corrections = dict(corrections)
        self._remember(_PLAN, {"asked": self._asked, "corrections": self.corrections})

    def finished(self, shard: str) -> dict[str, Any] | None:
        """What was remembered of a finished shard, None when it must be written."""
        found = self._remembered(f"{shard}.json")
        return found if found and (self.folder / shard).is_file() else None

    def finish(self, shard: str, facts: Mapping[str, Any]) -> None:
        """Remember that ``shard`` is whole."""
        disk.sync_folder(self.folder)
        self._remember(f"{shard}.json", facts)

    def commit(self) -> None:
        """Make the folder the output."""
        disk.remove_folder(self._memory)
        disk.sync_folder(self.folder)
        if self.out.exists() and any(self.out.iterdir()):
            disk.exchange(self.folder, self.out)
            disk.remove_folder(self.folder)
        else:
            disk.rename(self.folder, self.out)
        disk.sync_folder(self.out.absolute().parent)

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if fault is not None and not isinstance(fault, (StorageError, KeyboardInterrupt)) and self.folder.exists():
            disk.remove_folder(self.folder)
        os.close(self._lock)

    def _remember(self, name: str, facts: Mapping[str, Any]) -> None:
        # in the order in which it was made, so that a report after a resume has its keys where they always are
        disk.write_file(self._memory / name, json.dumps(facts).encode())

    def _remembered(self, name: str) -> dict[str, Any]:
        path = self._memory / name
        try:
            return parse_json(name, path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, CorruptError):  # left by a crash of the machine: as good as nothing
            return {}


def require_free(out: Path, *, force: bool) -> None:
    """Refuse an output folder that holds something this run must not replace.

    Raises:
        UsageError: with what to do.
    """
    if out.name in ("", ".", "..") or out.name.startswith("~"):
        raise UsageError(str(out), got="no name of a new folder", wanted="the folder to create")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(str(out), got="a link or a file", wanted="a folder that does not exist yet")
    if not out.exists() or not any(out.iterdir()):
        return
    if not force:
        raise UsageError(
            str(out),
            got="a folder that is not empty",
            wanted="one that does not exist yet",
            todo="--force replaces it.",
        )
    if not (out / REPORT).is_file():
        raise UsageError(
            str(out), got=f"a folder without {REPORT}", wanted="an output of w4plugin, which --force may replace",
            todo="Move it away by hand if it is not needed.",
        )  # fmt: skip


def require_apart(source: Path, out: Path) -> None:
    """Refuse to write into the folder that is read, or around it."""
    one, other = source.resolve(), out.absolute().resolve()
    if one == other or other.is_relative_to(one) or one.is_relative_to(other):
        raise UsageError(str(out), got="the folder that is read, or one inside or around it", wanted="a folder apart")
