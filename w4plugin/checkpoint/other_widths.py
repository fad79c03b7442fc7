"""Layers of 2, 3 or 8 bits inside a 4-bit checkpoint, such as the 8-bit head that GPTQModel's ``lm_head=True`` writes.

The user chooses: refuse the checkpoint (the default), keep the layers as they are, or make them plain. To keep them the
target must read them as the source does: same family of config, same rule for zero points.

GPTQ packs b-bit codes as one stream of bits along K, low bits first, into 32-bit words; zero points likewise along N:

    W[k, n] = (q[k, n] - zero[g, n]) * scale[g, n]        zero = stored + 1 in gptq, stored in gptq_v2
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.pickled import SAFETENSORS_DTYPE, TORCH_DTYPE
from w4plugin.checkpoint.stream import Job, Product, Shape, copy_job
from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats.format import Module
from w4plugin.note import Note
from w4plugin.quant_config import QuantConfig

OtherWidths = Literal["refuse", "keep", "dequantize"]
CHOICES: tuple[OtherWidths, ...] = ("refuse", "keep", "dequantize")

SWITCH = "--other-widths keep carries them through untouched, --other-widths dequantize makes them plain."

COLUMNS = 2048
"""Columns that are unpacked at a time: a head of 150,000 rows by 4096 would otherwise take gigabytes."""


def jobs(checkpoint: Checkpoint, choice: OtherWidths, to: str | None) -> list[Job]:
    """Jobs for the layers of another width.

    Args:
        choice: what the user wants.
        to: the format of the other layers; None when they become plain too.

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
            _require_keepable(checkpoint, module, to)
        return [copy_job(checkpoint, name) for module in modules for name in sorted(module.tensors.values())]
    return [_plain_job(checkpoint, module, None) for module in modules]


def describe(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with a ``dynamic`` rule for each kept layer, as GPTQModel and vLLM read them."""
    rules: dict[str, Any] = {}
    for module in checkpoint.census.other_width:
        size = -1 if module.group_size == module.K else module.group_size
        expected = checkpoint.quant_config.for_module(module.name)
        stated = {"sym": expected.sym, "desc_act": expected.desc_act}
        rule = {"bits": module.bits, "group_size": size, **{k: v for k, v in stated.items() if v is not None}}
        rules[f"+:{re.escape(module.name)}$"] = rule
    if not rules:
        return dict(config)
    # the first rule that matches wins, so the most particular ones stand first
    return {**config, "dynamic": {**rules, **config.get("dynamic", {})}}


def notes(checkpoint: Checkpoint, choice: OtherWidths) -> list[Note]:
    """A line of the report for each such layer."""
    done = {"keep": "carried through untouched", "dequantize": "made plain", "refuse": ""}[choice]
    return [Note("info", m.name, f"{m.bits} bits: {done}") for m in checkpoint.census.other_width]


def _require_keepable(checkpoint: Checkpoint, module: Module, to: str | None) -> None:
    if to is None:
        raise UnsupportedError(
            module.name, got=f"{module.bits} bits, to be kept", wanted="a packed target", todo="Use dequantize for all."
        )
    if not module.format.startswith("gptq") or not to.startswith("gptq"):
        raise UnsupportedError(
            module.name, got=f"{module.bits} bits in {module.format}, to be kept in a {to} checkpoint",
            wanted="gptq to gptq, whose config can hold two widths", todo="--other-widths dequantize makes it plain.",
        )  # fmt: skip
    if module.format != to:
        raise UnsupportedError(
            module.name, got=f"{module.bits} bits with zero points as {module.format} stores them, to be kept in {to}",
            wanted="the same rule for all layers of a checkpoint",
            todo=f"--to {module.format} keeps it; --other-widths dequantize makes it plain.",
        )  # fmt: skip


def _plain_job(checkpoint: Checkpoint, module: Module, dtype: torch.dtype | None) -> Job:
    name = f"{module.name}.weight"
    size = sum(checkpoint.nbytes(full) for full in module.tensors.values())
    if "scales" not in module.tensors:
        raise _unreadable(module)
    chosen = dtype or TORCH_DTYPE[checkpoint.headers[module.tensors["scales"]].dtype]
    bias = module.tensors.get("bias")

    def make() -> Product:
        tensors = {suffix: checkpoint.tensor(full) for suffix, full in module.tensors.items()}
        made = {name: dequantize(module, tensors, checkpoint.quant_config, chosen)}
        if bias is not None:
            made[bias] = tensors["bias"] if dtype is None else tensors["bias"].to(dtype)
        return Product(made, {"from": f"{module.format}, {module.bits} bits"})

    predicted: dict[str, Shape] = {name: (SAFETENSORS_DTYPE[chosen], (module.N, module.K))}
    if bias is not None:
        kept = checkpoint.headers[bias]
        predicted[bias] = (kept.dtype if dtype is None else SAFETENSORS_DTYPE[dtype], kept.shape)
    return Job(module.name, predicted, make, size + module.N * module.K * 4, size)


def plain_jobs(checkpoint: Checkpoint, dtype: torch.dtype | None) -> list[Job]:
    """Jobs that make every layer of another width plain, in ``dtype`` or that of its scales."""
    return [_plain_job(checkpoint, module, dtype) for module in checkpoint.census.other_width]


def dequantize(module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, dtype: torch.dtype) -> Tensor:
    """The plain weight of a GPTQ layer of any width.

    Args:
        module: from the census.
        tensors: ``qweight`` int32 ``[K * bits / 32, N]``, ``scales`` ``[G, N]``, ``qzeros`` int32
            ``[G, N * bits / 32]`` or empty, ``g_idx`` ``[K]`` or none.
        config: of the checkpoint.
        dtype: of the result.

    Returns:
        ``[N, K]``.

    Raises:
        UnsupportedError: another layout than GPTQ's.
        CorruptError: shapes contradict each other, or scales are not finite.
    """
    name, bits, K, N = module.name, module.bits, module.K, module.N
    qweight, scales, qzeros = (tensors.get(s) for s in ("qweight", "scales", "qzeros"))
    if not module.format.startswith(("gptq", "auto-round")) or qweight is None or scales is None or qweight.ndim != 2:
        raise _unreadable(module)
    if qweight.dtype != torch.int32 or qweight.shape != (K * bits // 32, N) or scales.shape[-1] != N:
        raise CorruptError(f"{name}.qweight", got=f"{qweight.dtype} {list(qweight.shape)}", wanted=f"{bits}-bit words")
    if not bool(torch.isfinite(scales).all()):
        raise CorruptError(f"{name}.scales", got="NaN or infinity", wanted="finite scales")
    groups = _groups(module, tensors.get("g_idx"), scales.shape[0])
    zeros = _zeros(module, qzeros, scales.shape[0], config)
    exact = torch.float64 if scales.dtype == torch.float32 else torch.float32
    out = torch.empty((N, K), dtype=dtype)
    for start in range(0, N, COLUMNS):
        cut = slice(start, start + COLUMNS)
        weight = _stream(qweight[:, cut].mT, bits, K).to(exact)
        weight -= zeros[:, cut].to(exact)[groups].mT
        weight *= scales[:, cut].to(exact)[groups].mT
        out[cut] = weight.to(dtype)
    if not bool(torch.isfinite(out).all()):
        raise UnsupportedError(
            f"{name}.weight", got=f"values beyond the range of {SAFETENSORS_DTYPE[dtype]}", wanted="finite values"
        )
    return out


def _stream(words: Tensor, bits: int, count: int) -> Tensor:
    """``count`` codes of ``bits`` bits along the last axis of int32 ``words``, low bits first: int64."""
    first = torch.arange(count) * bits
    at, shift = first // 32, first % 32
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    after = (at + 1).clamp(max=words.shape[-1] - 1)
    # a code of three bits can begin in one word and end in the next
    both = unsigned[..., at] | unsigned[..., after] << 32
    return (both >> shift) & ((1 << bits) - 1)


def _groups(module: Module, g_idx: Tensor | None, count: int) -> Tensor:
    """int64 ``[K]``."""
    size = module.group_size or -(-module.K // count)
    if g_idx is None or not g_idx.numel() or (count > 1 and not bool(g_idx.any())):
        return torch.arange(module.K) // size
    index = g_idx.to(torch.int64)
    index = torch.where(index < 0, index + count, index)
    if index.shape != (module.K,) or int(index.min()) < 0 or int(index.max()) >= count:
        raise CorruptError(
            f"{module.name}.g_idx",
            got=f"{list(g_idx.shape)} or a group out of range",
            wanted=f"[{module.K}], 0..{count - 1}",
        )
    return index


def _zeros(module: Module, qzeros: Tensor | None, groups: int, config: QuantConfig) -> Tensor:
    """True zero points, int64 ``[G, N]``."""
    middle, top = 1 << (module.bits - 1), (1 << module.bits) - 1
    if qzeros is None or not qzeros.numel():
        return torch.full((groups, module.N), middle)
    if qzeros.dtype != torch.int32 or qzeros.shape[0] != groups or qzeros.shape[1] * 32 < module.N * module.bits:
        raise CorruptError(
            f"{module.name}.qzeros",
            got=f"{qzeros.dtype} {list(qzeros.shape)}",
            wanted=f"{groups} rows of {module.N} zeros",
        )
    stored = _stream(qzeros, module.bits, module.N)
    for symmetric in (middle, middle - 1):  # whatever the label says: the values show which rule was used
        if config.for_module(module.name).sym is not False and bool((stored == symmetric).all()):
            return torch.full_like(stored, middle)
    if config.layout == "gptq_v2":
        return stored
    if bool((stored == top).any()):
        raise UnsupportedError(
            f"{module.name}.qzeros",
            got=f"stored zero points of {top} in {module.bits} bits, which readers decode in different ways",
            wanted="zero - 1 in range",
            todo="--other-widths keep carries the layer through untouched.",
        )
    return stored + 1


def _unreadable(module: Module) -> UnsupportedError:
    return UnsupportedError(
        module.name, got=f"{module.bits} bits in {module.format}", wanted="GPTQ's layout, to make the layer plain",
        todo="--other-widths keep carries it through where the target allows.",
    )  # fmt: skip
