"""Every change this project makes to a disk, in a few functions that raise StorageError with the path.

All of them go through this module, so that one test can kill a run after each single step.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from w4plugin.errors import StorageError, UsageError

_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def storage(path: Path, doing: str) -> Iterator[None]:
    """Turn the operating system's error into ours, with what was being done."""
    try:
        yield
    except OSError as fault:
        todo = "Free some space and run the same command again: it resumes." if fault.errno == errno.ENOSPC else ""
        raise StorageError(str(path), got=fault.strerror or str(fault), wanted=f"to {doing}", todo=todo) from fault


def create(path: Path, size: int = 0) -> int:
    """A new file of ``size`` bytes, open for reading and writing; an older one of that name is replaced.

    The disk's blocks are claimed at once where the file system can: a full disk shows here, and writing is faster.
    """
    with storage(path, "create it"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            _claim(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def _claim(descriptor: int, size: int) -> None:
    # not os.posix_fallocate: where the file system cannot, it writes into every block instead
    libc = ctypes.CDLL(None, use_errno=True)
    if size and libc.fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(size)):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))
        os.ftruncate(descriptor, size)


PIECE = 256 << 10
"""Bytes of one write. Larger ones make the page cache take larger runs of free memory, which on a virtual machine are
those that went back to the host: from 512 KB on, two gigabytes took between the same time and five times as long (ext4,
Linux 6.18). Smaller ones cost calls."""


def write_at(path: Path, descriptor: int, data: memoryview, offset: int) -> None:
    """All of ``data`` at ``offset``; a write that the system cuts short is continued."""
    with storage(path, f"write {len(data)} bytes"):
        while len(data):
            done = os.pwrite(descriptor, data[: PIECE - offset % PIECE], offset)
            data, offset = data[done:], offset + done


def sync(path: Path, descriptor: int) -> None:
    """Wait until the file's bytes are on the disk."""
    with storage(path, "flush it to the disk"):
        os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the folder's names are on the disk."""
    with storage(path, "flush the folder to the disk"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """A whole file: written beside its name, flushed, then renamed onto it."""
    beside = path.with_name(path.name + ".tmp")
    descriptor = create(beside)
    try:
        write_at(beside, descriptor, memoryview(data), 0)
        sync(beside, descriptor)
    finally:
        os.close(descriptor)
    rename(beside, path)


def copy_file(source: Path, target: Path) -> None:
    """A copy of ``source`` with the permissions of a new file (a hub cache's may be read-only)."""
    descriptor = create(target)
    try:
        with storage(source, "copy it"), open(source, "rb") as file:
            at = 0
            while block := file.read(1 << 20):
                write_at(target, descriptor, memoryview(block), at)
                at += len(block)
        sync(target, descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give ``source`` the name ``target``, at once and whole."""
    with storage(target, f"rename {source.name} to it"):
        os.rename(source, target)


def exchange(one: Path, other: Path) -> None:
    """Let two names trade what they stand for, at once; there is no moment without either."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = -100  # AT_FDCWD: paths are relative to the working folder
    with storage(other, f"exchange it with {one.name}"):
        if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), _RENAME_EXCHANGE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def make_folder(path: Path) -> None:
    """A folder, which may exist."""
    with storage(path, "create the folder"):
        path.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Delete a file."""
    with storage(path, "delete it"):
        path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Delete a folder and what is in it."""
    with storage(path, "delete the folder"):
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


def lock(folder: Path) -> int:
    """Hold ``folder`` alone until the returned descriptor is closed or the process ends.

    Raises:
        UsageError: another run holds it.
    """
    with storage(folder, "lock it"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(
                str(folder), got="a folder that another run is writing", wanted="one run at a time", todo="Wait for it."
            ) from None
        return descriptor


def require_space(folder: Path, needed: int) -> None:
    """Refuse before any work when the file system of ``folder`` cannot hold ``needed`` more bytes."""
    with storage(folder, "ask for free space"):
        free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            str(folder), got=f"{free / 1e9:.2f} GB free", wanted=f"{needed / 1e9:.2f} GB", todo="Free some space."
        )
