"""The methods for layers of experts: what vLLM calls to make their parameters, and to run them.

Until its experts are loaded (:mod:`.mixture_loading`) a layer's parameters are empty placeholders, named as vLLM's
models name them: ``w13_qweight`` for gate and up, ``w2_qweight`` for down. Most models hand the whole layer's tensors
to ``load_weights``, which reads stacked and fused names as well; some look the placeholders up themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module as Layer
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, UnquantizedFusedMoEMethod

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.kernels import PreparedExperts, Target, experts_reasons
from w4plugin.kernels.device import target
from w4plugin.runtime.loading import decode, placeholder
from w4plugin.runtime.messages import OTHER_MODEL, loaded_twice
from w4plugin.runtime.mixture import Mixture
from w4plugin.runtime.pieces import EXPERTS_TENSORS
from w4plugin.runtime.vllm import fingerprint, versions
from w4plugin.runtime.vllm.inventory import Inventory
from w4plugin.runtime.vllm.mixture_loading import Arrivals, Stacking, check_sizes
from w4plugin.tensor import W4Tensor


class Intake:
    """The way of a layer's tensors from vLLM's loaders into its arrivals.

    Args:
        layer: vLLM's layer, which gets placeholders and a ``load_weights`` of its own.
        arrivals: where tensors go.
        keep: suffixes that the layer has parameters for already.
    """

    def __init__(self, layer: Layer, arrivals: Arrivals, keep: tuple[str, ...] = ()) -> None:
        self.arrivals: Arrivals | None = arrivals
        self.layer, self.mixture, self.table = layer, arrivals.mixture, arrivals.mixture.table()
        self.placeholders: list[str] = []
        biases = arrivals.inventory.biases
        for name, part in self.mixture.parts.items():
            dtypes = dict(part.dtypes) | ({"bias": torch.float16} if part.name in biases else {})
            for suffix, dtype in dtypes.items():
                held = f"{_stem(self.mixture.place(name).shards)}_{suffix}"
                if held not in self.placeholders and suffix not in keep:
                    layer.register_parameter(held, placeholder(dtype, functools.partial(self.one, suffix)))
                    self.placeholders.append(held)
        layer.load_weights = self.all

    def one(
        self,
        suffix: str,
        param: Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """The weight loader of a placeholder."""
        name = self.table.get((expert_id, shard_id), "")
        place = self.mixture.place(name) if name else None
        if place is None or place.expert is None or len(place.shards) > 1:
            raise UnsupportedError(
                f"{self.mixture.layer}: {weight_name}",
                got=f"a tensor for {shard_id} of expert {expert_id} from a file that has "
                f"{self.mixture.parts[name].name if name else 'none'}",
                wanted="one tensor a projection and expert, which is all that this model of vLLM can load",
            )
        taken = self._taker().receive(name, suffix, loaded_weight)
        return taken if return_success else None

    def all(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """``load_weights`` of the layer: names are those of the file, below the layer."""
        for full, tensor in weights:
            name, _, suffix = full.rpartition(".")
            if name not in self.mixture.parts:
                raise UnsupportedError(
                    f"{self.mixture.layer}.{full}", got="this tensor", wanted="a projection of an expert"
                )
            if self._taker().receive(name, suffix, tensor):
                yield f"{_stem(self.mixture.place(name).shards)}_{suffix}"

    def _taker(self) -> Arrivals:
        if self.arrivals is None:
            raise loaded_twice(self.mixture.layer)
        return self.arrivals

    def close(self) -> None:
        """Take the placeholders away: whatever arrives from now on is an error."""
        self.arrivals = None
        for name in self.placeholders:
            delattr(self.layer, name)


def _stem(shards: tuple[str, ...]) -> str:
    return "w2" if shards == ("w2",) else "w13"


def refuse_without_kernels(layer: str, where: Target) -> None:
    """On a GPU only the fused kernels will do: the plain way asks the device which experts tokens reached.

    Raises:
        UnsupportedError: they do not run there; before the engine starts, with their own word on why.
    """
    reason = experts_reasons(where)["portable"]
    if where.device.type != "cpu" and reason is not None:
        raise UnsupportedError(layer, got="experts packed in 4 bits", wanted=f"kernels that run them here: {reason}")


class W4ExpertsMethod(FusedMoEMethodBase):
    """Serves one layer of experts that are all packed.

    Args:
        inventory: of the checkpoint.
        mixture: the layer's experts.
        moe: vLLM's config of the layer.
    """

    def __init__(self, inventory: Inventory, mixture: Mixture, moe: Any) -> None:
        super().__init__(moe)
        self.inventory, self.mixture = inventory, mixture

    def create_weights(
        self,
        layer: Layer,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        refuse_without_kernels(self.mixture.layer, target(torch.get_default_device(), params_dtype))
        self.activation = versions.activation_of_experts(layer, self.mixture.layer)
        vllm_config = get_current_vllm_config()
        self.dummy = vllm_config.load_config.load_format == "dummy"
        self.hash_into = vllm_config.additional_config
        self.loading: Stacking | None = Stacking(
            self.mixture,
            self.inventory,
            versions.experts_of_rank(layer),
            device=torch.get_default_device(),
            dtype=params_dtype,
            hidden=hidden_size,
            inner=intermediate_size_per_partition,
            rank=self.moe.tp_rank,
            ranks=self.moe.tp_size,
        )
        self.intake = Intake(layer, self.loading.arrivals)

    def process_weights_after_loading(self, layer: Layer) -> None:
        if self.loading is None:
            return
        ready = self.loading.noise() if self.dummy else self.loading.finished()
        self.intake.close()
        self.loading = None
        self._register(layer, ready)
        layer.w4_experts = ready.backend
        fingerprint.add(self.hash_into, self.mixture.layer, (self.names, self.sizes, ready.backend))

    def _register(self, layer: Layer, ready: PreparedExperts) -> None:
        """Give the layer the operator's tensors as parameters."""
        held = ready.tensors()
        for name, tensor in held.items():
            layer.register_parameter(name, Parameter(tensor, requires_grad=False))
        self.names = tuple(name if name in held else None for name in EXPERTS_TENSORS)
        self.sizes = (ready.I, ready.gate_up_group_size, ready.down_group_size, ready.gated)
        self.backend = ready.backend

    def maybe_roundup_sizes(self, hidden_size: int, inner: int, *_: Any) -> tuple[int, int]:
        return hidden_size, inner  # padding is for kernels of vLLM's that exchange tokens; ours run without

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """Asked by vLLM 0.26 alone: tokens are exchanged by its runner, not by one of its kernels."""

    def get_fused_moe_quant_config(self, layer: Layer) -> None:
        return None  # the operator has its scales among its arguments

    def apply(
        self,
        layer: Layer,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """x ``[T, H]`` through this rank's experts; shared ones have run before or run beside, by vLLM's runner."""
        tensors = [None if name is None else getattr(layer, name) for name in self.names]
        return torch.ops.w4plugin.w4a16_experts(
            x,
            topk_weights.float(),
            topk_ids,
            *tensors,
            versions.expert_map(layer),
            *self.sizes,
            self.activation,
            layer.apply_router_weight_on_input,
            self.backend,
        )


class DequantizedExpertsMethod(UnquantizedFusedMoEMethod):
    """Serves a layer whose experts are not all packed as plain ones, by vLLM's own method for those.

    Args:
        inventory: of the checkpoint.
        mixture: the layer's experts.
        moe: vLLM's config of the layer.
    """

    def __init__(self, inventory: Inventory, mixture: Mixture, moe: Any) -> None:
        super().__init__(moe)
        self.inventory, self.mixture = inventory, mixture

    def create_weights(
        self,
        layer: Layer,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        super().create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra)
        versions.activation_of_experts(layer, self.mixture.layer)
        self.dummy = get_current_vllm_config().load_config.load_format == "dummy"
        inner = self.moe.intermediate_size_per_partition_unpadded
        check_sizes(self.mixture, self.moe.hidden_dim_unpadded, inner, self.moe.tp_size)
        self.dtype = params_dtype
        self.arrivals = Arrivals(
            self.mixture,
            self.inventory,
            versions.experts_of_rank(layer),
            torch.get_default_device(),
            functools.partial(self._take, layer),  # held by no module, since the layer is one that holds this method
        )
        self.intake: Intake | None = Intake(layer, self.arrivals, keep=("weight",))
        # the one parameter that vLLM has made: plain experts of the file go the way of the others
        for held in (layer.w13_weight, layer.w2_weight):
            held.weight_loader = functools.partial(self.intake.one, "weight")

    def _take(self, layer: Layer, name: str, tensors: dict[str, Tensor]) -> None:
        """Make a weight plain and let vLLM cut it to this rank's share."""
        part, shards = self.mixture.parts[name], self.mixture.place(name).shards
        weight = decode(part, tensors, self.inventory.config, self.dtype, versions.logger())
        plain = weight.dequantize(self.dtype).mT if isinstance(weight, W4Tensor) else weight
        for i, expert in enumerate(self.arrivals.mine(name)):
            one = plain if part.experts is None else plain[i]
            for shard, piece in zip(shards, one.chunk(len(shards)), strict=True):
                param = layer.w2_weight if shard == "w2" else layer.w13_weight
                layer.weight_loader(param, piece.contiguous(), f"{self.mixture.layer}.weight", shard, expert)

    def process_weights_after_loading(self, layer: Layer) -> None:
        if self.intake is not None:
            if not self.dummy:
                self.arrivals.check()
            self.intake.close()
            self.intake = None
            versions.logger().warning(
                "%s: %d of its %d weights are not packed in 4 bits; all are served as plain ones, %.1f MB here",
                self.mixture.layer,
                len(self.mixture.strangers),
                len(self.mixture.parts),
                (layer.w13_weight.nbytes + layer.w2_weight.nbytes) / 1e6,
            )
            layer.w4_experts = "plain weight"
        super().process_weights_after_loading(layer)


def check_layer(mixture: Mixture, moe: Any) -> None:
    """What vLLM asks of a layer of experts that no method here can do.

    Raises:
        UnsupportedError: biases, a LoRA, or fewer experts than vLLM's layer has.
    """
    if moe.has_bias:
        raise UnsupportedError(mixture.layer, got="experts with a bias", wanted="experts without")
    if moe.is_lora_enabled:
        raise UnsupportedError(
            mixture.layer,
            got="a LoRA on a model with packed experts",
            wanted="no LoRA: vLLM would put one on the experts, into kernels of its own",
            todo="merge the adapter and quantise the result, or serve the dequantised checkpoint",
        )
    held = {e for e, _ in mixture.table()}
    if len(held) != moe.num_logical_experts:
        raise CorruptError(
            mixture.layer,
            got=f"{len(held)} experts",
            wanted=f"{moe.num_logical_experts}, the architecture's",
            todo=OTHER_MODEL,
        )
