"""What torch.compile baked in, made part of the name under which vLLM caches what it compiled.

vLLM names its compile cache after its configs and the traced source, and trusts it blindly: a graph found there is used
without a look at what it was made for. Ours depends on the checkpoint's data as well: which backend took a layer, and
whether q, k and v could be one multiplication. So every layer adds that to ``additional_config``, which vLLM hashes.
"""

from __future__ import annotations

import hashlib
from typing import Any

from w4plugin import __version__

KEY = "w4plugin"


def add(additional_config: Any, prefix: str, pieces: object) -> None:
    """Fold one layer's multiplications into the digest; a platform's own config object is left alone."""
    if isinstance(additional_config, dict):
        before = additional_config.get(KEY, __version__)
        additional_config[KEY] = hashlib.sha256(f"{before} {prefix} {pieces!r}".encode()).hexdigest()
