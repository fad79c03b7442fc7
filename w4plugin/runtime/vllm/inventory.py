"""A checkpoint's modules by vLLM's names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from w4plugin.runtime import inventory, mixture
from w4plugin.runtime.messages import warn
from w4plugin.runtime.vllm import versions


@dataclass
class Inventory(inventory.Inventory):
    """A checkpoint's modules by vLLM's names.

    Attributes:
        renames: pattern of a tensor's name to what it becomes, where the file has other names than vLLM's model reads.
    """

    renames: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, model: str, revision: str | None) -> Inventory:
        """Read the headers of a model's files.

        Raises:
            W4Error: the model cannot be opened, a shard is missing, or a module is of a kind that cannot be served.
        """
        cache = versions.download_folder()
        checkpoint = inventory.opened(model, revision, cache)
        found = cls.of(checkpoint, model, revision, cache)
        found.mixed_experts = mixture.policy()
        found.renames = versions.renames(checkpoint.config.get("model_type"), found.parts)
        for pattern, name in found.renames.items():
            found.parts = {re.sub(pattern, name, known): part for known, part in found.parts.items()}
        warn((*checkpoint.notes, *checkpoint.census.notes), versions.logger())
        return found

    def rename(self, mapper: Any) -> None:
        super().rename(versions.renames_only(mapper))

    def ranks_of_an_expert(self) -> int:
        return versions.ranks_of_an_expert()
