"""A checkpoint's modules by SGLang's names."""

from __future__ import annotations

from w4plugin.runtime import inventory
from w4plugin.runtime.inventory import Inventory
from w4plugin.runtime.messages import warn
from w4plugin.runtime.sglang import host


def opened(model: str, revision: str | None) -> Inventory:
    """Read the headers of a model's files.

    Raises:
        W4Error: the model cannot be opened, a shard is missing, or a module is of a kind that cannot be served.
    """
    cache = host.setting("download_dir")
    checkpoint = inventory.opened(model, revision, cache)
    warn((*checkpoint.notes, *checkpoint.census.notes), host.logger)
    return Inventory.of(checkpoint, model, revision, cache)
