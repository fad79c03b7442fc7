"""The linear method: what SGLang calls to make a layer's parameters, and to multiply with them.

Until a layer's weights are loaded its parameters are empty placeholders with the names of the file's tensors; after
that they are what the kernels read (:mod:`w4plugin.runtime.pieces`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from torch import Tensor
from torch.nn import Module as Layer
from torch.nn import Parameter

from w4plugin.errors import UsageError
from w4plugin.runtime import pieces
from w4plugin.runtime.sglang import host
from w4plugin.runtime.sglang.loading import Filling
from w4plugin.runtime.vllm.inventory import Inventory, Part
from w4plugin.runtime.vllm.placement import ShardId


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
            loader=extra["weight_loader"],
            device=torch.get_default_device(),
            dtype=params_dtype,
            k=input_size,
            k_layer=input_size_per_partition,
            n_layer=sum(output_partition_sizes),
        )
        for suffix, dtype in self._placeholders().items():
            empty = Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            empty.weight_loader = functools.partial(self._receive, suffix)
            layer.register_parameter(suffix, empty)

    def _placeholders(self) -> dict[str, torch.dtype]:
        return {suffix: dtype for part in self.parts for suffix, dtype in part.dtypes.items()}

    def _receive(self, suffix: str, param: Parameter, loaded_weight: Tensor, shard_id: ShardId = None) -> None:
        if self.filling is None:
            raise self._twice(f"{self.prefix}.{suffix}")
        self.filling.receive(suffix, loaded_weight, shard_id)

    def process_weights_after_loading(self, layer: Layer) -> None:
        if self.filling is None:
            return
        dummy = str(host.setting("load_format")).lower() == "dummy"
        ready = self.filling.noise() if dummy else self.filling.finished()
        for suffix in self._placeholders():
            delattr(layer, suffix)
        layer.w4_pieces = pieces.register(layer, ready)
        self.filling = None

    def restore_weights_before_loading(self, layer: Layer) -> None:
        raise self._twice(self.prefix)

    def _twice(self, where: str) -> UsageError:
        return UsageError(
            where,
            got="a weight for a layer that is in its kernel's order",
            wanted="each weight once",
            todo="start a new engine; packed weights cannot be loaded again in place",
        )

    def apply(self, layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return pieces.multiply(layer, x, layer.w4_pieces, bias)
