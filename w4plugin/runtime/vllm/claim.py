"""Which checkpoints this plugin takes.

``--quantization w4plugin`` takes any that it understands. Without the flag :mod:`w4plugin.runtime.claim` decides, and
what this vLLM serves rightly stays vLLM's. Any other ``--quantization`` of the user's is his decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from w4plugin.errors import W4Error
from w4plugin.runtime.claim import VARIABLE, policy, understood
from w4plugin.runtime.vllm import native, versions
from w4plugin.runtime.vllm.inventory import Inventory


def claims(hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any) -> bool:
    """Whether the checkpoint of this quantisation config is this plugin's; one log line says so and why.

    Args:
        hf_quant_cfg: ``quantization_config``, as vLLM read it.
        user_quant: ``--quantization``, None without.
        hf_config: the model's config.
    """
    if user_quant is not None:
        return user_quant == versions.NAME
    chosen = policy()
    if chosen == "never":
        return False
    config = understood(hf_quant_cfg, versions.logger())
    if config is None:
        return False
    model = getattr(hf_config, "_name_or_path", "") or ""
    refused = native.refuses_config(hf_quant_cfg, config)
    try:
        inventory = Inventory.open(model, getattr(hf_config, "_commit_hash", None))
        inventory.refuse_what_cannot_be_served(hf_config)
    except W4Error as error:
        say = versions.logger().warning if refused or chosen == "all" else versions.logger().debug
        say("w4plugin leaves %s to vLLM: %s", model or "this checkpoint", error)
        return False
    reason = f"{VARIABLE}=all" if chosen == "all" else refused or native.misreads(config, inventory)
    if reason is None:
        return False
    versions.logger().info("w4plugin serves %s: %s", model, reason)
    return True
