"""What ``config.json`` must say for a checkpoint that was written, in the words of the tools that read the format.

Every function takes the layers that were written and the names of plain layers (a 2-D ``.weight`` that stays as it
was), and raises UnsupportedError when the format has no words for the mixture.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from w4plugin.errors import UnsupportedError
from w4plugin.formats.format import Layer

PRODUCER = "w4plugin"
HEAD = "lm_head"


def gptq(version: str, layers: Sequence[Layer], plain: Sequence[str]) -> dict[str, Any]:
    """GPTQModel's and AutoGPTQ's keys; ``version`` is "gptq" or "gptq_v2"."""
    size = _usual_size(layers)
    names = [layer.name for layer in layers]
    dynamic: dict[str, dict[str, Any]] = {}
    for other in sorted({layer.stated_size for layer in layers} - {size}):
        for pattern in patterns([layer.name for layer in layers if layer.stated_size == other], names):
            dynamic[f"+:{pattern}"] = {"group_size": other}
    for pattern in patterns(_mistakable(names, plain), names):
        dynamic[f"-:{pattern}"] = {}
    config: dict[str, Any] = {
        "bits": 4,
        "checkpoint_format": version,
        "desc_act": any(layer.desc_act for layer in layers),
        "format": version,
        "group_size": size,
        "lm_head": _has_head(names),
        "meta": {"packer": PRODUCER},
        "method": "gptq",
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": all(layer.sym for layer in layers),
    }
    return {**config, "dynamic": dynamic} if dynamic else config


def awq(layers: Sequence[Layer], plain: Sequence[str]) -> dict[str, Any]:
    """AutoAWQ's keys. One group size serves all layers, and skipped names match as substrings.

    Every plain layer is listed: transformers makes each Linear that is not a packed one, a vision tower's included, and
    vLLM looks for plain layers itself only where the list is empty.

    Raises:
        UnsupportedError: layers differ in group size, or the name of a plain layer that readers would take for a packed
            one is part of a packed one's.
    """
    sizes = Counter(layer.stated_size for layer in layers)
    if len(sizes) > 1:
        raise UnsupportedError(
            "awq",
            got=f"layers with group sizes {sorted(sizes)}",
            wanted="one, since its config holds one",
            todo="use gptq_v2",
        )
    names = [layer.name for layer in layers]
    packed, needed = "\n".join(names), set(_mistakable(names, plain))
    skipped = []
    for skip in sorted(set(plain) - set(names)):
        if skip not in packed:
            skipped.append(skip)
        elif skip in needed:
            hit = next(name for name in names if skip in name)
            raise UnsupportedError(
                "awq",
                got=f"plain {skip} beside packed {hit}",
                wanted="names that a substring can tell apart",
                todo="use gptq_v2",
            )
    config: dict[str, Any] = {
        "bits": 4,
        "group_size": _usual_size(layers),
        "modules_to_not_convert": skipped or None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }
    return {**config, "lm_head": True} if _has_head(names) else config


def auto_round(layers: Sequence[Layer], plain: Sequence[str]) -> dict[str, Any]:
    """AutoRound's keys for true zeros (``packing_format: auto_round``)."""
    size = _usual_size(layers)
    names = [layer.name for layer in layers]
    extra: dict[str, dict[str, Any]] = {}
    for other in sorted({layer.stated_size for layer in layers} - {size}):
        for pattern in patterns([layer.name for layer in layers if layer.stated_size == other], names):
            extra[pattern] = {"bits": 4, "group_size": other}
    for pattern in patterns(plain, names):  # all of them: its readers take every other Linear for a packed one
        extra[pattern] = {"bits": 16, "data_type": "float"}
    if _has_head(names):
        extra[HEAD] = {"bits": 4, **extra.get(HEAD, {})}
    config: dict[str, Any] = {
        "bits": 4,
        "data_type": "int",
        "group_size": size,
        "packing_format": "auto_round",
        "quant_method": "auto-round",
        "sym": all(layer.sym for layer in layers),
    }
    return {**config, "extra_config": extra} if extra else config


def compressed_tensors(layers: Sequence[Layer], plain: Sequence[str]) -> dict[str, Any]:
    """compressed-tensors' keys: one config group for each mixture of group size, symmetry and act-order."""
    names = [layer.name for layer in layers]
    kinds = Counter((layer.stated_size, layer.sym, layer.desc_act) for layer in layers)
    groups: dict[str, Any] = {}
    for i, ((size, sym, desc_act), _) in enumerate(kinds.most_common()):
        own = [x.name for x in layers if (x.stated_size, x.sym, x.desc_act) == (size, sym, desc_act)]
        groups[f"group_{i}"] = {
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            # readers prefer a name or regex to a class, so the commonest kind may be every Linear
            "targets": ["Linear"] if i == 0 else [f"re:{p}" for p in patterns(own, names)],
            "weights": {
                "actorder": "group" if desc_act else None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None if size == -1 else size,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "channel" if size == -1 else "group",
                "symmetric": sym,
                "type": "int",
            },
        }
    ignore = [f"re:{p}" if _is_pattern(p) else _unescape(p) for p in patterns(plain, names)]
    return {
        "config_groups": groups,
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def patterns(names: Iterable[str], among: Iterable[str]) -> list[str]:
    """Anchored regexes that match ``names`` and nothing else of ``among``.

    A name's numbers become ``\\d+`` where that hits no other name, so that a model with many layers gets one line.
    """
    wanted = set(names)
    others: dict[str, int] = Counter(_template(name) for name in set(among) - wanted)
    found = {_template(n) if _template(n) not in others else re.escape(n) for n in wanted}
    return sorted(f"{p}$" for p in found)


def _template(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", r"\\d+", re.escape(name).replace(r"\.", ".")).replace(".", r"\.")


def _is_pattern(pattern: str) -> bool:
    return r"\d+" in pattern


def _unescape(pattern: str) -> str:
    return re.sub(r"\\(.)", r"\1", pattern.removesuffix("$"))


def _usual_size(layers: Sequence[Layer]) -> int:
    """The commonest group size; of equally common ones the smallest, so that the choice depends on nothing else."""
    counts = Counter(layer.stated_size for layer in layers)
    return min(counts, key=lambda size: (-counts[size], size))


def _has_head(names: Iterable[str]) -> bool:
    return any(name.rpartition(".")[2] == HEAD for name in names)


def _mistakable(names: Iterable[str], plain: Iterable[str]) -> list[str]:
    """Plain layers that a reader would take for packed ones: the last part of their name is that of a packed layer."""
    packed = set(names)
    leaves = {name.rpartition(".")[2] for name in packed}
    return [name for name in plain if name.rpartition(".")[2] in leaves and name not in packed]
