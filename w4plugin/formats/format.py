"""The types that every checkpoint format is described in.

A format is a set of tensor suffixes and four pure functions: ``detect`` looks at headers, ``read`` makes a
:class:`~w4plugin.tensor.W4Tensor` of a module's tensors, ``write`` makes the tensors of a W4Tensor, ``config`` says
what ``config.json`` must hold. None of them knows files, hosts or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from w4plugin.note import Note
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import W4Tensor

__all__ = ["Candidate", "Decoded", "Format", "Found", "Layer", "Module", "Note", "RowShard", "TensorHeader"]


class TensorHeader(NamedTuple):
    """What a safetensors header says about one tensor.

    Attributes:
        dtype: in safetensors' spelling: "I32", "F16", "BF16", "F32", "I16", "I64", "U8", ...
        shape: sizes, outermost first.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """One packed layer of a checkpoint, as its headers show it.

    Attributes:
        name: the checkpoint's own name, without a suffix.
        format: name of the format in :mod:`w4plugin.formats.registry`.
        bits: width of a code; 4 in ``Census.modules``, another width in ``Census.other_width``.
        K: in_features. Exact, except where a format stores it as data (compressed-tensors with one scale a column):
            then rounded up to a whole word.
        N: out_features.
        group_size: rows in a group, K for one group; None where only the data can tell.
        tensors: full tensor name of each suffix, ``bias`` included.
        experts: E of a stack of experts, None of a single layer.
    """

    name: str
    format: str
    bits: int
    K: int
    N: int
    group_size: int | None
    tensors: Mapping[str, str]
    experts: int | None = None


@dataclass(frozen=True, eq=False)
class Decoded:
    """A module after reading.

    Attributes:
        weight: the weight; integers and scales are exactly the file's.
        notes: which rules and values decided.
        bias: ``[N]`` in the stored dtype, None when the module has none.
        zero_bias: True when a bias is present and all zero, as 2023 GPTQ packers gave every Linear. Whether such a
            bias may be dropped is the caller's decision; one that is not zero must never be.
        unfilled: True when every code and every scale is 0: a layer that was created and never filled.
        zero_rule: how stored zero points were turned into true ones: "true", "minus-one", "minus-one-carry",
            "rounded-product" or "symmetric".
    """

    weight: W4Tensor
    notes: tuple[Note, ...] = ()
    bias: Tensor | None = None
    zero_bias: bool = False
    unfilled: bool = False
    zero_rule: str = "true"


@dataclass(frozen=True)
class RowShard:
    """Rows ``first .. first + K`` of a layer of ``total`` rows, when a host hands over a row-parallel shard.

    The codes (and ``g_idx``, if the format has one) are those of the shard. Scales and zeros may be whole, or cut to
    the groups that the shard touches; ``g_idx`` keeps the global group numbers either way.
    """

    first: int
    total: int


class Found(NamedTuple):
    """What ``detect`` read off the headers; K, N and group_size as in :class:`Module`."""

    bits: int
    K: int
    N: int
    group_size: int | None
    experts: int | None = None
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A name with the headers of the tensors directly under it, and the config of its checkpoint."""

    name: str
    headers: Mapping[str, TensorHeader]
    config: QuantConfig


@dataclass(frozen=True)
class Layer:
    """What a config has to say about one layer that was written."""

    name: str
    K: int
    N: int
    group_size: int
    groups: int
    sym: bool
    desc_act: bool

    @staticmethod
    def of(name: str, weight: W4Tensor) -> Layer:
        """The layer that holds ``weight``."""
        return Layer(name, weight.K, weight.N, weight.group_size, weight.G, weight.symmetric, weight.g_idx is not None)

    @property
    def stated_size(self) -> int:
        """The group size as configs spell it: -1 when one group covers all rows."""
        return -1 if self.groups == 1 else self.group_size


Detect = Callable[[Candidate], "Found | None"]
Read = Callable[[Module, Mapping[str, Tensor], QuantConfig, "RowShard | None"], Decoded]
Write = Callable[[W4Tensor], dict[str, Tensor]]
Config = Callable[[Sequence[Layer], Sequence[str]], dict[str, Any]]


@dataclass(frozen=True)
class Format:
    """A checkpoint layout.

    Attributes:
        name: registry name, which ``repack --to`` takes.
        title: one line for people.
        producers: tools that write it.
        suffixes: every tensor suffix a module of this format may hold, besides ``bias``.
        key: the suffixes of which one makes a name a candidate.
        detect: headers to shapes; None when they are not this format's.
        read: tensors to a weight, on any device.
        write: a weight to tensors; None when the format can only be read. Raises UnsupportedError when it would not be
            lossless.
        config: (layers written, names of plain layers that a reader would take for quantised ones) to the value of
            ``quantization_config``; None without ``write``.
        limits: what ``write`` refuses, or why there is none.
        exact: False when the format stores rounded products, so that an original reader's weight may differ from
            ``(q - z) * s`` by the bound that ``limits`` states.
    """

    name: str
    title: str
    producers: str
    suffixes: frozenset[str]
    key: frozenset[str]
    detect: Detect
    read: Read
    write: Write | None = None
    config: Config | None = None
    limits: str = ""
    exact: bool = True
