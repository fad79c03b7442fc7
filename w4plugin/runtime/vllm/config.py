"""The quantisation config that vLLM makes of a checkpoint, and through which it asks for every layer's method."""

from __future__ import annotations

import re
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.quant_config import QuantConfig
from w4plugin.runtime.messages import PLAIN_COPY
from w4plugin.runtime.part import Part
from w4plugin.runtime.vllm import claim, versions
from w4plugin.runtime.vllm.experts import DequantizedExpertsMethod, W4ExpertsMethod, check_layer
from w4plugin.runtime.vllm.inventory import Inventory
from w4plugin.runtime.vllm.linear import W4LinearMethod


class W4Config(QuantizationConfig):
    """vLLM's view of one INT4 checkpoint.

    Args:
        config: what the checkpoint's own quantisation config says; an empty one when it has none.
    """

    def __init__(self, config: QuantConfig | None = None) -> None:
        super().__init__()
        self.config = config or QuantConfig()
        self.inventory: Inventory | None = None

    def __repr__(self) -> str:
        return f"W4Config(method={self.config.method}, layout={self.config.layout}, bits={self.config.bits})"

    @classmethod
    def get_name(cls) -> str:
        return versions.NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70  # the oldest that Triton compiles for; each backend says for itself what it needs

    @staticmethod
    def get_config_filenames() -> list[str]:
        # none: a checkpoint without a config in config.json is read from its own files, see maybe_update_config
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W4Config:
        return cls(QuantConfig.from_dict(config))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Our name if this checkpoint is ours to serve, by the policy of :mod:`.claim`."""
        return versions.NAME if claim.claims(hf_quant_cfg, user_quant, hf_config) else None

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """All tensors, act-order indices included, which vLLM's own mapper drops."""
        return WeightsMapper()

    def get_cache_scale_mapper(self) -> WeightsMapper:
        """vLLM's own names for KV-cache scales, and ours for what its model would not find; every loader asks."""
        renames = {re.compile(p): name for p, name in (self.inventory.renames if self.inventory else {}).items()}
        return QuantizationConfig.get_cache_scale_mapper() | WeightsMapper(orig_to_new_regex=renames)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the checkpoint's headers; vLLM calls this while it checks its arguments, before any engine starts."""
        revision = revision or getattr(hf_config, "_commit_hash", None)
        self.inventory = Inventory.open(model_name, revision)
        self.config = self.inventory.config
        self.inventory.refuse_what_cannot_be_served(hf_config)
        self.inventory.untie(hf_config, versions.logger())

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self._opened().rename(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return self._linear_method(prefix) or UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead):
            return self._linear_method(prefix or "lm_head")
        if isinstance(layer, VocabParallelEmbedding):
            self._refuse_packed(prefix, "an embedding packed in 4 bits", "a plain embedding")
        elif versions.is_routed_experts(layer):
            return self._experts_method(layer, prefix)
        return None

    def _experts_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for experts of which any is packed; None for plain ones, which stay vLLM's."""
        inventory = self._opened()
        mixture = inventory.mixture(prefix)
        if mixture is None and inventory.expects_experts(prefix):
            raise CorruptError(
                prefix,
                got="no experts for this layer",
                wanted="its packed experts, as in the other layers",
                todo="config.json asks for more layers than the checkpoint has",
            )
        if mixture is None or not mixture.packed:
            return None
        check_layer(mixture, layer.moe_config)
        method = DequantizedExpertsMethod if mixture.strangers else W4ExpertsMethod
        return method(inventory, mixture, layer.moe_config)

    def _linear_method(self, prefix: str) -> W4LinearMethod | None:
        """Ours for a layer with a packed weight; None for a plain layer, which stays vLLM's."""
        inventory = self._opened()
        parts = inventory.packed_layer(prefix, self.packed_modules_mapping)
        if not parts:
            return None
        self._require(prefix, parts)
        return W4LinearMethod(inventory, prefix, parts)

    def _require(self, prefix: str, parts: list[Part]) -> None:
        """Every weight of a packed layer is in the file; a model may use its keys as values (absent v)."""
        absent = [part.name for i, part in enumerate(parts) if part.kind == "absent" and (len(parts), i) != (3, 2)]
        if absent:
            raise CorruptError(prefix, got=f"no tensors for {', '.join(absent)}", wanted="every weight of the layer")

    def _refuse_packed(self, prefix: str, got: str, wanted: str) -> None:
        inventory = self._opened()
        own = inventory.parts.get(prefix)
        names = ([own.name] if own is not None and own.module is not None else []) + inventory.packed_under(prefix)
        if names:
            raise UnsupportedError(names[0], got=got, wanted=wanted, todo=PLAIN_COPY)

    def _opened(self) -> Inventory:
        if self.inventory is None:
            raise UnsupportedError(
                "w4plugin",
                got="a vLLM that did not name the model's files",
                wanted="a model folder or a hub id",
                todo="copy the checkpoint to a folder and serve that",
            )
        return self.inventory
