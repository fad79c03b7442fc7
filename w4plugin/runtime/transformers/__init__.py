"""Transformers: INT4 checkpoints in ``from_pretrained``, on CPUs and GPUs, without optimum, gptqmodel or autoawq.

    import w4plugin.runtime.transformers as w4

    model = w4.from_pretrained("TheBloke/Llama-2-7B-AWQ", device_map="auto")    # any format that w4plugin reads

    w4.register()                                                               # or once, and then as ever:
    model = AutoModelForCausalLM.from_pretrained("folder-that-w4plugin-wrote")

``generate``, ``torch.compile``, ``device_map``, ``save_pretrained`` (a GPTQ v2 checkpoint), ``dequantize`` and LoRA
training (:func:`lora`) work as with any model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.weight_files import INDEX
from w4plugin.errors import UnsupportedError, UsageError
from w4plugin.runtime.transformers.claim import register
from w4plugin.runtime.transformers.linear import W4Linear
from w4plugin.runtime.transformers.quantizer import NAME, W4QuantizationConfig, W4Quantizer

__all__ = ["W4Linear", "W4QuantizationConfig", "W4Quantizer", "from_pretrained", "lora", "register"]

_ANYWHERE = ("model.safetensors", "model.safetensors.index.json")
_OPENING = ("revision", "cache_dir", "token")
_CONFIGURING = (*_OPENING, "trust_remote_code", "code_revision", "local_files_only")


def from_pretrained(model: str | Path, *, auto_class: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
    """Load a checkpoint of any format that w4plugin reads.

    Args:
        model: folder or hub id.
        auto_class: a Transformers class with ``from_pretrained``; None means AutoModelForCausalLM.
        backend: kernel backend, a name from ``w4plugin env``; None means the first that fits.
        kwargs: as ``auto_class.from_pretrained`` takes them: ``device_map``, ``dtype``, ``revision``, ...

    Returns:
        The model, its packed layers as :class:`W4Linear`.

    Raises:
        W4Error: the checkpoint cannot be read, is of a method that is not 4-bit integers, or holds packed modules for
            which this architecture has no Linear.
    """
    for name in ("quantization_config", "subfolder", "state_dict", "gguf_file"):
        if kwargs.get(name):
            raise UsageError(f"from_pretrained: {name}", got="a value", wanted="none; w4plugin reads the checkpoint")
    register_name()
    checkpoint = Checkpoint.open(model, **{key: kwargs[key] for key in _OPENING if key in kwargs})
    config = kwargs.pop("config", None)
    if config is None:
        config = AutoConfig.from_pretrained(model, **{key: kwargs[key] for key in _CONFIGURING if key in kwargs})
    for inner in (config, config.get_text_config()):
        if getattr(inner, "quantization_config", None) is not None:
            del inner.quantization_config
    config.quantization_config = {
        "quant_method": NAME,
        "configs": {name: dict(content) for name, content in checkpoint.configs.items()},
        "backend": backend,
    }
    file = _weights(checkpoint)
    if file not in _ANYWHERE:
        config.transformers_weights = file
    loaded = (auto_class or AutoModelForCausalLM).from_pretrained(model, config=config, **kwargs)
    found = loaded[0] if isinstance(loaded, tuple) else loaded
    if file not in _ANYWHERE:
        del found.config.transformers_weights  # what save_pretrained writes has the usual name
    return loaded


def _weights(checkpoint: Checkpoint) -> str:
    """The one file by which the host finds the weights: the file itself, or the index of several."""
    names = [file.name for file in checkpoint.files]
    if len(names) == 1:
        return names[0]
    indexes = [name for name in checkpoint.source.names() if name.endswith(INDEX)]
    if _ANYWHERE[1] in indexes:
        return _ANYWHERE[1]
    if len(indexes) != 1:
        raise UnsupportedError(
            checkpoint.source.label(),
            got=f"{len(names)} weight files and {len(indexes)} indexes",
            wanted="one file, or several with one index, which is how Transformers finds weights",
            todo="`w4plugin repack` writes such a checkpoint",
        )
    return indexes[0]


def register_name() -> None:
    """Register the method's own name through the host's decorators; what a claim set stays."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    if NAME not in AUTO_QUANTIZER_MAPPING:
        register("never")


def lora(config: Any) -> Any:
    """See :func:`w4plugin.runtime.transformers.lora.lora`; a function of its own, since PEFT may not be installed."""
    from w4plugin.runtime.transformers.adapters import lora as with_packed_layers

    return with_packed_layers(config)
