"""The SGLang plugin. SGLang finds ``register`` by the entry point in pyproject.toml and calls it once in every process.

    sglang serve --model-path MODEL --quantization w4plugin

What is not SGLang's is shared with the vLLM plugin, one folder up: what a checkpoint holds, how a layer is filled.
Nothing here imports SGLang before SGLang asks.
"""

from __future__ import annotations


def register() -> None:
    """Make ``--quantization w4plugin`` known to this process's SGLang; calling it again changes nothing."""
    from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES, add_quantization_method_choices
    from sglang.srt.layers import quantization

    from w4plugin.runtime.sglang import host

    methods = quantization.QUANTIZATION_METHODS
    if host.NAME in methods:
        return
    host.warn_if_untested()

    from w4plugin.runtime.sglang.config import W4Config

    # SGLang asks its methods in this order whether a checkpoint is theirs, and its own GPTQ one takes by the config
    others = dict(methods)
    methods.clear()
    methods.update({host.NAME: W4Config, **others})
    quantization.CPU_QUANTIZATION_METHODS[host.NAME] = W4Config
    if host.NAME not in QUANTIZATION_CHOICES:
        add_quantization_method_choices([host.NAME])
