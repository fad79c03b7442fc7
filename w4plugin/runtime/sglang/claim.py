"""Which checkpoints this plugin takes, by ``W4PLUGIN_CLAIM`` as for vLLM.

SGLang decides by ``quantization_config`` alone, before a plugin may know the model's files. So ``auto`` takes what
SGLang's own classes refuse by that config; what they would misread for what is in the file needs
``--quantization w4plugin``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from w4plugin.runtime.claim import VARIABLE, policy, understood
from w4plugin.runtime.sglang import host


def claims(hf_quant_cfg: Mapping[str, Any], user_quant: str | None) -> bool:
    """Whether the checkpoint of this quantisation config is this plugin's; one log line says so and why.

    Args:
        hf_quant_cfg: ``quantization_config``, as SGLang read it.
        user_quant: ``--quantization``, None without.
    """
    if user_quant is not None:
        return user_quant == host.NAME
    chosen = policy()
    if chosen == "never":
        return False
    if understood(hf_quant_cfg, host.logger) is None:
        return False
    reason = f"{VARIABLE}=all" if chosen == "all" else host.refuses(hf_quant_cfg)
    if reason is None:
        return False
    host.logger.info("w4plugin serves this checkpoint: %s", reason)
    return True
