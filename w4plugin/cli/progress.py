"""A bar on stderr: bytes, speed and time left; nothing where stderr is no terminal or was asked to be quiet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Bar:
    """``begin`` with the bytes to come, then ``advance`` with bytes done; from any thread."""

    what: str
    quiet: bool
    _bar: Any = field(default=None)

    def begin(self, total: int) -> None:
        from tqdm import tqdm

        # None switches the bar off where stderr is no terminal
        disable = True if self.quiet else None
        self._bar = tqdm(total=total, desc=self.what, unit="B", unit_scale=True, disable=disable, leave=False)

    def advance(self, count: int) -> None:
        self._bar.update(count)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextmanager
def bar(what: str, *, quiet: bool) -> Iterator[Bar]:
    """A bar for as long as the block runs."""
    shown = Bar(what, quiet)
    try:
        yield shown
    finally:
        shown.close()
