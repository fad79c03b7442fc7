"""A layer as the multiplications it is made of, for hosts whose layers fuse several weights; no host is imported.

Weights that one kernel call can hold are one piece; others (each its own act-order, a plain weight among packed ones)
stay beside it, and their outputs are laid side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from w4plugin.kernels import Prepared, op

TENSORS = ("qweight", "scales", "zeros", "g_idx", "counters")
"""The fields of a Prepared that are tensors, in the op's order; layers register them under these names."""

EXPERTS_TENSORS = (
    "gate_up",
    "gate_up_scales",
    "gate_up_zeros",
    "gate_up_g_idx",
    "down",
    "down_scales",
    "down_zeros",
    "down_g_idx",
)
"""The same of a PreparedExperts."""


@dataclass(frozen=True)
class Piece:
    """One multiplication of a layer.

    Attributes:
        names: the layer's parameter for each of TENSORS, None where the backend has none; of a plain weight, its one.
        n: columns.
        group_size, backend: as the op takes them; backend "" means a plain weight.
    """

    names: tuple[str | None, ...]
    n: int
    group_size: int = 0
    backend: str = ""


def register(layer: torch.nn.Module, weights: list[Prepared | Tensor]) -> tuple[Piece, ...]:
    """Give a layer the parameters of its multiplications; those of the first have plain names."""
    return tuple(_registered(layer, weight, f"_{i}" if i else "") for i, weight in enumerate(weights))


def _registered(layer: torch.nn.Module, weight: Prepared | Tensor, tail: str) -> Piece:
    if isinstance(weight, Tensor):
        layer.register_parameter(f"weight{tail}", Parameter(weight, requires_grad=False))
        return Piece((f"weight{tail}",), weight.shape[0])
    names: list[str | None] = []
    for name in TENSORS:
        tensor = getattr(weight, name)
        names.append(None if tensor is None else name + tail)
        if tensor is not None:
            layer.register_parameter(name + tail, Parameter(tensor, requires_grad=False))
    return Piece(tuple(names), weight.N, weight.group_size, weight.backend)


def multiply(layer: Any, x: Tensor, pieces: tuple[Piece, ...], bias: Tensor | None) -> Tensor:
    """x ``[..., K]`` -> ``[..., N]`` in x's dtype, bias ``[N]`` added where there is one."""
    if len(pieces) == 1:
        return _one(layer, x, pieces[0], bias)
    out = torch.cat([_one(layer, x, piece, None) for piece in pieces], -1)
    return out if bias is None else out + bias


def _one(layer: Any, x: Tensor, piece: Piece, bias: Tensor | None) -> Tensor:
    tensors = [None if name is None else getattr(layer, name) for name in piece.names]
    if not piece.backend:
        return torch.nn.functional.linear(x, tensors[0], bias)
    return op.call(x, *tensors, bias, piece.n, piece.group_size, piece.backend)
