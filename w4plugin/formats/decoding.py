"""The last step of every reader: groups, bias and what is worth a line in the report."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from w4plugin.errors import CorruptError
from w4plugin.formats.format import Decoded, Module, RowShard
from w4plugin.formats.grouping import Parts, assemble
from w4plugin.note import Note
from w4plugin.quant_config import QuantConfig


def finish(
    module: Module,
    parts: Parts,
    tensors: Mapping[str, Tensor],
    config: QuantConfig,
    shard: RowShard | None,
    zero_rule: str,
    notes: tuple[Note, ...] = (),
) -> Decoded:
    """A :class:`Decoded` from the pieces that a reader took apart.

    Raises:
        CorruptError: the pieces, or the bias, contradict each other.
        UnsupportedError: no group size fits.
    """
    name = module.name
    try:
        weight, group_notes = assemble(name, parts, config.for_module(name), shard)
    except CorruptError as error:
        if error.where.startswith(name):
            raise
        raise CorruptError(f"{name}.{error.where}", got=error.got, wanted=error.wanted, todo=error.todo) from error
    notes += group_notes
    unfilled = not bool(weight.scales.any()) and not bool(weight.qweight.any())
    if unfilled:
        notes += (Note("warning", name, "every code and every scale is 0: a layer that was never filled"),)
    bias = tensors.get("bias")
    zero_bias = False
    if bias is not None:
        if bias.shape != (*weight.qweight.shape[:-2], weight.N) or not bias.is_floating_point():
            wanted = f"floating point {[*weight.qweight.shape[:-2], weight.N]}"
            raise CorruptError(f"{name}.bias", got=f"{bias.dtype} {list(bias.shape)}", wanted=wanted)
        zero_bias = not bool(bias.any())
    return Decoded(weight, notes, bias, zero_bias, unfilled, zero_rule)


def need(module: Module, tensors: Mapping[str, Tensor], *suffixes: str) -> list[Tensor]:
    """The tensors of these suffixes.

    Raises:
        CorruptError: one is missing.
    """
    for suffix in suffixes:
        if suffix not in tensors:
            have = ", ".join(sorted(tensors)) or "nothing"
            raise CorruptError(f"{module.name}.{suffix}", got=f"no such tensor (the module has {have})", wanted="it")
    return [tensors[s] for s in suffixes]


def words(module: Module, suffix: str, t: Tensor) -> Tensor:
    """``t`` if it is a matrix of packed words, or a stack of them, with at least one word.

    Raises:
        CorruptError: it is not.
    """
    if t.ndim not in (2, 3) or t.numel() == 0 or t.dtype == torch.bool or t.is_complex():
        got = f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
        raise CorruptError(f"{module.name}.{suffix}", got=got, wanted="a matrix of packed words")
    return t


def floats(module: Module, suffix: str, t: Tensor) -> Tensor:
    """``t`` if it is a matrix (or a stack of matrices) of float16, bfloat16 or float32.

    Raises:
        CorruptError: it is not.
    """
    if t.dtype not in (torch.float16, torch.bfloat16, torch.float32) or t.ndim not in (2, 3) or t.numel() == 0:
        raise CorruptError(
            f"{module.name}.{suffix}",
            got=f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}",
            wanted="float16, bfloat16 or float32, with one row a group or output",
        )
    return t
