"""What SGLang tells a plugin, and what differs between its versions: the only file that knows.

Tested: 0.5.23, its layers and loaders on a CPU. Any other version gets one warning and is tried.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping
from typing import Any

NAME = "w4plugin"
"""The quantisation method's name in SGLang."""

TESTED = (0, 5, 23)

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""What SGLang's models fuse; few of its classes say so themselves."""

logger = logging.getLogger(f"sglang.plugins.{NAME}")


def version() -> str:
    """SGLang's version, "0.5.23"."""
    return importlib.metadata.version("sglang")


def warn_if_untested() -> None:
    """One line when this SGLang is not the tested one; the plugin goes on."""
    found = version()
    number = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if number != TESTED:
        logger.warning(
            "w4plugin is tested with SGLang %s; this is %s. It goes on; report what breaks.",
            ".".join(map(str, TESTED)),
            found,
        )


def setting(name: str) -> Any:
    """A setting of the model namespace ("model_path", "load_format"), None before SGLang has published any."""
    from sglang.srt.runtime_context import get_model

    try:
        return getattr(get_model(), name)
    except (ValueError, RuntimeError, AttributeError):
        return None


def refuses(config: Mapping[str, Any]) -> str | None:
    """Why SGLang would not take a checkpoint with this ``quantization_config``, None if it would.

    Its own steps: every method is asked whether it overrides the named one, and the class of the method that is left
    reads the config.
    """
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    method = str(config.get("quant_method") or "").lower()
    for name, found in QUANTIZATION_METHODS.items():
        override = None if name == NAME else found.override_quantization_method(dict(config), None)
        if override:
            method = override
            break
    try:
        get_quantization_config(method).from_config({**config, "packed_modules_mapping": {}})
    except (ValueError, AssertionError, KeyError, NotImplementedError, TypeError) as error:
        text = str(error).strip().splitlines()
        return f"SGLang {version()} refuses it ({text[0] if text else type(error).__name__})"
    return None
