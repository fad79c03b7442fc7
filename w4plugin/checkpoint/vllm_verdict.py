"""Would vLLM's own loader take a checkpoint? What is known of it, without vLLM, from headers and config alone.

Read in the source of the version named here. A rule names the kind of checkpoint it is about and why vLLM refuses or
misreads it; no rule means that nothing is known against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from w4plugin.formats.census import Census
from w4plugin.formats.format import Module
from w4plugin.quant_config import QuantConfig

VERSION = "0.33"

LAYOUTS = {
    "gptq": ("gptq", "gptq_v2"),
    "awq": ("awq",),
    "auto-round": ("auto-round", "gptq", "gptq_v2", "awq"),
    "compressed-tensors": ("compressed-tensors",),
}
"""Formats that vLLM's loader of each method reads, in every version the plugin is tested with."""

GROUP_SIZES = (-1, 32, 64, 128)
"""What its Marlin kernel takes."""

VOCABULARY = 64
"""vLLM pads a vocabulary to a multiple of this."""

PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:llm_compressor")
"""AutoRound's packing_formats of integers that it takes; without one it assumes the first."""

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Weights that vLLM puts into one layer."""


def reasons(census: Census, config: QuantConfig) -> list[str]:
    """Why vLLM would refuse or misread the checkpoint; empty when nothing is known against it."""
    if not census.modules:
        return []
    return list(dict.fromkeys(reason for rule in _RULES for reason in rule(census, config)))


def _stated(census: Census, config: QuantConfig) -> Iterator[str]:
    if config.method is None:
        yield "no quantization_config: vLLM would take the model for a plain one"


def _layout(census: Census, config: QuantConfig) -> Iterator[str]:
    if config.method is None:
        return
    read = LAYOUTS.get(config.method, ())
    for format_name, names in _by_format(census.modules).items():
        if format_name not in read:
            yield f"{format_name} under the method {config.method}: vLLM does not read that layout ({_some(names)})"


def _packing(census: Census, config: QuantConfig) -> Iterator[str]:
    stated = config.raw.get("packing_format")
    if config.method == "auto-round" and stated is not None and stated not in PACKINGS:
        yield f"packing_format {stated}: vLLM's loader takes {', '.join(PACKINGS)}"


def _asymmetric(census: Census, config: QuantConfig) -> Iterator[str]:
    if config.method == "gptq" and config.sym is False:
        yield "sym=false: vLLM's GPTQ takes symmetric weights only"


def _act_order(census: Census, config: QuantConfig) -> Iterator[str]:
    grouped = any(m.group_size not in (None, m.K) for m in census.modules)
    if config.method in ("gptq", "auto-round") and config.desc_act and grouped:
        yield "desc_act=true with groups: no longer supported, even when the act-order is trivial"
    if config.method == "compressed-tensors" and any("weight_g_idx" in m.tensors for m in census.modules):
        yield "actorder group or dynamic (weight_g_idx): no longer supported"


def _group_sizes(census: Census, config: QuantConfig) -> Iterator[str]:
    sizes = {-1 if m.group_size == m.K else m.group_size for m in census.modules if m.group_size}
    odd = sorted(sizes - set(GROUP_SIZES))
    if odd and config.method != "awq":
        yield f"group size {', '.join(map(str, odd))}: its kernels take -1, 32, 64 and 128"
    short = [m.name for m in census.modules if m.group_size and m.K % m.group_size]
    if short:
        yield f"a short last group ({_some(short)})"


def _missing_zeros(census: Census, config: QuantConfig) -> Iterator[str]:
    bare = [m.name for m in census.modules if m.format == "awq" and "qzeros" not in m.tensors]
    if bare:
        yield f"AWQ without qzeros: vLLM leaves zero points uninitialised ({_some(bare)})"


def _mixed(census: Census, config: QuantConfig) -> Iterator[str]:
    packed = {m.name for m in census.modules}
    other = {*census.plain_layers, *(m.name for m in census.other_width)}
    for name in sorted(packed):
        parent, _, last = name.rpartition(".")
        for together in FUSED:
            for sibling in together if last in together else ():
                if f"{parent}.{sibling}" in other:
                    yield f"packed and other weights in what vLLM makes one layer ({last} and {sibling} of {parent})"
                    return


def _skip_lists(census: Census, config: QuantConfig) -> Iterator[str]:
    skipped = config.raw.get("modules_to_not_convert") or []
    hit = [m.name for m in census.modules if config.method == "awq" and any(str(s) in _asked(m) for s in skipped)]
    if hit:
        yield f"modules_to_not_convert matches packed layers, as a part of their names ({_some(hit)})"
    listed = config.raw.get("modules_in_block_to_quantize") or []
    flat = [str(n) for entry in listed for n in (entry if isinstance(entry, list) else [entry])]
    missed = [m.name for m in census.modules if flat and _asked(m) == m.name and not any(n in m.name for n in flat)]
    if config.method == "gptq" and missed:
        yield f"modules_in_block_to_quantize leaves out packed layers ({_some(missed)})"


def _asked(module: Module) -> str:
    """The name under which lists are asked about a module: all experts of a layer share the layer's."""
    layer, experts, _ = module.name.rpartition(".experts.")
    return f"{layer}.experts" if experts else module.name


def _head(census: Census, config: QuantConfig) -> Iterator[str]:
    for module in (*census.modules, *census.other_width):
        if module.name.rpartition(".")[2] == "lm_head" and module.N % VOCABULARY:
            yield f"a packed head of {module.N} columns, which vLLM pads to a multiple of {VOCABULARY} and cannot load"


def _experts(census: Census, config: QuantConfig) -> Iterator[str]:
    layers = {m.name.rpartition(".experts.")[0] for m in census.modules if ".experts." in m.name}
    plain = [name for name in census.plain_layers if ".experts." in name and name.rpartition(".experts.")[0] in layers]
    if plain:
        yield f"experts that stayed plain among packed ones ({_some(plain)})"
    whole = [m.name for m in census.modules if m.experts is not None]
    fused = [m.name for m in census.modules if ".experts." in m.name and m.name.endswith((".gate_up_proj", ".w13"))]
    if whole or fused:
        what = "packed experts as stacks" if whole else "gate and up of packed experts in one"
        yield f"{what}: it reads one projection of one expert at a time ({_some(whole or fused)})"


Rule = Callable[[Census, QuantConfig], Iterator[str]]
_RULES: tuple[Rule, ...] = (
    _stated,
    _layout,
    _packing,
    _asymmetric,
    _act_order,
    _group_sizes,
    _missing_zeros,
    _mixed,
    _skip_lists,
    _head,
    _experts,
)


def _by_format(modules: tuple[Module, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for module in modules:
        found.setdefault(module.format, []).append(module.name)
    return found


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
