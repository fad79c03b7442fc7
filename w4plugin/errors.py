"""The closed family of errors.

Every error a user can meet says four things: where it happened, what was found, what was wanted, and what to do next.
Each class carries the exit code of the command line. Anything else that escapes is a bug of ours.
"""

from __future__ import annotations

from typing import ClassVar


class W4Error(Exception):
    """Base of the family; never raised itself.

    Args:
        where: file, module or argument the error is about.
        got: what was found there.
        wanted: what would have been right.
        todo: what the reader can do about it; empty when nothing helps.
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "error"

    def __init__(self, where: str, *, got: str, wanted: str, todo: str = "") -> None:
        self.where, self.got, self.wanted, self.todo = where, got, wanted, todo
        super().__init__(where, got, wanted, todo)

    def __str__(self) -> str:
        line = f"{self.where}: got {self.got}; wanted {self.wanted}"
        return f"{line}. {self.todo}" if self.todo else line

    def at(self, where: str) -> W4Error:
        """The same error, with the place that contains it named first."""
        return type(self)(f"{where}: {self.where}", got=self.got, wanted=self.wanted, todo=self.todo)

    def __reduce__(self) -> tuple[object, ...]:  # keyword-only arguments do not survive the default pickling
        return (_rebuild, (type(self), self.where, self.got, self.wanted, self.todo))


def _rebuild(cls: type[W4Error], where: str, got: str, wanted: str, todo: str) -> W4Error:
    return cls(where, got=got, wanted=wanted, todo=todo)


class MismatchError(W4Error):
    """Two things that must be equal are not (exit 1)."""

    exit_code = 1
    kind = "mismatch"


class UsageError(W4Error):
    """The caller asked for something that makes no sense (exit 2)."""

    exit_code = 2
    kind = "usage"


class UnsupportedError(W4Error):
    """The input is well formed, but not something this project can represent or run (exit 3)."""

    exit_code = 3
    kind = "unsupported"


class CorruptError(W4Error):
    """The input contradicts itself or is damaged (exit 4)."""

    exit_code = 4
    kind = "corrupt"


class UnsafeError(W4Error):
    """The input tries to leave its folder or to run code (exit 4)."""

    exit_code = 4
    kind = "unsafe"


class StorageError(W4Error):
    """Reading or writing failed: disk, permissions, network (exit 5)."""

    exit_code = 5
    kind = "i/o"
