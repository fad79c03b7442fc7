"""Where a checkpoint lies: a local folder, or a snapshot in the hub's cache; and which names in it may be opened.

A name that comes out of a checkpoint (an index, a config) is one plain file name, or it is refused. What a name points
to must lie in the checkpoint's folder; the one exception is the hub's own cache, where every file of a snapshot is a
link into the ``blobs`` folder of the same repository.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from w4plugin.errors import StorageError, UnsafeError, UsageError


@dataclass(frozen=True)
class Source:
    """A folder that holds a checkpoint.

    Attributes:
        folder: where it lies on this machine.
        repo: hub id, None for a plain folder.
        commit: the full commit of a hub snapshot, None for a plain folder.
        revision: what the user asked for (branch, tag or commit), None for the default branch.
        remote: weight files that were left on the hub, of which only headers can be had.
    """

    folder: Path
    repo: str | None = None
    commit: str | None = None
    revision: str | None = None
    remote: frozenset[str] = frozenset()

    def label(self) -> str:
        """What a report calls the source: no path of this machine, so that reports compare."""
        if self.repo is None:
            return self.folder.resolve().name
        return f"{self.repo}@{self.commit}" if self.commit else self.repo

    def names(self) -> list[str]:
        """Plain file names in the folder or left on the hub, sorted; folders and hidden files are left out."""
        try:
            with os.scandir(self.folder) as entries:
                here = [e.name for e in entries if not e.name.startswith(".") and not e.is_dir()]
                return sorted({*here, *self.remote})
        except OSError as fault:
            raise StorageError(
                str(self.folder), got=fault.strerror or str(fault), wanted="a readable folder"
            ) from fault

    def folders(self) -> list[str]:
        """Names of folders in the folder, sorted, hidden ones left out."""
        with os.scandir(self.folder) as entries:
            return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())

    def file(self, name: str, *, named_by: str = "", inside: str = "") -> Path:
        """The path of the file ``name``, after every check of this module.

        Args:
            name: one plain file name.
            named_by: the file that asked for it, for the message.
            inside: a folder of the folder in which it lies.

        Raises:
            UnsafeError: not one plain name, or it leaves the folder.
            StorageError: it is missing or cannot be read.
        """
        where = named_by or str(self.folder)
        if not plain_name(name):
            raise UnsafeError(
                where, got=f"the file name {name!r}", wanted="one plain name inside the checkpoint's own folder"
            )
        path = self.folder / inside / name
        try:
            real = path.resolve(strict=True)
            mode = os.stat(real).st_mode
        except (OSError, RuntimeError) as fault:  # RuntimeError: a loop of links
            text = getattr(fault, "strerror", None) or str(fault)
            raise StorageError(str(path), got=text, wanted="a readable file") from fault
        roots = [self.folder.resolve()]
        blobs = cache_blobs(self.folder)
        if blobs is not None:
            roots.append(blobs)
        if not any(real.is_relative_to(root) for root in roots):
            raise UnsafeError(
                name,
                got="a link that leaves the checkpoint's folder",
                wanted="files inside it (only a hub cache links elsewhere)",
                todo="Copy the file in place of the link if you trust it.",
            )
        if not stat.S_ISREG(mode):
            raise UnsafeError(name, got="a pipe, device or folder", wanted="a regular file")
        return path


def plain_name(name: str) -> bool:
    """True for one file name without any path in it."""
    return bool(name) and name not in (".", "..") and not any(c in name for c in "/\\\0") and name == name.strip()


def cache_blobs(folder: Path) -> Path | None:
    """The ``blobs`` folder that a snapshot of the hub's cache links into; None for any other folder."""
    real = folder.resolve()
    repo = real.parent.parent
    if real.parent.name == "snapshots" and "--" in repo.name and (repo / "blobs").is_dir():
        return (repo / "blobs").resolve()
    return None


def local(folder: Path) -> Source:
    """The source of a folder on this machine.

    Raises:
        UsageError: it does not exist, or is a file.
    """
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing there"
        raise UsageError(str(folder), got=got, wanted="a folder that holds a checkpoint, or a hub id like org/name")
    blobs = cache_blobs(folder)
    if blobs is None:
        return Source(folder)
    real = folder.resolve()
    kind, _, repo = real.parent.parent.name.partition("--")
    return Source(folder, repo.replace("--", "/") if kind == "models" else None, real.name)
