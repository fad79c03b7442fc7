"""One line of a report: which rule or value decided, and where.

Notes are not errors: an error stops the work, a note is printed and kept. ``conflict`` means that two sources disagree
and one of them won; ``warning`` that a value is unusual or was interpreted; ``info`` that a default or a rule was used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["info", "warning", "conflict"]


@dataclass(frozen=True)
class Note:
    """A line of the report.

    Attributes:
        level: "info", "warning" or "conflict".
        where: module, tensor or config key.
        text: one sentence.
    """

    level: Level
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.text}"
