"""Which modules of a checkpoint are packed, and how: from the headers alone.

The tensors decide. The config is asked where shapes leave a choice, and is then compared with what was found
(:mod:`w4plugin.formats.cross_check`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats import cross_check, refused, registry
from w4plugin.formats.format import Candidate, Format, Module, TensorHeader
from w4plugin.note import Note
from w4plugin.quant_config import QuantConfig

FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class Census:
    """What a checkpoint holds.

    Attributes:
        modules: packed 4-bit modules, in natural order of their names.
        other_width: GPTQ and AWQ modules of 2, 3 or 8 bits.
        plain: every tensor that belongs to no packed module.
        plain_layers: names of modules with a 2-D floating ``weight`` among them.
        notes: what was inferred, and where config and tensors disagree.
    """

    modules: tuple[Module, ...]
    other_width: tuple[Module, ...]
    plain: tuple[str, ...]
    plain_layers: tuple[str, ...]
    notes: tuple[Note, ...]


def find_modules(headers: Mapping[str, TensorHeader], config: QuantConfig) -> Census:
    """Sort the tensors of a checkpoint into packed modules and the rest.

    Args:
        headers: every tensor of the checkpoint.
        config: what its config files claim.

    Raises:
        CorruptError: a packed module lacks a tensor, or its shapes contradict each other.
        UnsupportedError: the checkpoint is of a method that this project does not read; the message names it.
    """
    known = registry.formats()
    keys = frozenset().union(*(f.key for f in known.values()))
    under: dict[str, dict[str, TensorHeader]] = {}
    for full, header in headers.items():
        name, _, suffix = full.rpartition(".")
        under.setdefault(name, {})[suffix] = header
    refused.refuse(config, under)
    found: list[Module] = []
    notes: list[Note] = list(config.notes)
    for name in sorted((n for n, h in under.items() if not keys.isdisjoint(h)), key=natural):
        module, more = _module(Candidate(name, under[name], config), known)
        found.append(module)
        notes += more
    notes += cross_check.compare(config, found, under)
    owned = {full for module in found for full in module.tensors.values()}
    plain = tuple(full for full in headers if full not in owned)
    plain_layers = tuple(sorted((n for n, h in under.items() if cross_check.is_layer(h)), key=natural))
    return Census(
        modules=tuple(m for m in found if m.bits == 4),
        other_width=tuple(m for m in found if m.bits != 4),
        plain=plain,
        plain_layers=plain_layers,
        notes=tuple(dict.fromkeys(notes)),
    )


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key under which layers.2 comes before layers.10."""
    return tuple((p.isdigit(), int(p) if p.isdigit() else 0, p) for p in name.split("."))


def _module(candidate: Candidate, known: Mapping[str, Format]) -> tuple[Module, list[Note]]:
    for fmt in known.values():
        if fmt.key.isdisjoint(candidate.headers):
            continue
        found = fmt.detect(candidate)
        if found is None:
            continue
        notes = [*found.notes, *_strangers(candidate, fmt)]
        tensors = {
            suffix: _full(candidate.name, suffix)
            for suffix in candidate.headers
            if suffix in fmt.suffixes or suffix == "bias"
        }
        module = Module(
            candidate.name, fmt.name, found.bits, found.K, found.N, found.group_size, tensors, found.experts
        )
        return module, notes
    raise _explain(candidate)


def _full(name: str, suffix: str) -> str:
    return f"{name}.{suffix}" if name else suffix


def _strangers(candidate: Candidate, fmt: Format) -> list[Note]:
    """Tensors beside the format's own: floating ones change the layer in a way nobody here knows."""
    notes = []
    for suffix, header in candidate.headers.items():
        if suffix in fmt.suffixes or suffix == "bias":
            continue
        full = _full(candidate.name, suffix)
        if header.dtype in FLOATS or header.dtype.startswith("F8"):
            raise UnsupportedError(
                full,
                got=f"{header.dtype} {list(header.shape)} beside {fmt.title} tensors",
                wanted=f"only {', '.join(sorted(fmt.suffixes))} and bias",
                todo="a rotation, an input scale or a second copy of the weight: only its own tool knows how to use it",
            )
        notes.append(Note("warning", full, f"unknown {header.dtype} tensor in a packed module; carried through"))
    return notes


def _explain(candidate: Candidate) -> CorruptError | UnsupportedError:
    shapes = ", ".join(f"{s} {h.dtype} {list(h.shape)}" for s, h in sorted(candidate.headers.items()))
    have = set(candidate.headers)
    if "qweight" in have and "scales" not in have:
        missing = "scales"
    elif "qweight" in have and not have & {"qzeros", "scaled_zeros", "zeros"}:
        missing = "qzeros"
    elif "weight_packed" in have and "weight_scale" not in have:
        missing = "weight_scale"
    elif "B" in have and "s" not in have:
        missing = "s"
    else:
        return UnsupportedError(
            candidate.name or "checkpoint", got=shapes, wanted="the shapes of a known 4-bit format (w4plugin formats)"
        )
    return CorruptError(_full(candidate.name, missing), got=f"no such tensor beside {shapes}", wanted="it")
