"""What a checkpoint is, for people and programs: from its headers, and from its data where asked.

Headers tell format, shapes, group sizes and widths for certain. Whether zero points are all 8 and whether an act-order
is a real one stands in the data; from headers alone the config's word is repeated as such.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from w4plugin.checkpoint import bounded, output, vllm_verdict
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.repack import SPREAD, module_bytes, read
from w4plugin.checkpoint.stream import natural
from w4plugin.formats.format import Module
from w4plugin.note import Note

INDEX_SUFFIXES = ("g_idx", "weight_g_idx")


def inspect(
    model: str | Path | Checkpoint,
    *,
    values: bool = False,
    workers: int | None = None,
    begin: Callable[[int], None] = lambda total: None,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Describe a checkpoint.

    Args:
        model: a folder, a hub id, or an opened checkpoint.
        values: read the packed modules too, and say what their zero points and g_idx really are.
        workers: modules at the same time, with ``values``.
        begin, progress: called with bytes to read and bytes read, with ``values``.

    Returns:
        The description; see ``report.schema.json``.
    """
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model, headers_only=not values)
    census, config = checkpoint.census, checkpoint.quant_config
    rows = [_module(checkpoint, m) for m in (*census.modules, *census.other_width)]
    notes: list[Note] = [*checkpoint.notes, *census.notes]
    if values:
        notes += _look_inside(checkpoint, rows, workers, begin, progress)
    against = vllm_verdict.reasons(census, config)
    sizes = {name: checkpoint.nbytes(name) for name in checkpoint.headers}
    packed = {name for m in (*census.modules, *census.other_width) for name in m.tensors.values()}
    weights = sum(row["weights"] for row in rows)
    plain = sum(prod(checkpoint.headers[name].shape) for name in census.plain)
    return {
        "command": "inspect",
        "w4plugin": output.version(),
        "source": output.source(checkpoint),
        "architectures": [str(a) for a in checkpoint.config.get("architectures") or []],
        "config": {
            "method": config.method,
            "layout": config.layout,
            "bits": config.bits,
            "group_size": config.group_size,
            "sym": config.sym,
            "desc_act": config.desc_act,
            "producer": config.producer,
            "files": sorted(checkpoint.configs),
        },
        "tensors": len(checkpoint.headers),
        "bytes": sum(sizes.values()),
        "packed_bytes": sum(sizes[name] for name in packed),
        "packed_weights": weights,
        "plain_weights": plain,
        "bits_per_packed_weight": _per(sum(sizes[name] for name in packed), weights),
        "bits_per_weight": _per(sum(sizes.values()), weights + plain),
        "values": values,
        "modules": rows,
        "plain_layers": [_plain(checkpoint, name) for name in census.plain_layers],
        "notes": [output.note(n) for n in dict.fromkeys(notes)],
        "vllm": {"version": vllm_verdict.VERSION, "takes": bool(census.modules) and not against, "reasons": against},
    }


def _per(size: int, weights: int) -> float | None:
    return round(8 * size / weights, 3) if weights else None


def _module(checkpoint: Checkpoint, module: Module) -> dict[str, Any]:
    expected = checkpoint.quant_config.for_module(module.name)
    size, weights = module_bytes(checkpoint, module), module.K * module.N * (module.experts or 1)
    has_index = any(s in module.tensors for s in INDEX_SUFFIXES)
    return {
        "name": module.name,
        "format": module.format,
        "bits": module.bits,
        "K": module.K,
        "N": module.N,
        "experts": module.experts,
        "group_size": module.group_size,
        "sym": expected.sym,
        "desc_act": expected.desc_act if has_index else False,
        "scales": _scales(checkpoint, module),
        "bias": "bias" in module.tensors,
        "zero_rule": None,
        "rule": expected.rule or None,
        "bytes": size,
        "weights": weights,
        "bits_per_weight": _per(size, weights),
    }


def _scales(checkpoint: Checkpoint, module: Module) -> str:
    names = [module.tensors[s] for s in ("scales", "weight_scale", "s") if s in module.tensors]
    return checkpoint.headers[names[0]].dtype if names else "?"


def _plain(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    header = checkpoint.headers[f"{name}.weight"]
    return {"name": name, "dtype": header.dtype, "shape": list(header.shape)}


def _look_inside(
    checkpoint: Checkpoint,
    rows: list[dict[str, Any]],
    workers: int | None,
    begin: Callable[[int], None],
    progress: Callable[[int], None],
) -> list[Note]:
    """Read every 4-bit module and replace the config's word by what is there."""
    modules = checkpoint.census.modules
    begin(sum(row["bytes"] for row in rows[: len(modules)]))

    found: dict[str, tuple[Note, ...]] = {}

    def look(module: Module, row: dict[str, Any]) -> None:
        decoded = read(checkpoint, module)
        weight = decoded.weight
        row.update(
            K=weight.K,
            N=weight.N,
            group_size=weight.group_size,
            sym=weight.symmetric,
            desc_act=weight.g_idx is not None,
            zero_rule=decoded.zero_rule,
        )
        found[module.name] = decoded.notes
        progress(row["bytes"])

    pairs = zip(modules, rows, strict=False)
    bounded.run(((SPREAD * row["bytes"], partial(look, module, row)) for module, row in pairs), workers)
    return [note for module in modules for note in found[module.name]]


def kinds(rows: Iterable[Mapping[str, Any]], keys: tuple[str, ...]) -> list[tuple[str, int, Mapping[str, Any]]]:
    """Rows that differ only in numbers of their names, as (name with ``*``, how many, one of them), in natural order.

    Args:
        rows: with a ``name`` each.
        keys: the entries that must be equal.
    """
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row["name"])
        found.setdefault((pattern, *(str(row[k]) for k in keys)), []).append(row)
    merged = [(key[0] if len(group) > 1 else group[0]["name"], len(group), group[0]) for key, group in found.items()]
    return sorted(merged, key=lambda item: natural(item[0]))
