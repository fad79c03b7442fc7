"""Layers of 2, 3 or 8 bits inside a 4-bit checkpoint, such as the 8-bit head that GPTQModel's ``lm_head=True`` writes.

The user chooses: refuse the checkpoint (the default), keep the layers as they are, or make them plain. To keep them the
target must read them as the source does: the same family of config, the same rule for zero points.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch

from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.pickled import SAFETENSORS_DTYPE, TORCH_DTYPE
from w4plugin.checkpoint.stream import Job, Product, Shape, copy_job
from w4plugin.errors import UnsupportedError
from w4plugin.formats import other_widths
from w4plugin.formats.format import Module
from w4plugin.note import Note

Choice = Literal["refuse", "keep", "dequantize"]
CHOICES: tuple[Choice, ...] = ("refuse", "keep", "dequantize")

PLANAR = "gptq_p"

SWITCH = "--other-widths keep carries them through untouched, --other-widths dequantize makes them plain."


def jobs(checkpoint: Checkpoint, choice: Choice, to: str) -> list[Job]:
    """Jobs for the layers of another width.

    Args:
        checkpoint: what is read.
        choice: what the user wants.
        to: the format of the other layers.

    Raises:
        UnsupportedError: ``choice`` is "refuse" and there are such layers, or they cannot be kept or read.
    """
    modules = checkpoint.census.other_width
    if not modules:
        return []
    if choice == "refuse":
        shown = ", ".join(f"{m.name} ({m.bits} bits)" for m in modules[:6])
        shown += f" and {len(modules) - 6} more" if len(modules) > 6 else ""
        raise UnsupportedError(
            checkpoint.source.label(), got=f"layers of another width: {shown}", wanted="4 bits", todo=SWITCH
        )
    if choice == "keep":
        for module in modules:
            _require_keepable(module, to)
        return [copy_job(checkpoint, name) for module in modules for name in sorted(module.tensors.values())]
    return plain_jobs(checkpoint, None)


def describe(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with a ``dynamic`` rule for each kept layer, as GPTQModel and vLLM read them.

    Where one lies in planes the label stays GPTQModel's ``gptq_p``, which is ``gptq_v2`` for the 4-bit layers.
    """
    rules: dict[str, Any] = {}
    for module in checkpoint.census.other_width:
        size = -1 if module.group_size == module.K else module.group_size
        expected = checkpoint.quant_config.for_module(module.name)
        stated = {"sym": expected.sym, "desc_act": expected.desc_act}
        rule = {"bits": module.bits, "group_size": size, **{k: v for k, v in stated.items() if v is not None}}
        rules[f"+:{re.escape(module.name)}$"] = rule
    if any(other_widths.is_planar(m, checkpoint.quant_config) for m in checkpoint.census.other_width):
        config = {**config, "checkpoint_format": PLANAR, "format": PLANAR}
    # the first rule that matches wins, so the most particular ones stand first
    return {**config, "dynamic": {**rules, **config.get("dynamic", {})}} if rules else dict(config)


def notes(checkpoint: Checkpoint, choice: Choice) -> list[Note]:
    """A line of the report for each such layer."""
    done = {"keep": "carried through untouched", "dequantize": "made plain", "refuse": ""}[choice]
    return [Note("info", m.name, f"{m.bits} bits: {done}") for m in checkpoint.census.other_width]


def plain_jobs(checkpoint: Checkpoint, dtype: torch.dtype | None) -> list[Job]:
    """Jobs that make every layer of another width plain, in ``dtype`` or that of its scales.

    Raises:
        UnsupportedError: a layer in another layout than GPTQ's.
    """
    return [_plain_job(checkpoint, module, dtype) for module in checkpoint.census.other_width]


def _require_keepable(module: Module, to: str) -> None:
    if not module.format.startswith("gptq") or not to.startswith("gptq"):
        raise UnsupportedError(
            module.name,
            got=f"{module.bits} bits in {module.format}, to be kept in a {to} checkpoint",
            wanted="gptq to gptq, whose config can hold two widths",
            todo="--other-widths dequantize makes it plain.",
        )
    if module.format != to:
        raise UnsupportedError(
            module.name,
            got=f"{module.bits} bits with zero points as {module.format} stores them, to be kept in {to}",
            wanted="the same rule for all layers of a checkpoint",
            todo=f"--to {module.format} keeps it; --other-widths dequantize makes it plain.",
        )


def _plain_job(checkpoint: Checkpoint, module: Module, dtype: torch.dtype | None) -> Job:
    if module.format not in other_widths.READABLE:
        raise UnsupportedError(
            module.name,
            got=f"{module.bits} bits in {module.format}",
            wanted="GPTQ's layout, to make the layer plain",
            todo="--other-widths keep carries it through where the target allows.",
        )
    chosen = dtype or TORCH_DTYPE[checkpoint.headers[module.tensors["scales"]].dtype]
    name, bias = f"{module.name}.weight", module.tensors.get("bias")

    def make() -> Product:
        tensors = {suffix: checkpoint.tensor(full) for suffix, full in module.tensors.items()}
        plain = other_widths.dequantize(module, tensors, checkpoint.quant_config, chosen)
        made = {name: plain.weight}
        if bias is not None:
            made[bias] = tensors["bias"].to(dtype or tensors["bias"].dtype)
        notes = [{"level": n.level, "where": n.where, "text": n.text} for n in plain.notes]
        return Product(made, {"from": f"{module.format}, {module.bits} bits", "notes": notes})

    predicted: dict[str, Shape] = {name: (SAFETENSORS_DTYPE[chosen], (module.N, module.K))}
    if bias is not None:
        kept = checkpoint.headers[bias]
        predicted[bias] = (kept.dtype if dtype is None else SAFETENSORS_DTYPE[dtype], kept.shape)
    size = sum(checkpoint.nbytes(full) for full in module.tensors.values())
    return Job(module.name, predicted, make, size + module.N * module.K * chosen.itemsize, size)
