"""What this vLLM would do with a checkpoint by itself: refuse it, misread it, or serve it rightly.

vLLM is asked where it can be asked (its config classes, its kernels' own conditions); the rest are the cases that its
loaders get wrong without a word, found by comparing the config with the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from w4plugin.checkpoint.vllm_verdict import FUSED, LAYOUTS, VOCABULARY
from w4plugin.formats.format import Module
from w4plugin.quant_config import QuantConfig
from w4plugin.runtime import mixture
from w4plugin.runtime.vllm import versions
from w4plugin.runtime.vllm.inventory import Inventory

ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "wo", "w2", "c_proj", "dense", "dense_4h_to_h", "fc2")
"""Last names of layers that tensor parallelism cuts along K."""

SEVENS, EIGHTS = 0x77777777, 0x88888888 - (1 << 32)
"""Words of zero points of a symmetric module, in either convention, as int32."""

SAMPLE = 8
"""Modules judged while the weights are still on the hub, one request each: tools act-order and centre all or none."""


def refuses_config(hf_quant_cfg: Mapping[str, Any], config: QuantConfig) -> str | None:
    """Why vLLM would not take a checkpoint with this config, None if it would."""
    from vllm.model_executor.layers import quantization

    if not has_int4_kernels():
        return "this CPU build of vLLM has no INT4 kernels"
    method = {"auto-round": "inc"}.get(config.method or "", config.method or "")
    try:
        quantization.get_quantization_config(method).from_config(dict(hf_quant_cfg))
    except (ValueError, AssertionError, KeyError, NotImplementedError, TypeError) as error:
        return f"vLLM {versions.version()} refuses it ({_first_line(error)})"
    return None


def has_int4_kernels() -> bool:
    """False on a CPU for which vLLM's build has none; it would fail at the first step."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu() or hasattr(torch.ops._C, "cpu_gemm_wna16")


def misreads(config: QuantConfig, inventory: Inventory) -> str | None:
    """Why vLLM would fail on, or misread, a checkpoint whose config it takes; None if it would not."""
    modules = {name: part.module for name, part in inventory.parts.items() if part.kind == "int4" and part.module}
    for rule in _RULES:
        reason = next(rule(config, inventory, modules), None)
        if reason is not None:
            return reason
    return None


Rule = Callable[[QuantConfig, Inventory, Mapping[str, Module]], Iterator[str]]


def _layout(config: QuantConfig, inventory: Inventory, modules: Mapping[str, Module]) -> Iterator[str]:
    for name, module in modules.items():
        if module.format not in LAYOUTS.get(config.method or "", ()):
            yield f"vLLM does not read {module.format} ({name})"


def _asymmetry(config: QuantConfig, inventory: Inventory, modules: Mapping[str, Module]) -> Iterator[str]:
    """Where the config says symmetric, vLLM's GPTQ loader never looks at the zero points."""
    if config.method not in ("gptq", "auto-round") or not config.sym:
        return
    for name, module in _read(inventory, modules):
        if "qzeros" in module.tensors and module.format != "awq":
            stored = inventory.tensor(module.tensors["qzeros"])
            symmetric = (stored == SEVENS) | (stored == EIGHTS)
            if not bool(symmetric.all()):
                yield f"its config says symmetric, its zero points are not ({name})"


def _read(inventory: Inventory, modules: Mapping[str, Module]) -> Iterator[tuple[str, Module]]:
    """The modules whose small tensors are looked at: all on the disk, the first few on the hub."""
    yield from islice(modules.items(), SAMPLE if inventory.remote else None)


def _missing_zeros(config: QuantConfig, inventory: Inventory, modules: Mapping[str, Module]) -> Iterator[str]:
    for name, module in modules.items():
        if module.format == "awq" and "qzeros" not in module.tensors:
            yield f"vLLM leaves zero points uninitialised that an AWQ file does not hold ({name})"


def _act_order(config: QuantConfig, inventory: Inventory, modules: Mapping[str, Module]) -> Iterator[str]:
    """g_idx is ignored when the config denies act-order, and by newer versions altogether."""
    if config.desc_act and not versions.drops_g_idx():
        return
    for name, module in _read(inventory, modules):
        suffix = next((s for s in ("g_idx", "weight_g_idx") if s in module.tensors), None)
        if suffix is None or module.group_size is None:
            continue
        g_idx = inventory.tensor(module.tensors[suffix]).long()
        trivial = torch.arange(g_idx.numel()) // module.group_size
        if bool((g_idx >= 0).all()) and not torch.equal(g_idx, trivial):
            yield f"vLLM would ignore its act-order ({name})"


def _kernels(config: QuantConfig, inventory: Inventory, modules: Mapping[str, Module]) -> Iterator[str]:
    """A group size or a row shard that no kernel of vLLM's takes. N is not asked about: vLLM pads it."""
    ranks = versions.tensor_parallel_size()
    zero_points = config.sym is False and config.method != "gptq"
    asked: set[tuple[int, int]] = set()
    for name, module in modules.items():
        size = module.group_size or module.K
        stated = config.for_module(name).group_size
        group = -1 if stated is None and size == module.K else stated or size  # vLLM believes the config
        if size != (module.K if group == -1 else group):
            yield f"its config says groups of {group}, its tensors hold groups of {size} ({name})"
        if mixture.layer_of(name) is not None:
            yield from _named(_of_an_expert(module, group), name)
            continue
        rows = module.K // ranks if name.rpartition(".")[2] in ROW_PARALLEL else module.K
        if module.K % ranks == 0 and group != -1 and rows % size:
            yield f"{rows} rows on each of {ranks} ranks are no multiple of its groups of {size} ({name})"
        if (rows, group) not in asked:
            asked.add((rows, group))
            if config.method != "compressed-tensors":
                yield from _named(versions.marlin_refuses(4, group, zero_points), name)
            if config.method != "awq":  # AWQ has kernels of its own besides
                against = versions.linear_kernels(rows, 4096, group, zero_points, torch.float16)
                yield from _named(against[0] if against else None, name)


def _of_an_expert(module: Module, group: int) -> str | None:
    """Why neither of vLLM's kernels for experts takes this one; the second halves groups that do not divide."""
    down = module.name.rpartition(".")[2] in ROW_PARALLEL
    hidden, inner = (module.N, module.K) if down else (module.K, module.N)
    inner //= versions.ranks_of_an_expert()
    if group != -1 and module.K % group:
        return "vLLM takes no experts with a short last group"
    if versions.marlin_takes_experts(hidden, inner, group):
        return None
    size = group
    while size > 0 and (hidden % size or inner % size):
        size //= 2
    if size < 32:
        return f"{hidden} and {inner} rows in groups of {group} fit neither of vLLM's kernels for experts"
    return None


def _experts(config: QuantConfig, inventory: Inventory, modules: Mapping[str, Module]) -> Iterator[str]:
    """How vLLM's loaders find experts: one tensor a projection and expert, all of one kind, under its model's names."""
    for layer in mixture.mixtures(inventory.parts):
        if not layer.packed:
            continue
        name = next(part.name for part in layer.parts.values())
        if inventory.renames:
            yield f"vLLM's model reads its experts under other names ({name})"
        if layer.strangers:
            yield f"not all experts of a layer are packed ({layer.strangers[0].name})"
        places = [layer.place(known) for known in layer.parts]
        if any(place.expert is None or len(place.shards) > 1 for place in places):
            yield f"vLLM reads packed experts one projection at a time ({name})"


def _other_widths(config: QuantConfig, inventory: Inventory, modules: Mapping[str, Module]) -> Iterator[str]:
    for part in inventory.parts.values():
        if part.kind == "wide" and part.module is not None:
            size = part.module.group_size or part.module.K
            group = -1 if size == part.module.K else size
            yield from _named(versions.marlin_refuses(part.module.bits, group, False), part.name)


def _named(reason: str | None, name: str) -> Iterator[str]:
    if reason is not None:
        yield f"{reason} ({name})"


def _skip_lists(config: QuantConfig, inventory: Inventory, modules: Mapping[str, Module]) -> Iterator[str]:
    """vLLM lets the config decide which layers are packed, and fails when the file disagrees."""
    skipped = config.raw.get("modules_to_not_convert") or []
    listed = config.raw.get("modules_in_block_to_quantize") or []
    listed = [n for entry in listed for n in (entry if isinstance(entry, list) else [entry])]
    for name in modules:
        layer = mixture.layer_of(name)  # vLLM asks about all experts at once, and GPTQ's list is not asked about them
        if config.method == "awq" and any(entry in (layer or name) for entry in skipped):
            yield f"its modules_to_not_convert hits a packed layer ({name})"
        if config.method == "gptq" and layer is None and listed and not any(entry in name for entry in listed):
            yield f"its modules_in_block_to_quantize omits a packed layer ({name})"


def _mixed(config: QuantConfig, inventory: Inventory, modules: Mapping[str, Module]) -> Iterator[str]:
    for name in modules:
        parent, _, last = name.rpartition(".")
        for together in FUSED:
            for other in together if last in together else ():
                part = inventory.parts.get(f"{parent}.{other}")
                if part is not None and part.kind != "int4":
                    yield f"{parent} has packed and other weights in one layer of vLLM ({last} and {other})"


def _head(config: QuantConfig, inventory: Inventory, modules: Mapping[str, Module]) -> Iterator[str]:
    for name, module in modules.items():
        if name.rpartition(".")[2] != "lm_head":
            continue
        if not config.raw.get("lm_head"):
            yield f"its head is packed although its config does not say so ({name})"
        if module.N % VOCABULARY:
            yield f"vLLM cannot load a packed head whose vocabulary it pads ({module.N})"


_RULES: tuple[Rule, ...] = (
    _layout,
    _missing_zeros,
    _skip_lists,
    _experts,
    _mixed,
    _head,
    _kernels,
    _other_widths,
    _asymmetry,
    _act_order,
)
"""Those that read tensors come last."""


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
