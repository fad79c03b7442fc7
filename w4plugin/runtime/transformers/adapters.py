"""LoRA on top of packed layers, through PEFT: the adapters are trained, the packed weights stay as they are."""

from __future__ import annotations

import warnings
from typing import Any

from peft.tuners.lora import Linear as LoraLinear

from w4plugin.errors import UnsupportedError
from w4plugin.runtime.transformers.linear import W4Linear


class W4LoraLinear(LoraLinear):
    """PEFT's LoRA of a Linear, whose base is packed and therefore cannot take the adapter in."""

    def __init__(self, base_layer: Any, adapter_name: str, config: Any, **kwargs: Any) -> None:
        if getattr(config, "use_dora", False) or getattr(config, "init_lora_weights", True) not in (
            True,
            False,
            "gaussian",
        ):
            raise UnsupportedError(
                "LoraConfig",
                got=f"use_dora={config.use_dora}, init_lora_weights={config.init_lora_weights!r}",
                wanted="plain LoRA: use_dora=False and init_lora_weights True, False or 'gaussian'",
                todo="these read or change the base weight, which is packed",
            )
        with warnings.catch_warnings():
            # PEFT says "proceed at your own risk" of every class it does not list, even of one it was told about
            warnings.filterwarnings("ignore", message="Unsupported layer type")
            super().__init__(base_layer, adapter_name, config, **kwargs)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "LoRA merge",
            got="a base layer packed in 4 bits",
            wanted="a plain one",
            todo="keep the adapter beside the model, or call model.dequantize() before adding it",
        )


def lora(config: Any) -> Any:
    """A ``peft.LoraConfig`` that knows packed layers; give it to ``peft.get_peft_model``.

    Names in ``target_modules`` work as ever. PEFT does not save this knowledge with an adapter, so pass
    ``config=lora(PeftConfig.from_pretrained(folder))`` when loading one.
    """
    config._register_custom_module({W4Linear: W4LoraLinear})  # PEFT's documented way for layers it does not know
    return config
