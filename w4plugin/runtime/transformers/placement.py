"""Which module of a Transformers model each packed module of a checkpoint is, and what fits nowhere.

Transformers renames tensors while it loads (older checkpoints of multimodal models, a base model's prefix), and keeps
the experts of most mixture models as two 3-D parameters of one module; packed ones take that module's place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.pytorch_utils import Conv1D

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats import other_widths
from w4plugin.formats.census import Census
from w4plugin.formats.format import Module
from w4plugin.runtime.messages import PLAIN_COPY
from w4plugin.runtime.mixture import Mixture, layer_of
from w4plugin.runtime.part import Part

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Place:
    """A module of the model and the packed module of the checkpoint that goes there.

    Attributes:
        name: in the model.
        module: of the checkpoint.
        K, N: the architecture's.
        bias: whether the architecture has one.
    """

    name: str
    module: Module
    K: int
    N: int
    bias: bool


@dataclass(frozen=True)
class Layer:
    """A module of the model that holds a layer's experts, and the packed modules of the checkpoint that go there.

    Attributes:
        name: in the model.
        modules: of the checkpoint, by their names below the layer, "3.gate_proj".
        words: names of gate, up and down there.
    """

    name: str
    modules: Mapping[str, Module]
    words: tuple[str, str, str]


def mixtures(model: Any, census: Census) -> list[Layer]:
    """The layers of experts that are packed one projection at a time, where the model holds them as one module.

    Raises:
        CorruptError: an expert is missing, of another size than the others', or one too many.
        UnsupportedError: experts in other forms, of other widths, plain ones among them, or in different groups.
    """
    rename = Renaming(model)
    layers: dict[str, dict[str, tuple[str, Module | None]]] = {}
    found: list[tuple[str, Module | None]] = [(m.name, m) for m in (*census.modules, *census.other_width)]
    for module, packed in (*found, *((name, None) for name in census.plain_layers)):
        for candidate in rename.candidates(module) if rename(module) is None else ():
            layer = layer_of(candidate)
            if layer in rename.names:
                layers.setdefault(layer, {})[candidate.removeprefix(f"{layer}.")] = (module, packed)
                break
    return [_layer(model, name, held) for name, held in layers.items() if any(m for _, m in held.values())]


def _layer(model: Any, name: str, held: Mapping[str, tuple[str, Module | None]]) -> Layer:
    for own, module in held.values():
        if module is None or module.bits != 4:
            raise UnsupportedError(
                own,
                got="a plain weight" if module is None else f"a weight of {module.bits} bits",
                wanted="4 bits, as in the layer's other experts",
                todo=PLAIN_COPY,
            )
    modules = {below: module for below, (_, module) in held.items() if module is not None}
    mixture = Mixture(name, {below: Part(module.name, "int4", module) for below, module in modules.items()})
    table = mixture.table()
    words = tuple(table.get((0, shard), "").partition(".")[2] for shard in ("w1", "w3", "w2"))
    if len(set(words)) != 3 or "" in words:
        first = next(iter(modules.values()))
        raise UnsupportedError(
            first.name,
            got=f"experts of {type(model).__name__} packed as stacks, or with gate and up in one",
            wanted="one packed module a projection and expert",
            todo=PLAIN_COPY,
        )
    mixture.check(getattr(model.get_submodule(name), "num_experts", None), "refuse")
    return Layer(name, modules, words)  # type: ignore[arg-type]


def places(model: Any, census: Census, elsewhere: frozenset[str] = frozenset()) -> list[Place]:
    """Where each packed module goes.

    Args:
        elsewhere: checkpoint names of modules that go into layers of experts.

    Raises:
        UnsupportedError: a width that cannot be made plain, or a module that is no Linear.
        CorruptError: the architecture has no such module, or a layer has neither a packed weight nor a plain one.
    """
    rename = Renaming(model)
    found: list[Place] = []
    for module in (*census.modules, *census.other_width):
        if module.name in elsewhere:
            continue
        name = rename(module.name)
        if name is None:
            if _ignored(model, module.name):
                continue
            raise _nowhere(model, module)
        if module.bits != 4 and module.format not in other_widths.READABLE:
            raise UnsupportedError(
                module.name,
                got=f"{module.bits} bits in {module.format}",
                wanted="4 bits, or another width in GPTQ's layout",
                todo="load it with the tool that made it",
            )
        linear = model.get_submodule(name)
        K, N, bias = _shape(linear, module)
        found.append(Place(name, module, K, N, bias))
    if not elsewhere and not any(place.module.bits == 4 for place in found):
        raise UnsupportedError(
            getattr(model.config, "_name_or_path", "") or "checkpoint",
            got="no module packed in 4 bits",
            wanted="a 4-bit checkpoint",
            todo="load it without w4plugin",
        )
    plain = {name for name in map(rename, census.plain_layers) if name is not None}
    _require_weights(model, {place.name for place in found}, plain)
    return found


class Renaming:
    """Checkpoint names of modules -> names in the model, as the host's loader renames their tensors."""

    def __init__(self, model: Any) -> None:
        self.names = {name for name, _ in model.named_modules()}
        self.renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
        self.prefix = getattr(model, "base_model_prefix", "") or ""

    def __call__(self, name: str) -> str | None:
        """The module's name in the model, None when it has none."""
        return next((candidate for candidate in self.candidates(name) if candidate in self.names), None)

    def candidates(self, name: str) -> Iterator[str]:
        """What the host's loader might make of a name."""
        tensor = f"{name}.weight"  # renamings speak of tensors
        for renaming in self.renamings:
            tensor = renaming.rename_source_key(tensor)[0]
        for known in (tensor.rpartition(".")[0], name):
            yield known
            if self.prefix:
                yield f"{self.prefix}.{known}"
                yield known.removeprefix(f"{self.prefix}.")


def untie(model: Any, packed: Iterable[str]) -> list[str]:
    """A packed head of its own is used even where config.json calls it tied to the embedding; returns such heads."""
    heads = []
    packed = set(packed)
    for submodel in model.modules():
        tied: Mapping[str, str] = getattr(submodel, "all_tied_weights_keys", None) or {}
        prefix = next((name for name, module in model.named_modules() if module is submodel), "")
        for target, source in dict(tied).items():
            owners = {f"{prefix}.{key}".lstrip(".").rpartition(".")[0] for key in (target, source)}
            if owners & packed:
                del submodel.all_tied_weights_keys[target]
                heads += sorted(owners & packed)
    if heads:
        for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False
    return list(dict.fromkeys(heads))


def _shape(linear: torch.nn.Module, module: Module) -> tuple[int, int, bool]:
    if isinstance(linear, Conv1D):
        return linear.nx, linear.nf, True
    if isinstance(linear, torch.nn.Linear):
        return linear.in_features, linear.out_features, linear.bias is not None
    raise UnsupportedError(
        module.name,
        got=f"a {type(linear).__name__} packed in {module.bits} bits",
        wanted="a Linear",
        todo=PLAIN_COPY,
    )


def _nowhere(model: Any, module: Module) -> CorruptError | UnsupportedError:
    model_type = getattr(model.config, "model_type", type(model).__name__)
    if ".experts." in f"{module.name}." or module.experts is not None:
        return UnsupportedError(
            module.name,
            got=f"experts packed in {module.bits} bits, which Transformers keeps as one 3-D tensor in {model_type}",
            wanted="experts that are Linear modules of their own",
            todo=f"{PLAIN_COPY}; the checkpoint itself is fine",
        )
    return CorruptError(
        module.name,
        got=f"a packed module that {type(model).__name__} does not have",
        wanted="a name of one of its Linear modules",
        todo="config.json is of another model, or this class fuses or renames the layer",
    )


def _ignored(model: Any, name: str) -> bool:
    """The host leaves some tensors out on purpose, such as the extra layers of multi-token prediction."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, f"{name}.weight") for pattern in patterns)


def _require_weights(model: Any, packed: set[str], plain: set[str]) -> None:
    """A layer whose siblings are packed has a weight too; the host would fill a missing one with noise."""
    kinds = {_NUMBER.sub(".*", name) for name in packed}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in packed | plain and _NUMBER.sub(".*", name) in kinds:
            raise CorruptError(
                name,
                got="no tensors for this layer",
                wanted="its packed weight, as in the other layers",
                todo="config.json asks for more layers than the checkpoint has",
            )
