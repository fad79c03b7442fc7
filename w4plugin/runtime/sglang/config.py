"""The quantisation config that SGLang makes of a checkpoint, and through which it asks for every layer's method."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.runtime.inventory import Inventory
from w4plugin.runtime.messages import PLAIN_COPY
from w4plugin.runtime.part import Part
from w4plugin.runtime.sglang import claim, host
from w4plugin.runtime.sglang.inventory import opened
from w4plugin.runtime.sglang.linear import W4LinearMethod


class W4Config(QuantizationConfig):
    """SGLang's view of one INT4 checkpoint.

    Args:
        hf_config: the model's config, which knows its folder or hub id; None where the checkpoint has no
            ``quantization_config``: then SGLang's own setting names the model.
        packed: ``packed_modules_mapping`` of the model class, "qkv_proj" -> ["q_proj", "k_proj", "v_proj"].
    """

    def __init__(self, hf_config: Any = None, packed: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.packed_modules_mapping = dict(packed or {})
        model = getattr(hf_config, "_name_or_path", None) or host.setting("model_path")
        if not model:
            raise UnsupportedError(
                "w4plugin",
                got="an SGLang that did not name the model's files",
                wanted="a model folder or a hub id",
                todo="copy the checkpoint to a folder and serve that",
            )
        revision = getattr(hf_config, "_commit_hash", None) or host.setting("revision")
        self.inventory: Inventory = opened(str(model), revision)
        self._refuse_packed_experts()
        if hf_config is not None:
            self.inventory.refuse_what_cannot_be_served(hf_config)
            self.inventory.untie(hf_config, host.logger)

    def __repr__(self) -> str:
        config = self.inventory.config
        return f"W4Config(method={config.method}, layout={config.layout}, bits={config.bits})"

    def get_name(self) -> str:
        return host.NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70  # the oldest that Triton compiles for; each backend says for itself what it needs

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # none: a checkpoint is read from its own files

    def get_scaled_act_names(self) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W4Config:
        return cls(config.get("hf_config"), config.get("packed_modules_mapping"))

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None) -> str | None:
        """Our name if this checkpoint is ours to serve, by the policy of :mod:`.claim`."""
        return host.NAME if claim.claims(hf_quant_cfg, user_quant) else None

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        self.inventory.rename(hf_to_sglang_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return self._linear_method(prefix) or UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead):
            return self._linear_method(prefix or "lm_head")
        if isinstance(layer, VocabParallelEmbedding):
            part = self.inventory.parts.get(prefix)
            if part is not None and part.module is not None:
                raise UnsupportedError(
                    part.name, got="an embedding packed in 4 bits", wanted="a plain embedding", todo=PLAIN_COPY
                )
        return None  # SGLang's own method; packed experts were refused with the checkpoint

    def _linear_method(self, prefix: str) -> W4LinearMethod | None:
        """Ours for a layer with a packed weight; None for a plain layer, which stays SGLang's."""
        told = {name: parts for name, parts in self.packed_modules_mapping.items() if isinstance(parts, list)}
        parts = self.inventory.packed_layer(prefix, {**host.FUSED, **told})
        if not parts:
            return None
        self._require(prefix, parts)
        return W4LinearMethod(self.inventory, prefix, parts)

    def _require(self, prefix: str, parts: list[Part]) -> None:
        absent = [part.name for part in parts if part.kind == "absent"]
        if absent:
            raise CorruptError(prefix, got=f"no tensors for {', '.join(absent)}", wanted="every weight of the layer")

    def _refuse_packed_experts(self) -> None:
        for part in self.inventory.parts.values():
            if part.module is not None and ".experts." in part.name:
                raise UnsupportedError(
                    part.name, got="experts packed in 4 bits", wanted="plain experts", todo=PLAIN_COPY
                )
