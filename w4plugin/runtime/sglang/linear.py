"""The linear method: what SGLang calls to make a layer's parameters, and to multiply with them.

:mod:`w4plugin.runtime.loading` fills a layer, :mod:`w4plugin.runtime.pieces` multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from torch import Tensor
from torch.nn import Module as Layer

from w4plugin.runtime import pieces
from w4plugin.runtime.inventory import Inventory
from w4plugin.runtime.messages import loaded_twice
from w4plugin.runtime.part import Part
from w4plugin.runtime.sglang import host
from w4plugin.runtime.sglang.loading import Filling


class W4LinearMethod(LinearMethodBase):
    """Serves one layer of which at least one weight is packed.

    Args:
        inventory: of the checkpoint.
        prefix: SGLang's name of the layer.
        parts: its weights, in the order in which the layer fuses them.
    """

    def __init__(self, inventory: Inventory, prefix: str, parts: list[Part]) -> None:
        self.inventory, self.prefix, self.parts = inventory, prefix, parts
        self.filling: Filling | None = None

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
        self.filling = Filling(
            layer,
            self.prefix,
            self.inventory,
            self.parts,
            device=torch.get_default_device(),
            dtype=params_dtype,
            k=input_size,
            k_layer=input_size_per_partition,
            n_layer=sum(output_partition_sizes),
            logger=host.logger,
        )
        self.filling.open()

    def process_weights_after_loading(self, layer: Layer) -> None:
        if self.filling is None:
            return
        layer.w4_pieces = self.filling.close(str(host.setting("load_format")).lower() == "dummy")
        self.filling = None

    def restore_weights_before_loading(self, layer: Layer) -> None:
        raise loaded_twice(self.prefix)

    def apply(self, layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return pieces.multiply(layer, x, layer.w4_pieces, bias)
