"""What every host says in the same words; no host is imported."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from w4plugin.errors import UsageError
from w4plugin.note import Note

OTHER_MODEL = "config.json is of another model"
PLAIN_COPY = "`w4plugin dequantize` makes a plain checkpoint of this one"


def warn(notes: Iterable[Note], logger: logging.Logger) -> None:
    """Log what a reader should know of a checkpoint; which defaults were used is left out."""
    for note in notes:
        if note.level != "info":
            logger.warning("%s", note)


def loaded_twice(where: str) -> UsageError:
    """A weight came for a layer whose placeholders are gone."""
    return UsageError(
        where,
        got="a weight for a layer that is in its kernel's order",
        wanted="each weight once",
        todo="start a new engine; packed weights cannot be loaded again in place",
    )
