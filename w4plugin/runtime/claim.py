"""Which checkpoints the plugins take without ``--quantization w4plugin``: the variable ``W4PLUGIN_CLAIM``.

auto    (default) those that the host would refuse or misread, as far as it lets a plugin see; the rest stay its
all     every one that the plugin understands
never   none
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from w4plugin.errors import UsageError, W4Error
from w4plugin.quant_config import QuantConfig

VARIABLE = "W4PLUGIN_CLAIM"
POLICIES = ("auto", "all", "never")
METHODS = ("gptq", "awq", "auto-round", "compressed-tensors")


def policy() -> str:
    """The value of W4PLUGIN_CLAIM."""
    value = os.environ.get(VARIABLE, "auto").lower()
    if value not in POLICIES:
        raise UsageError(VARIABLE, got=repr(value), wanted=" | ".join(POLICIES))
    return value


def understood(quantization_config: Mapping[str, Any], logger: logging.Logger) -> QuantConfig | None:
    """What a ``quantization_config`` says; None of a method or a width that is not the plugins' to claim."""
    try:
        config = QuantConfig.from_dict(quantization_config)
    except W4Error as error:
        logger.debug("not claimed: %s", error)
        return None
    return config if config.method in METHODS and config.bits in (None, 4) else None
