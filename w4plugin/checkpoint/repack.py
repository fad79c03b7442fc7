"""The same weights in another layout, without changing one.

    checkpoint -> module by module: read -> W4Tensor -> write -> shards

Integer codes, zero points and scales pass through as they are stored; tensors that are not packed are copied bit for
bit; a format that could not hold a module without a loss refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4plugin.checkpoint import other_widths as wide_layers
from w4plugin.checkpoint import output
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.header import nbytes
from w4plugin.checkpoint.other_widths import Choice
from w4plugin.checkpoint.output import Request, Work
from w4plugin.checkpoint.pickled import SAFETENSORS_DTYPE
from w4plugin.checkpoint.prediction import Sizes, predict
from w4plugin.checkpoint.stream import Job, Product, Shape, copy_job
from w4plugin.errors import UnsupportedError, UsageError, W4Error
from w4plugin.formats import registry
from w4plugin.formats.format import Decoded, Layer, Module
from w4plugin.tensor import W4Tensor

DEFAULT_FORMAT = "gptq_v2"

SPREAD = 3
"""Memory that a module costs while it is converted, as a multiple of its bytes: as read, as written, and pieces."""

ELEMENTS = 1 << 22
"""Weights that are made plain at a time."""


def repack(
    model: str | Path | Checkpoint,
    out: str | Path | Request,
    *,
    to: str = DEFAULT_FORMAT,
    other_widths: Choice = "refuse",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> dict[str, Any]:
    """Rewrite a checkpoint.

    Args:
        model: a folder, a hub id, or an opened checkpoint.
        out: the folder to create, or a :class:`Request` that says more about how.
        to: registry name of the format to write.
        other_widths: what to do with layers of 2, 3 or 8 bits: refuse the checkpoint, keep them untouched, or make
            them plain.
        include: shell patterns of module names that stay packed; empty means all.
        exclude: shell patterns of module names that become plain, dequantised exactly.

    Returns:
        The report; see ``report.schema.json``.

    Raises:
        UsageError: no format is called ``to``.
        UnsupportedError: a layer that the target, or this project, cannot hold, or a target that can only be read.
        W4Error: of reading or writing.
    """
    registry.writer(to)
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
    request = out if isinstance(out, Request) else Request(Path(out))
    census, selected = checkpoint.census, Selection(include, exclude)
    require_modules(checkpoint)
    packed = [m for m in census.modules if selected(m.name)]
    plain = [m for m in census.modules if not selected(m.name)]
    selected.require_used([m.name for m in census.modules])
    if not packed:
        raise UsageError("--include/--exclude", got="patterns that leave no module packed", wanted="at least one",
                         todo="`w4plugin dequantize` makes all of them plain.")  # fmt: skip
    jobs = [_pack_job(checkpoint, m, to, request.device) for m in packed]
    jobs += [plain_job(checkpoint, m, None, request.device) for m in plain]
    jobs += wide_layers.jobs(checkpoint, other_widths, to)
    jobs += [copy_job(checkpoint, name) for name in census.plain]
    kept = [m.name for m in census.other_width] if other_widths == "keep" else []
    made_plain = [m.name for m in (*plain, *(census.other_width if other_widths == "dequantize" else ()))]
    plain_layers = [*census.plain_layers, *made_plain]

    def config(facts: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        layers = [Layer(m.name, **facts[m.name]["layer"]) for m in packed]
        written = registry.quantization_config(to, layers, plain_layers)
        return wide_layers.describe(checkpoint, written) if kept else written

    work = Work(
        command="repack",
        options={"to": to, "other_widths": other_widths, "include": list(include), "exclude": list(exclude)},
        jobs=jobs,
        config=config,
        dropped={},
        notes=wide_layers.notes(checkpoint, other_widths),
        extra={"kept": kept, "made_plain": made_plain},
    )
    return output.write(checkpoint, work, request)


class Selection:
    """Module names by shell patterns; a pattern that matches nothing is an error, not a silent no-op."""

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._include, self._exclude = tuple(include), tuple(exclude)

    def __call__(self, name: str) -> bool:
        wanted = not self._include or any(fnmatchcase(name, p) for p in self._include)
        return wanted and not any(fnmatchcase(name, p) for p in self._exclude)

    def require_used(self, names: Sequence[str]) -> None:
        """Raise UsageError for a pattern that matches none of ``names``."""
        for pattern in (*self._include, *self._exclude):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    "--include/--exclude", got=f"{pattern!r}, which matches no module", wanted="a pattern that does",
                    todo=f"Modules are named like {names[0]}." if names else "",
                )  # fmt: skip


def require_modules(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that holds no packed 4-bit module."""
    if not checkpoint.census.modules:
        method = checkpoint.quant_config.method
        raise UnsupportedError(
            checkpoint.source.label(),
            got=f"no 4-bit module ({f'the config says {method}' if method else 'nothing is quantised'})",
            wanted="a GPTQ, AWQ, AutoRound or compressed-tensors INT4 checkpoint",
            todo="`w4plugin quantize` makes one of a plain checkpoint." if method is None else "",
        )


def read(checkpoint: Checkpoint, module: Module, device: str = "cpu") -> Decoded:
    """One module's weight; errors name its file."""
    tensors = {suffix: checkpoint.tensor(name).to(device) for suffix, name in module.tensors.items()}
    try:
        return registry.read_module(module, tensors, checkpoint.quant_config)
    except W4Error as fault:
        holder = checkpoint.holder[next(iter(module.tensors.values()))]
        raise fault.at(holder.name) from fault


def module_bytes(checkpoint: Checkpoint, module: Module) -> int:
    """Bytes of the module's tensors in the source."""
    return sum(checkpoint.nbytes(name) for name in module.tensors.values())


def facts_of(module: Module, decoded: Decoded) -> dict[str, Any]:
    """What the report says about a module."""
    weight = decoded.weight
    bias = "none" if decoded.bias is None else "dropped: all zero" if decoded.zero_bias else "kept"
    dropped = [] if bias[0] != "d" else [{"tensor": module.tensors["bias"], "reason": "a bias of zeros"}]
    layer = Layer.of(module.name, weight)
    return {
        "from": module.format,
        "layer": {name: getattr(layer, name) for name in ("K", "N", "group_size", "groups", "sym", "desc_act")},
        "experts": weight.experts,
        "scales": SAFETENSORS_DTYPE[weight.scales.dtype],
        "zero_rule": decoded.zero_rule,
        "bias": bias,
        "unfilled": decoded.unfilled,
        "dropped": dropped,
        "notes": [output.note(n) for n in decoded.notes],
    }


def _pack_job(checkpoint: Checkpoint, module: Module, to: str, device: str) -> Job:
    def make() -> Product:
        decoded = read(checkpoint, module, device)
        try:
            tensors = registry.write_module(to, decoded.weight)
        except W4Error as fault:
            raise fault.at(module.name) from fault
        tensors = {f"{module.name}.{suffix}": tensor for suffix, tensor in tensors.items()}
        return Product({**tensors, **_bias(module, decoded)}, facts_of(module, decoded))

    size = module_bytes(checkpoint, module)
    return Job(module.name, _predicted(checkpoint, module, to), make, SPREAD * size, size)


def plain_job(checkpoint: Checkpoint, module: Module, dtype: torch.dtype | None, device: str = "cpu") -> Job:
    """A job that makes a packed module plain: ``weight`` ``[N, K]`` as a Linear has it.

    Args:
        checkpoint: what is read.
        module: from its census.
        dtype: of the weight; None means that of the scales.
        device: where to do it.
    """

    def make() -> Product:
        decoded = read(checkpoint, module, device)
        weight = plain_weight(f"{module.name}.weight", decoded.weight, dtype or decoded.weight.scales.dtype)
        bias = {} if decoded.bias is None else {module.tensors["bias"]: decoded.bias.to(dtype or decoded.bias.dtype)}
        facts = {**facts_of(module, decoded), "bias": "none" if decoded.bias is None else "kept", "dropped": []}
        return Product({f"{module.name}.weight": weight, **bias}, facts)

    lead = () if module.experts is None else (module.experts,)
    scales = _scales_dtype(checkpoint, module)
    name = SAFETENSORS_DTYPE[dtype] if dtype is not None else scales
    predicted: dict[str, Shape] = {f"{module.name}.weight": (name, (*lead, module.N, module.K))}
    if "bias" in module.tensors:
        header = checkpoint.headers[module.tensors["bias"]]
        predicted[module.tensors["bias"]] = (name if dtype is not None else header.dtype, header.shape)
    size = module_bytes(checkpoint, module)
    plain = nbytes(predicted[f"{module.name}.weight"][0], (*lead, module.N, module.K))
    return Job(module.name, predicted, make, SPREAD * size + plain + 20 * ELEMENTS, size)


def plain_weight(name: str, weight: W4Tensor, dtype: torch.dtype) -> Tensor:
    """``[*E, N, K]`` as a Linear has it, a few columns at a time: the exact product takes eight times the result.

    Raises:
        UnsupportedError: ``dtype`` cannot hold a value; ``name`` is for the message.
    """
    lead = () if weight.experts is None else (weight.experts,)
    out = torch.empty((*lead, weight.N, weight.K), dtype=dtype, device=weight.device)
    step = max(1, ELEMENTS // (weight.K * (weight.experts or 1)))
    for start in range(0, weight.N, step):
        stop = min(start + step, weight.N)
        piece = weight.shard_n(start, stop).dequantize(dtype)
        require_finite(name, piece)
        out[..., start:stop, :] = piece.mT
    return out


def require_finite(name: str, weight: Tensor) -> None:
    """Refuse a weight that its dtype cannot hold."""
    if not bool(torch.isfinite(weight).all()):
        raise UnsupportedError(
            name, got=f"values beyond the range of {SAFETENSORS_DTYPE[weight.dtype]}", wanted="finite values",
            todo="--dtype bfloat16 or float32 holds them.",
        )  # fmt: skip


def _bias(module: Module, decoded: Decoded) -> dict[str, Tensor]:
    """The module's bias, unless it is all zero: 2023 packers gave every Linear one, and loaders reject those."""
    return {} if decoded.bias is None or decoded.zero_bias else {module.tensors["bias"]: decoded.bias}


def _predicted(checkpoint: Checkpoint, module: Module, to: str) -> dict[str, Shape]:
    """The tensors that a module will become, from its header and the config; the bias, which is small, is looked at."""
    expected = checkpoint.quant_config.for_module(module.name)
    groups = -(-module.K // module.group_size) if module.group_size else 1
    sizes = Sizes(
        lead=() if module.experts is None else (module.experts,),
        K=module.K,
        N=module.N,
        G=groups,
        scales=_scales_dtype(checkpoint, module),
        sym=expected.sym is not False,
        act_order=bool(expected.desc_act) and groups > 1,
    )
    found = predict(module.name, to, sizes)
    bias = module.tensors.get("bias")
    if bias is not None and bool(checkpoint.tensor(bias).any()):
        found[bias] = (checkpoint.headers[bias].dtype, checkpoint.headers[bias].shape)
    return found


def _scales_dtype(checkpoint: Checkpoint, module: Module) -> str:
    """The dtype of a module's scales: of the one floating tensor that every format has."""
    for suffix in ("scales", "weight_scale", "s"):
        if suffix in module.tensors:
            return checkpoint.headers[module.tensors[suffix]].dtype
    floats = [checkpoint.headers[n].dtype for s, n in module.tensors.items() if s != "bias"]
    return next((d for d in floats if d in ("F16", "BF16", "F32")), "F16")
