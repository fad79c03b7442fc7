"""The linear method: what vLLM calls to make a layer's parameters, and to multiply with them.

A layer holds one weight of the checkpoint or several (q, k and v). :mod:`w4plugin.runtime.loading` fills it,
:mod:`w4plugin.runtime.pieces` multiplies.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module as Layer
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method

from w4plugin.runtime import pieces
from w4plugin.runtime.part import Part
from w4plugin.runtime.vllm import fingerprint, versions
from w4plugin.runtime.vllm.inventory import Inventory
from w4plugin.runtime.vllm.loading import Filling


@register_weight_loader_v2_supported_method
class W4LinearMethod(LinearMethodBase):
    """Serves one layer of which at least one weight is packed.

    Args:
        inventory: of the checkpoint.
        prefix: vLLM's name of the layer.
        parts: its weights, in the order in which the layer fuses them.
    """

    def __init__(self, inventory: Inventory, prefix: str, parts: list[Part]) -> None:
        self.inventory, self.prefix, self.parts = inventory, prefix, parts

    def create_weights(
        self,
        layer: Layer,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        vllm_config = get_current_vllm_config()
        self.dummy = vllm_config.load_config.load_format == "dummy"
        self.hash_into = vllm_config.additional_config
        self.loading: Filling | None = Filling(
            layer,
            self.prefix,
            self.inventory,
            self.parts,
            loader=extra["weight_loader"],
            device=torch.get_default_device(),
            dtype=params_dtype,
            k=input_size,
            k_layer=input_size_per_partition,
            n_layer=sum(output_partition_sizes),
            logger=versions.logger(),
        )
        self.loading.open()

    def process_weights_after_loading(self, layer: Layer) -> None:
        if self.loading is None:
            return
        layer.w4_pieces = self.loading.close(self.dummy)
        fingerprint.add(self.hash_into, self.prefix, layer.w4_pieces)
        self._report_cost(layer.w4_pieces)
        self.loading = None

    def _report_cost(self, made: tuple[pieces.Piece, ...]) -> None:
        for part in self.parts:
            if part.kind == "wide" and part.module is not None:
                versions.logger().warning(
                    "%s: packed in %d bits, not 4; served as plain 16-bit weights, %.1f MB instead of %.1f",
                    part.name,
                    part.module.bits,
                    part.module.N * part.module.K * 2 / 1e6,
                    part.module.N * part.module.K * part.module.bits / 8e6,
                )
        if len(made) > 1:
            versions.logger().info(
                "%s: %d multiplications instead of one, since its weights differ in act-order or packing",
                self.prefix,
                len(made),
            )

    def apply(self, layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return pieces.multiply(layer, x, layer.w4_pieces, bias)


def backends(model: Layer) -> dict[str, int]:
    """Kernel backend of every multiplication and layer of experts, counted; for ``LLM.apply_model``."""
    counts: Counter[str] = Counter()
    for layer in model.modules():
        counts.update(piece.backend or "plain weight" for piece in getattr(layer, "w4_pieces", ()))
        counts.update(f"{backend} experts" for backend in [getattr(layer, "w4_experts", None)] if backend)
    return dict(counts)
