"""The experts of one layer: which weights of a checkpoint they are, and whether one call can run them all.

Checkpoints name them one by one, ``3.gate_proj``, ``3.up_proj`` and ``3.down_proj`` (w1, w3 and w2 in Mixtral's
words), with gate and up in one (``3.gate_up_proj``), or as stacks with a leading E (``gate_up_proj``). Quantisers leave
an expert in 16 bits when calibration never reached it; what becomes of its layer is the user's decision.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from w4plugin.errors import CorruptError, UnsupportedError, UsageError
from w4plugin.runtime.messages import OTHER_MODEL, PLAIN_COPY
from w4plugin.runtime.part import Part

VARIABLE = "W4PLUGIN_MIXED_EXPERTS"
POLICIES = ("refuse", "dequantize")

SHARDS = {
    "gate_proj": ("w1",),
    "w1": ("w1",),
    "up_proj": ("w3",),
    "w3": ("w3",),
    "down_proj": ("w2",),
    "w2": ("w2",),
    "gate_up_proj": ("w1", "w3"),
    "w13": ("w1", "w3"),
}
"""What a weight is to its expert, by its last name, in vLLM's words: w1 the gate, w3 up, w2 down."""

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys under which configs state how many experts a layer has."""

_NAME = re.compile(r"(.+\.experts)\.(?:(\d+)\.)?([^.]+)")


def policy() -> str:
    """The value of W4PLUGIN_MIXED_EXPERTS: "refuse" (default) or "dequantize"."""
    value = os.environ.get(VARIABLE, "refuse").lower()
    if value not in POLICIES:
        raise UsageError(VARIABLE, got=repr(value), wanted=" | ".join(POLICIES))
    return value


def stated_count(hf_config: Any) -> int | None:
    """Experts a layer by the model's config, None when it does not say."""
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    found = (getattr(text, key, None) for key in COUNTS)
    return next((count for count in found if isinstance(count, int) and count > 0), None)


def layer_of(name: str) -> str | None:
    """The layer of experts that a module belongs to, None when to none."""
    found = _NAME.fullmatch(name)
    return None if found is None else found[1]


def mixtures(parts: Mapping[str, Part]) -> list[Mixture]:
    """All layers of experts among a checkpoint's parts."""
    layers: dict[str, dict[str, Part]] = {}
    for name, part in parts.items():
        layer = layer_of(name)
        if layer is not None:
            layers.setdefault(layer, {})[name.removeprefix(f"{layer}.")] = part
    return [Mixture(layer, found) for layer, found in layers.items()]


class Place(NamedTuple):
    """What a weight is to its layer: of one expert (None: a stack of all), and its gate, up, down or two of them."""

    expert: int | None
    shards: tuple[str, ...]


@dataclass(frozen=True)
class Mixture:
    """The experts of one layer.

    Attributes:
        layer: its name, "model.layers.0.mlp.experts".
        parts: its weights, by their names below it, "3.w1" or "gate_up_proj".
    """

    layer: str
    parts: Mapping[str, Part]

    @property
    def packed(self) -> bool:
        """Whether any expert is packed in four bits."""
        return any(part.kind == "int4" for part in self.parts.values())

    @property
    def strangers(self) -> list[Part]:
        """Weights that are not packed in four bits, in a layer whose others are."""
        return [part for part in self.parts.values() if part.kind != "int4"] if self.packed else []

    def place(self, name: str) -> Place:
        """What a weight is to the layer.

        Raises:
            UnsupportedError: its name says nothing.
        """
        found = _NAME.fullmatch(f"{self.layer}.{name}")
        if found is None or found[3] not in SHARDS:
            where = self.parts[name].name if name in self.parts else f"{self.layer}.{name}"
            raise UnsupportedError(
                where, got="an expert's weight of this name", wanted=" | ".join(SHARDS), todo=PLAIN_COPY
            )
        return Place(None if found[2] is None else int(found[2]), SHARDS[found[3]])

    def experts_of(self, name: str) -> list[int]:
        """The experts whose weights a weight holds."""
        expert = self.place(name).expert
        return list(range(self.parts[name].experts or 0)) if expert is None else [expert]

    def table(self) -> dict[tuple[int, str], str]:
        """By expert and shard, the name of the weight that holds it.

        Raises:
            CorruptError: two weights hold one.
            UnsupportedError: a weight has a name that says nothing.
        """
        found: dict[tuple[int, str], str] = {}
        for name, part in self.parts.items():
            expert, shards = self.place(name)
            if (expert is None) != (part.experts is not None):
                wanted = "one weight" if part.experts is not None else "a stack of all experts"
                raise CorruptError(part.name, got=f"{part.experts or 'no'} experts in it", wanted=wanted)
            for e in self.experts_of(name):
                for shard in shards:
                    if (e, shard) in found:
                        other = self.parts[found[e, shard]].name
                        raise CorruptError(part.name, got=f"expert {e} twice", wanted=f"it here or in {other}")
                    found[e, shard] = name
        return found

    def check(self, count: int | None, mixed: str, ranks: int = 1) -> None:
        """What headers can tell against serving this layer.

        Args:
            count: experts a layer by the model's config.
            mixed: value of W4PLUGIN_MIXED_EXPERTS.
            ranks: how many share each expert.

        Raises:
            CorruptError: an expert or a weight is missing, of another size than the others', or one too many.
            UnsupportedError: experts that one call cannot run.
        """
        table = self.table()
        self._check_presence(table, count)
        self._check_sizes(table)
        inner = self.sizes()[1]
        if inner % ranks:
            raise UnsupportedError(
                next(part.name for part in self.parts.values()),
                got=f"{inner} inner features on {ranks} ranks",
                wanted="as many on each",
                todo="choose another --tensor-parallel-size, or --enable-expert-parallel, which keeps experts whole",
            )
        if self.strangers:
            self._check_strangers(mixed)
        else:
            self._check_groups(table)

    def _check_presence(self, table: Mapping[tuple[int, str], str], count: int | None) -> None:
        held = {e for e, _ in table}
        known = max(held) + 1
        if count is not None and known > count:
            extra = next(name for (e, _), name in table.items() if e >= count)
            raise CorruptError(
                self.parts[extra].name,
                got=f"an expert {max(held)}",
                wanted=f"the {count} experts of config.json",
                todo=OTHER_MODEL,
            )
        own = next(iter(self.parts.values())).name  # the checkpoint's own name for the layer
        layer = layer_of(own) or self.layer
        for e in range(count or known):
            if e not in held:
                raise CorruptError(f"{layer}.{e}", got="no tensors for this expert", wanted="every expert of the layer")
            for shard, what in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
                if (e, shard) not in table:
                    raise CorruptError(
                        f"{layer}.{e}", got=f"no {what} projection", wanted="gate, up and down of every expert"
                    )

    def _check_sizes(self, table: Mapping[tuple[int, str], str]) -> None:
        hidden, inner = self.sizes()
        for (e, shard), name in table.items():
            part = self.parts[name]
            n = part.N // len(self.place(name).shards)
            found, wanted = (n, part.K), (hidden, inner) if shard == "w2" else (inner, hidden)
            if found != wanted or part.N % len(self.place(name).shards):
                raise CorruptError(
                    part.name,
                    got=f"N = {part.N}, K = {part.K}",
                    wanted=f"expert {e} of the size of the others, {wanted[1]} in and {wanted[0]} out",
                )

    def sizes(self) -> tuple[int, int]:
        """Features of the layer, and inner ones of an expert, by the first down projection."""
        first = min((e, name) for (e, shard), name in self.table().items() if shard == "w2")[1]
        return self.parts[first].N, self.parts[first].K

    def _check_strangers(self, mixed: str) -> None:
        first = self.strangers[0]
        what = "a plain weight" if first.module is None else f"a weight packed in {first.module.bits} bits"
        if any(part.kind == "plain" and part.experts is not None for part in self.strangers):
            raise UnsupportedError(
                first.name, got="a plain stack beside packed experts", wanted="one kind of weights", todo=PLAIN_COPY
            )
        if mixed == "refuse":
            more = f" (and {len(self.strangers) - 1} more)" if len(self.strangers) > 1 else ""
            raise UnsupportedError(
                first.name,
                got=f"{what} among experts packed in 4 bits{more}",
                wanted="experts of one kind in a layer",
                todo=f"{VARIABLE}=dequantize serves all experts of such a layer as plain 16-bit weights",
            )

    def _check_groups(self, table: Mapping[tuple[int, str], str]) -> None:
        first: dict[bool, Part] = {}
        for (_, shard), name in sorted(table.items()):
            part = self.parts[name]
            if part.group_size is None:
                continue
            other = first.setdefault(shard == "w2", part)
            if part.group_size != other.group_size:
                raise UnsupportedError(
                    part.name,
                    got=f"groups of {part.group_size}",
                    wanted=f"groups of {other.group_size}, as in {other.name}",
                    todo=f"experts of one layer run in one call and need one group size; {PLAIN_COPY}",
                )
