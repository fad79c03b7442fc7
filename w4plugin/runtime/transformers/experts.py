"""A layer of experts whose weights stay packed, in place of the host's 3-D parameters.

    y[t] = sum_j weight[t, j] * (activation(x[t] W_gate[e]) * (x[t] W_up[e])) W_down[e]        e = top_k_index[t, j]

While the host loads, its children are the projections of the file, one by one, by their names there (``3.gate_proj``).
``hold`` then keeps all of them as the two stacks that one kernel backend reads. ``state_dict`` speaks GPTQ v2 under the
same names, whatever the format they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation

from w4plugin.errors import UnsupportedError, UsageError
from w4plugin.formats.registry import write_module
from w4plugin.kernels import PreparedExperts, prepare_experts, restore_experts
from w4plugin.runtime.messages import PLAIN_COPY
from w4plugin.runtime.pieces import EXPERTS_TENSORS
from w4plugin.runtime.transformers.linear import SAVED, W4Linear
from w4plugin.tensor import W4Tensor

ACTIVATIONS: dict[type, str] = {
    torch.nn.SiLU: "silu",
    SiLUActivation: "silu",
    GELUActivation: "gelu",
    GELUTanh: "gelu_tanh",
    NewGELUActivation: "gelu_tanh",
}
"""The host's activations, by the operator's names."""


class W4Experts(torch.nn.Module):
    """x ``[T, H]``, expert ids and routing weights ``[T, topk]`` -> ``[T, H]`` in x's dtype.

    Args:
        plain: the host's module, on the meta device; kept as the pattern of a plain one.
        words: names of gate, up and down in the file, ("gate_proj", "up_proj", "down_proj") or ("w1", "w3", "w2").
        dtype: of the activations to come.
        where: the layer's name, for errors.

    Raises:
        UnsupportedError: the host's experts compute something else.
    """

    def __init__(self, plain: Any, words: tuple[str, str, str], *, dtype: torch.dtype, where: str) -> None:
        super().__init__()
        activation = ACTIVATIONS.get(type(getattr(plain, "act_fn", None)))
        if activation is None or not is_usual(plain):
            raise UnsupportedError(
                where,
                got=f"packed experts of a {type(plain).__name__}, which computes more than a gate",
                wanted="experts with a gate, up and down, without biases, and SiLU or GELU",
                todo=PLAIN_COPY,
            )
        self.__dict__["plain"] = plain  # no child: its parameters are not this model's
        self.words, self.dtype, self.activation = words, dtype, activation
        self.num_experts, self.hidden_dim, self.intermediate_dim = plain.down_proj.shape
        self.ready: PreparedExperts | None = None

    def await_projection(self, name: str, waiting: W4Linear) -> None:
        """Give the host a place for one projection, "3.gate_proj"."""
        expert, _, word = name.partition(".")
        if expert not in self._modules:
            self.add_module(expert, torch.nn.Module())
        self.get_submodule(expert).add_module(word, waiting)

    def hold(self, gate: W4Tensor, up: W4Tensor, down: W4Tensor) -> None:
        """Hold these stacks from now on, in the order of the backend that fits their device.

        Raises:
            UnsupportedError: gate and up differ in act-order, or no backend fits.
        """
        self._keep(prepare_experts((gate, up), down, dtype=self.dtype))

    def _keep(self, ready: PreparedExperts) -> None:
        self._modules.clear()
        for name in EXPERTS_TENSORS:
            self._buffers.pop(name, None)
            self.register_buffer(name, getattr(ready, name), persistent=False)
        self.ready = ready

    def packed_weights(self) -> tuple[W4Tensor, W4Tensor, W4Tensor]:
        """Gate, up and down with a leading E, bit for bit as they came."""
        if self.ready is None:
            raise UsageError("W4Experts", got="no weights yet", wanted="a loaded module")
        gate_up, down = restore_experts(self.ready)
        inner = gate_up.N // 2
        return gate_up.shard_n(0, inner), gate_up.shard_n(inner, 2 * inner), down

    def plain_experts(self, dtype: torch.dtype | None = None) -> Any:
        """The host's own module with the same weights, rounded once to ``dtype`` (None: this module's)."""
        dtype = dtype or self.dtype
        gate, up, down = (weight.dequantize(dtype).mT for weight in self.packed_weights())
        plain = self.__dict__["plain"]
        plain.gate_up_proj = torch.nn.Parameter(torch.cat([gate, up], 1).contiguous(), requires_grad=False)
        plain.down_proj = torch.nn.Parameter(down.contiguous(), requires_grad=False)
        return plain

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        assert self.ready is not None
        absent = top_k_index >= self.num_experts  # the host's sign of an expert that is elsewhere
        out = torch.ops.w4plugin.w4a16_experts(
            x,
            top_k_weights.float(),
            top_k_index.masked_fill(absent, -1),
            *(getattr(self, name) for name in EXPERTS_TENSORS),
            None,
            self.ready.I,
            self.ready.gate_up_group_size,
            self.ready.down_group_size,
            True,
            self.activation,
            False,
            self.ready.backend,
        )
        return out.reshape(hidden_states.shape)

    def extra_repr(self) -> str:
        shape = f"experts={self.num_experts}, hidden={self.hidden_dim}, inner={self.intermediate_dim}"
        return f"{shape}, backend={self.ready.backend if self.ready else None}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> W4Experts:
        """``to``, ``cuda``, ``half``: scales are never cast, and another device may want another order."""
        if self.ready is None:
            return super()._apply(fn, recurse)
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.gate_up.device))
        if probe.device != self.gate_up.device or probe.dtype != self.dtype:
            self.dtype = probe.dtype
            self.hold(*(weight.to(probe.device) for weight in self.packed_weights()))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """GPTQ v2 tensors of every projection, on the CPU."""
        if self.ready is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        for word, stack in zip(self.words, self.packed_weights(), strict=True):
            for e in range(self.num_experts):
                for suffix, tensor in write_module(SAVED, stack.expert(e)).items():
                    destination[f"{prefix}{e}.{word}.{suffix}"] = tensor.cpu()

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        if self.ready is None:
            super()._load_from_state_dict(state_dict, prefix, *rest)
            return
        raise UsageError(
            f"{prefix}load_state_dict",
            got="weights for packed experts that are in their kernel's order",
            wanted="a model that is loaded with from_pretrained",
        )


def is_usual(plain: Any) -> bool:
    """Whether a module of the host is what W4Experts computes: two 3-D parameters and an activation."""
    held = {name: p.ndim for name, p in plain.named_parameters()}
    usual = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    gate = getattr(type(plain), "_apply_gate", None)
    return (
        held == {"gate_up_proj": 3, "down_proj": 3}
        and all(getattr(plain, name, None) is value for name, value in usual.items())
        and not getattr(plain, "has_post_expert_norm", False)
        and getattr(gate, "__name__", "") == "_default_apply_gate"
    )
