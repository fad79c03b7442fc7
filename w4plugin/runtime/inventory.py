"""What a checkpoint holds, under the names that a host gives its layers; no host is imported.

The checkpoint's headers say which modules are packed and which are plain; hosts name layers after their own model code
(``language_model.model.layers.0...``) and fuse some (``qkv_proj`` of q, k and v). An inventory keeps the first under
the names of the second. It travels to every worker process with the quantisation config, so it holds headers only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.pickled import TORCH_DTYPE
from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats import other_widths
from w4plugin.formats.format import Module
from w4plugin.quant_config import QuantConfig
from w4plugin.runtime import mixture
from w4plugin.runtime.messages import OTHER_MODEL
from w4plugin.runtime.mixture import Mixture
from w4plugin.runtime.part import Kind, Part
from w4plugin.runtime.transfer import Later

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_LAYER = re.compile(r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")


@dataclass
class Inventory:
    """A checkpoint's modules by the host's names.

    Attributes:
        model: folder or hub id, as the host was given it.
        revision: of a hub id.
        cache: where the host keeps what it downloads, None for the usual place.
        remote: the weights are still on the hub.
        config: what the checkpoint's config files say.
        parts: by the host's name, the packed modules and the plain weights.
        biases: checkpoint names of the modules that have a ``bias`` in the file.
        mixed_experts: what becomes of layers whose experts are not all packed, "refuse" or "dequantize".
        later: of the layers that are being filled, one after the other.
    """

    model: str
    revision: str | None
    cache: str | None
    remote: bool
    config: QuantConfig
    parts: dict[str, Part] = field(default_factory=dict)
    biases: frozenset[str] = frozenset()
    mixed_experts: str = "refuse"
    later: Later = field(default_factory=Later, repr=False, compare=False)

    @classmethod
    def of(cls, checkpoint: Checkpoint, model: str, revision: str | None, cache: str | None) -> Self:
        """What :func:`opened` has found, by the file's own names."""
        found = cls(model, revision, cache, bool(checkpoint.source.remote), checkpoint.quant_config)
        found.biases = frozenset(n.removesuffix(".bias") for n in checkpoint.headers if n.endswith(".bias"))
        census = checkpoint.census
        kinds: list[tuple[Kind, tuple[Module, ...]]] = [("int4", census.modules), ("wide", census.other_width)]
        for kind, modules in kinds:
            for module in modules:
                names = {suffix: name for suffix, name in module.tensors.items() if suffix != "bias"}
                dtypes = {suffix: TORCH_DTYPE[checkpoint.headers[name].dtype] for suffix, name in names.items()}
                found.parts[module.name] = Part(module.name, kind, module, dtypes=dtypes)
        for name, header in checkpoint.headers.items():
            owner, _, suffix = name.rpartition(".")
            stack = len(header.shape) == 3 and mixture.layer_of(owner if suffix == "weight" else name) is not None
            if suffix == "weight" and owner not in found.parts and (len(header.shape) == 2 or stack):
                dtypes = {"weight": TORCH_DTYPE[header.dtype]}
                found.parts[owner] = Part(owner, "plain", shape=tuple(header.shape), dtypes=dtypes)
            elif stack and suffix in mixture.SHARDS:  # a parameter of its own, as newer models keep plain experts
                found.parts[name] = Part(name, "plain", shape=tuple(header.shape))
        return found

    def rename(self, mapper: Any) -> None:
        """Give the modules the names that a model's weight mapper gives their tensors."""
        self.parts = {_renamed(mapper, name): part for name, part in self.parts.items()}

    def of_layer(self, prefix: str, packed: Mapping[str, list[str]]) -> list[Part]:
        """The weights of one layer, in the order in which the layer fuses them.

        Args:
            prefix: the host's name of the layer.
            packed: its ``packed_modules_mapping``, "qkv_proj" -> ["q_proj", "k_proj", "v_proj"].
        """
        if prefix in self.parts:
            return [self.parts[prefix]]
        parent, _, last = prefix.rpartition(".")
        names = [f"{parent}.{name}" if parent else name for name in packed.get(last, [])]
        found = [self.parts.get(name, Part(name, "absent")) for name in names]
        return found if any(part.kind != "absent" for part in found) else []

    def expects(self, prefix: str) -> bool:
        """True when other layers of this kind (same name, other number) are packed in the checkpoint."""
        pattern = _NUMBER.sub(".*", prefix)
        return any(part.kind == "int4" and _NUMBER.sub(".*", name) == pattern for name, part in self.parts.items())

    def packed_layer(self, prefix: str, packed: Mapping[str, list[str]]) -> list[Part]:
        """As :meth:`of_layer` where any of the weights is packed; empty for a plain layer, which stays the host's.

        Raises:
            CorruptError: the checkpoint has nothing for the layer, and packed weights for others of its kind.
        """
        parts = self.of_layer(prefix, packed)
        if not parts and self.expects(prefix):
            raise CorruptError(
                prefix,
                got="no tensors for this layer",
                wanted="its packed weight, as in the other layers",
                todo="config.json asks for more layers than the checkpoint has",
            )
        return parts if any(part.module is not None for part in parts) else []

    def packed_under(self, prefix: str) -> list[str]:
        """Checkpoint names of the packed modules below a module of the host."""
        return [p.name for n, p in self.parts.items() if p.module is not None and n.startswith(prefix + ".")]

    def mixture(self, prefix: str) -> Mixture | None:
        """The experts of a layer, None when the checkpoint has none for it."""
        parts = {n.removeprefix(f"{prefix}."): p for n, p in self.parts.items() if n.startswith(f"{prefix}.")}
        return Mixture(prefix, parts) if parts else None

    def expects_experts(self, prefix: str) -> bool:
        """True when other layers of this kind have packed experts in the checkpoint."""
        pattern = _NUMBER.sub(".*", prefix)
        return any(m.packed and _NUMBER.sub(".*", m.layer) == pattern for m in mixture.mixtures(self.parts))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor of the file, by its full name there."""
        key = (self.model, self.revision, self.cache)
        return (_OPENED.get(key) or opened(*key)).tensor(name)

    def nonzero_biases(self, names: Iterable[str]) -> list[str]:
        """Those of the modules (checkpoint names) whose bias in the file is not all zero."""
        return [name for name in names if name in self.biases and bool(self.tensor(f"{name}.bias").any())]

    def untie(self, hf_config: Any, logger: logging.Logger) -> None:
        """A packed head of its own is served even where config.json calls it tied to the embedding."""
        configs = (hf_config, getattr(hf_config, "text_config", None))
        tied = [config for config in configs if getattr(config, "tie_word_embeddings", False)]
        head = next((part for name, part in self.parts.items() if name.endswith("lm_head")), None)
        if tied and head is not None and head.module is not None:
            logger.warning(
                "%s: the file has a packed head, which is used although config.json says tie_word_embeddings",
                head.name,
            )
            for config in tied:
                config.tie_word_embeddings = False

    def ranks_of_an_expert(self) -> int:
        """How many ranks share each expert."""
        return 1

    def refuse_what_cannot_be_served(self, hf_config: Any) -> None:
        """What the headers alone rule out, before an engine starts.

        Raises:
            UnsupportedError: no 4-bit module at all, a width that cannot be made plain, or experts that cannot
                run together.
            CorruptError: more layers or experts than config.json has, or a missing expert.
        """
        if not any(part.kind == "int4" for part in self.parts.values()):
            raise UnsupportedError(
                self.model,
                got="no module packed in 4 bits",
                wanted="a 4-bit checkpoint",
                todo="serve it without w4plugin",
            )
        for part in self.parts.values():
            if part.kind == "wide" and part.module is not None and part.module.format not in other_widths.READABLE:
                raise UnsupportedError(
                    part.name,
                    got=f"{part.module.bits} bits in {part.module.format}",
                    wanted="4 bits, or another width in GPTQ's layout",
                    todo="serve it with a method that has kernels for that width",
                )
        for layer in mixture.mixtures(self.parts):
            if layer.packed:
                layer.check(mixture.stated_count(hf_config), self.mixed_experts, self.ranks_of_an_expert())
        self._refuse_more_layers(hf_config)

    def _refuse_more_layers(self, hf_config: Any) -> None:
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        layers = getattr(text, "num_hidden_layers", None)
        if not isinstance(layers, int):
            return
        layers += getattr(text, "num_nextn_predict_layers", None) or 0
        for part in self.parts.values():
            found = _LAYER.match(part.name)
            if part.module is not None and found is not None and int(found[1]) >= layers:
                raise CorruptError(
                    part.name,
                    got=f"a layer {found[1]}",
                    wanted=f"the {layers} layers of config.json",
                    todo=OTHER_MODEL,
                )


_OPENED: dict[tuple[str, str | None, str | None], Checkpoint] = {}
"""What this process has opened last; it holds no data. Worker processes get an inventory and open for themselves."""


def opened(model: str, revision: str | None, cache: str | None) -> Checkpoint:
    """A checkpoint as it is now; nothing is downloaded of what the host is about to download."""
    _OPENED.clear()
    found = Checkpoint.open(model, revision=revision, cache_dir=cache, headers_only=True)
    _OPENED[model, revision, cache] = found
    return found


def _renamed(mapper: Any, name: str) -> str:
    """Mappers speak of tensors ("lm_head." -> "language_model.lm_head."), so a tensor of the module is renamed."""
    renamed = mapper.apply_list([f"{name}.weight"])
    return renamed[0].rpartition(".")[0] if renamed else name
