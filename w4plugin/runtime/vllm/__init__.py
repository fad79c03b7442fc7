"""The vLLM plugin. vLLM finds ``register`` by the entry point in pyproject.toml and calls it once in every process.

Nothing here imports vLLM before vLLM asks: the quantisation config and the linear method live in the modules that
``register`` imports.
"""

from __future__ import annotations


def register() -> None:
    """Make ``--quantization w4plugin`` known to this process's vLLM; calling it again changes nothing."""
    from vllm.model_executor.layers import quantization

    from w4plugin.runtime.vllm import versions

    if quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.get(versions.NAME) is not None:
        return
    versions.warn_if_untested()

    from w4plugin.runtime.vllm.config import W4Config

    quantization.register_quantization_config(versions.NAME)(W4Config)
