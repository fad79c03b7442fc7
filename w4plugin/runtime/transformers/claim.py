"""Which checkpoints plain ``from_pretrained`` gives to w4plugin after ``register``.

    auto    (default) those that w4plugin wrote, and 4-bit ones whose own libraries are not installed here
    all     every 4-bit GPTQ, AWQ, AutoRound and compressed-tensors checkpoint
    never   none; ``w4plugin.runtime.transformers.from_pretrained`` still takes any

The names "gptq", "awq", ... belong to Transformers, whose decorators take new names only. So a claim stands before the
host's config class: it looks at a config and hands everything that is not claimed on, untouched.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from w4plugin.errors import UsageError, W4Error
from w4plugin.formats.census import find_modules
from w4plugin.formats.config_spelling import PRODUCER
from w4plugin.quant_config import QuantConfig
from w4plugin.runtime.claim import POLICIES
from w4plugin.runtime.transformers.quantizer import NAME, W4QuantizationConfig, W4Quantizer

NEEDS = {
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel",),
    "auto-round": ("auto_round",),
    "compressed-tensors": ("compressed_tensors",),
}
"""Packages without which Transformers itself refuses a checkpoint of each method."""

_HOSTS: dict[str, Any] = {}  # the host's own config classes, while a claim stands before them


def register(claim: str = "auto", *, backend: str | None = None) -> None:
    """Make w4plugin known to Transformers in this process; a second call replaces the first one's claim.

    Args:
        claim: "auto", "all" or "never", see above.
        backend: kernel backend for the checkpoints claimed, a name from ``w4plugin env``; None means the first that
            fits.

    Raises:
        UsageError: no such claim.
    """
    if claim not in POLICIES:
        raise UsageError("register: claim", got=repr(claim), wanted=" | ".join(POLICIES))
    if NAME not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(NAME)(W4QuantizationConfig)
        register_quantizer(NAME)(W4Quantizer)
    for method in NEEDS:
        host = _HOSTS.setdefault(method, AUTO_QUANTIZATION_CONFIG_MAPPING[method])
        AUTO_QUANTIZATION_CONFIG_MAPPING[method] = host if claim == "never" else _before(host, claim, backend)


def claims(config: Mapping[str, Any], claim: str) -> bool:
    """Whether a checkpoint with this ``quantization_config`` is w4plugin's to load."""
    if claim == "never":
        return False
    try:
        read = QuantConfig.from_dict(config)
        find_modules({}, read)  # refuses methods and layouts that are not 4-bit integers
    except W4Error:
        return False
    if read.method not in NEEDS or read.bits not in (None, 4):
        return False
    ours = PRODUCER in (read.producer or "")
    return ours or claim == "all" or any(importlib.util.find_spec(name) is None for name in NEEDS[read.method])


def _before(host: Any, claim: str, backend: str | None) -> Any:
    class Claimed(host):  # type: ignore[misc]
        """Decides which config class a ``quantization_config`` becomes; never an instance of anything itself."""

        @classmethod
        def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
            if not claims(config_dict, claim):
                return host.from_dict(config_dict, return_unused_kwargs=return_unused_kwargs, **kwargs)
            ours = W4QuantizationConfig({"config.json": {"quantization_config": dict(config_dict)}}, backend)
            return (ours, kwargs) if return_unused_kwargs else ours

    return Claimed
