"""Config against tensors: where they differ, the tensors have won, and the report says so.

Thousands of modules can differ in the same way, so differences of one kind share a note that counts them and names the
first few.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from w4plugin.formats.format import Module, TensorHeader
from w4plugin.module_rules import Rule
from w4plugin.note import Level, Note
from w4plugin.quant_config import QuantConfig

SHOWN = 3

METHOD_OF = {
    "gptq": ("gptq", "auto-round"),
    "gptq_v2": ("gptq", "auto-round"),
    "auto-round": ("auto-round",),
    "gptq-marlin": ("gptq",),
    "gptq-v0": ("gptq",),
    "awq": ("awq", "auto-round"),
    "awq-gemv": ("awq",),
    "awq-gemv-fast": ("awq",),
    "awq-marlin": ("awq",),
    "llm-awq": ("awq",),
    "compressed-tensors": ("compressed-tensors", "auto-round"),
}

LAYOUT_OF = {
    "awq": "gemm",
    "awq-gemv": "gemv",
    "awq-gemv-fast": "gemv_fast",
    "awq-marlin": "marlin",
    "llm-awq": "llm-awq",
    "gptq-marlin": "marlin",
    "compressed-tensors": "pack-quantized",
}


def compare(
    config: QuantConfig, modules: Sequence[Module], under: Mapping[str, Mapping[str, TensorHeader]]
) -> list[Note]:
    """Notes on every kind of difference.

    Args:
        config: what the files claim.
        modules: what the tensors are.
        under: headers by module name, then by suffix; the whole checkpoint.
    """
    plain = [name for name, headers in under.items() if is_layer(headers)]
    return [
        *_presence(config, modules),
        *_layouts(config, modules),
        *_packed(config, modules),
        *_plain(config, modules, plain),
        *_stale(config, under),
        *_activation_scales(under),
    ]


def is_layer(headers: Mapping[str, TensorHeader]) -> bool:
    """Whether a module holds a plain matrix, as a Linear or an Embedding does."""
    weight = headers.get("weight")
    return weight is not None and len(weight.shape) == 2 and weight.dtype in ("F16", "BF16", "F32", "F64")


def _presence(config: QuantConfig, modules: Sequence[Module]) -> Iterable[Note]:
    if config.method is None and modules:
        kinds = ", ".join(sorted({m.format for m in modules}))
        yield Note("warning", "config", f"no config file describes the quantisation; inferred from tensors: {kinds}")
    if config.method is not None and not modules:
        yield Note("warning", "config", f"says {config.method}, but no module is packed; the tensors win")


def _layouts(config: QuantConfig, modules: Sequence[Module]) -> Iterable[Note]:
    for name in sorted({m.format for m in modules}):
        methods, layout = METHOD_OF.get(name), LAYOUT_OF.get(name)
        own = [m.name for m in modules if m.format == name]
        wrong_method = config.method is not None and methods is not None and config.method not in methods
        wrong_layout = layout is not None and config.layout is not None and config.layout != layout
        if wrong_method or (wrong_layout and "layout" in config.stated):
            text = f"the config says {config.method} {config.layout}; the tensors are {name} and win"
            yield _note("conflict", own, text)


def _packed(config: QuantConfig, modules: Sequence[Module]) -> Iterable[Note]:
    skipped: dict[str, list[str]] = {}
    widths: dict[tuple[int, int, str], list[str]] = {}
    for module in modules:
        expected = config.for_module(module.name)
        if expected.quantized is False:
            skipped.setdefault(expected.rule, []).append(module.name)
        elif expected.bits is not None and expected.bits != module.bits:
            widths.setdefault((expected.bits, module.bits, expected.rule), []).append(module.name)
    for rule, names in skipped.items():
        yield _note("conflict", names, f"the config skips it ({rule}), but it is packed; the tensors win")
    for (said, found, rule), names in widths.items():
        source = f" ({rule})" if rule else ""
        yield _note("conflict", names, f"the config says {said} bits{source}, the tensors hold {found}; they win")


def _plain(config: QuantConfig, modules: Sequence[Module], plain: Sequence[str]) -> Iterable[Note]:
    leaves = {m.name.rpartition(".")[2] for m in modules}
    named: dict[str, list[str]] = {}
    among: list[str] = []
    for name in plain:
        expected = config.for_module(name)
        if expected.quantized and not expected.rule.startswith(("block_name", "to_quant_block")):
            named.setdefault(expected.rule, []).append(name)
        elif name.rpartition(".")[2] in leaves and expected.quantized is not False:
            among.append(name)
    for rule, names in named.items():
        yield _note("conflict", names, f"the config quantises it ({rule}), but it is plain; the tensors win")
    if among:
        yield _note("warning", among, "plain, while modules of the same name are packed, and no rule says so")


def _stale(config: QuantConfig, under: Mapping[str, Mapping[str, TensorHeader]]) -> Iterable[Note]:
    """Rules that match nothing: names from before a model was renamed."""
    # names and parts of names are looked up in all names at once: lists of them are as long as the model
    text = "\n".join(under)
    known = {part for name in under for part in _tails(name)}
    stale = [rule for rule in config.rules.rules if not _matches_some(config, rule, text, known, under)]
    by_key: dict[str, list[str]] = {}
    for rule in stale:
        by_key.setdefault(rule.key, []).append(rule.text)
    for key, entries in by_key.items():
        more = f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
        yield Note("warning", key, f"matches no module of this checkpoint: {', '.join(entries[:SHOWN])}{more}")


def _matches_some(config: QuantConfig, rule: Rule, text: str, known: set[str], names: Iterable[str]) -> bool:
    if rule.pattern.endswith("lm_head"):  # producers skip the head even where it is tied and not in the file
        return True
    match rule.match:
        case "class" | "head":
            return True
        case "exact":
            return rule.pattern in known
        case "substring":
            return rule.pattern in text
        case "prefix":
            return re.search(f"(?m)^{re.escape(rule.pattern)}(\\.|$)", text) is not None
        case "regex" | "search":
            return rule.pattern in known or config.rules.hits_any(rule, names)


def _tails(name: str) -> Iterable[str]:
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _activation_scales(under: Mapping[str, Mapping[str, TensorHeader]]) -> Iterable[Note]:
    """AWQ's ScaledActivation: a parameter that divides a GELU's output, and that most runtimes ignore."""
    names = [f"{n}.scales" for n, h in under.items() if n.rpartition(".")[2] == "act" and set(h) == {"scales"}]
    if names:
        text = "scales of an activation, not of a weight; carried through, and right only where a runtime divides"
        yield _note("warning", names, text)


def _note(level: Level, names: Sequence[str], text: str) -> Note:
    shown = ", ".join(names[:SHOWN])
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return Note(level, f"{shown}{more}", text)
