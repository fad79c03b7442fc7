"""Which tensors a packed layer will become, told from sizes alone.

A safetensors header stands before the data, so the shapes must be known before the first layer is converted. For a
format that is not listed here, or a layer whose data turns out otherwise, :mod:`w4plugin.checkpoint.stream` learns the
truth in a first pass and writes in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from w4plugin.checkpoint.stream import Shape
from w4plugin.packing import NIBBLES


@dataclass(frozen=True)
class Sizes:
    """A layer as far as its header and config tell.

    Attributes:
        lead: ``(E,)`` of a stack of experts, else empty.
        K, N, G: rows, columns and groups.
        scales: dtype of the scales, in safetensors' spelling.
        sym: every zero point is 8.
        act_order: it will keep a g_idx of its own.
    """

    lead: tuple[int, ...]
    K: int
    N: int
    G: int
    scales: str
    sym: bool
    act_order: bool


def predict(name: str, to: str, sizes: Sizes) -> dict[str, Shape]:
    """Tensors of the layer ``name`` written as ``to``, by full name; empty for a format that is not known here."""
    shapes = _SHAPES.get(to)
    return {} if shapes is None else {f"{name}.{suffix}": shape for suffix, shape in shapes(sizes).items()}


def _words(codes: int) -> int:
    return -(-codes // NIBBLES)


def _auto_round(s: Sizes) -> dict[str, Shape]:
    return {
        "qweight": ("I32", (*s.lead, _words(s.K), s.N)),
        "qzeros": ("I32", (*s.lead, s.G, _words(s.N))),
        "scales": (s.scales, (*s.lead, s.G, s.N)),
    }


def _gptq(s: Sizes) -> dict[str, Shape]:
    return {**_auto_round(s), "g_idx": ("I32", (*s.lead, _words(s.K) * NIBBLES))}


def _awq(s: Sizes) -> dict[str, Shape]:
    return {
        "qweight": ("I32", (*s.lead, _words(s.K) * NIBBLES, _words(s.N))),
        "qzeros": ("I32", (*s.lead, s.G, _words(s.N))),
        "scales": (s.scales, (*s.lead, s.G, s.N)),
    }


def _compressed_tensors(s: Sizes) -> dict[str, Shape]:
    found: dict[str, Shape] = {
        "weight_packed": ("I32", (*s.lead, s.N, _words(s.K))),
        "weight_scale": (s.scales, (*s.lead, s.N, s.G)),
        "weight_shape": ("I64", (len(s.lead) + 2,)),
    }
    if not s.sym:
        found["weight_zero_point"] = ("I32", (*s.lead, _words(s.N), s.G))
    if s.act_order:
        found["weight_g_idx"] = ("I32", (*s.lead, _words(s.K) * NIBBLES))
    return found


_SHAPES: Mapping[str, Callable[[Sizes], dict[str, Shape]]] = {
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "auto-round": _auto_round,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
}
