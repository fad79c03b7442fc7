"""Filling a layer of experts: tensors of the file in, two stacks that a kernel can run out.

A weight is put on the device, decoded and cut to this rank's share as soon as its last tensor is there, and a layer
goes into its kernel's order as soon as its last expert is there: memory holds what is ready and one layer besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError, W4Error
from w4plugin.kernels import PreparedExperts, prepare_experts
from w4plugin.packing import NIBBLES
from w4plugin.runtime.loading import decode
from w4plugin.runtime.messages import OTHER_MODEL, PLAIN_COPY
from w4plugin.runtime.mixture import Mixture
from w4plugin.runtime.transfer import to_device
from w4plugin.runtime.vllm import versions
from w4plugin.runtime.vllm.inventory import Inventory
from w4plugin.tensor import W4Tensor

SIZES = ("weight_shape",)
"""Suffixes that state the sizes of a whole module: of no use to a rank that holds some experts of a stack."""


@dataclass
class Arrivals:
    """Tensors of a layer's experts on their way in.

    Attributes:
        mixture: which weights the layer has.
        inventory: of the checkpoint.
        local: this rank's experts, their number in the model to their place here.
        device: where tensors go.
        take: is handed every weight of which all tensors are there: its name below the layer, and the tensors.
        waiting: tensors of weights that are not complete.
        complete: names of those that are.
    """

    mixture: Mixture
    inventory: Inventory
    local: Mapping[int, int]
    device: torch.device
    take: Callable[[str, dict[str, Tensor]], None]
    waiting: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)

    def mine(self, name: str) -> list[int]:
        """Those experts of a weight that this rank holds."""
        return [e for e in self.mixture.experts_of(name) if e in self.local]

    def receive(self, name: str, suffix: str, tensor: Tensor) -> bool:
        """Take one tensor of the file; False when this rank has no use for it.

        Raises:
            CorruptError, UnsupportedError: with it a weight is complete that cannot be decoded or does not fit.
        """
        part, mine = self.mixture.parts[name], self.mine(name)
        if not mine:
            return False
        if suffix == "bias":  # judged when the layer is complete
            return True
        if suffix not in part.dtypes:
            raise CorruptError(f"{part.name}.{suffix}", got="this tensor", wanted=f"only {', '.join(part.dtypes)}")
        if part.experts is not None and len(mine) < part.experts and suffix not in SIZES:
            tensor = tensor[torch.tensor(mine, device=tensor.device)]
        tensors = self.waiting.setdefault(name, {})
        # a copy, since some loaders use the buffer that they hand over again
        tensors[suffix] = to_device(tensor, self.device)
        if len(tensors) == len(part.dtypes):
            del self.waiting[name]
            if part.experts is not None and len(mine) < part.experts:
                tensors = {s: t for s, t in tensors.items() if s not in SIZES}
            self.take(name, tensors)
            self.complete.add(name)
        return True

    def check(self) -> None:
        """That everything has arrived which this rank needs.

        Raises:
            CorruptError: a tensor is missing.
            UnsupportedError: an expert has a bias that is not zero.
        """
        needed = [name for name in self.mixture.parts if self.mine(name)]
        for name in needed:
            if name not in self.complete:
                part, arrived = self.mixture.parts[name], self.waiting.get(name, {})
                missing = ", ".join(f"{part.name}.{s}" for s in part.dtypes or ("weight",) if s not in arrived)
                raise CorruptError(self.mixture.layer, got=f"no {missing}", wanted="every tensor of the experts")
        for biased in self.inventory.nonzero_biases(self.mixture.parts[name].name for name in needed):
            raise UnsupportedError(
                f"{biased}.bias",
                got="a bias that is not zero",
                wanted="experts without a bias, as the architecture has them",
                todo="serve it with a model class that adds this bias; without it the output would be wrong",
            )


@dataclass
class Stacking:
    """The packed experts of a layer, put together for a kernel.

    Attributes:
        mixture: which weights the layer has.
        inventory: of the checkpoint.
        local: this rank's experts, their number in the model to their place here.
        device, dtype: of the layer's activations.
        hidden: features of the layer.
        inner: features inside an expert on this rank.
        rank, ranks: which share of every expert this rank holds.
        held: by place and shard, weights that wait for the others of their layer.
        ready: the layer in its kernel's order, once all its weights are there.
    """

    mixture: Mixture
    inventory: Inventory
    local: Mapping[int, int]
    device: torch.device
    dtype: torch.dtype
    hidden: int
    inner: int
    rank: int
    ranks: int
    held: dict[tuple[int, str], W4Tensor] = field(default_factory=dict)
    ready: PreparedExperts | None = None

    def __post_init__(self) -> None:
        self.arrivals = Arrivals(self.mixture, self.inventory, self.local, self.device, self.take)
        self.table = self.mixture.table()
        check_sizes(self.mixture, self.hidden, self.inner, self.ranks)

    def take(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Decode one weight and keep this rank's share of it."""
        part, shards = self.mixture.parts[name], self.mixture.place(name).shards
        weight: Any = decode(part, tensors, self.inventory.config, self.dtype, versions.logger())
        for i, expert in enumerate(self.arrivals.mine(name)):
            one: W4Tensor = weight if weight.experts is None else weight.expert(i)
            width = one.N // len(shards)
            for j, shard in enumerate(shards):
                piece = one if len(shards) == 1 else one.shard_n(j * width, (j + 1) * width)
                self.held[self.local[expert], shard] = self._share(piece, shard, part.name)
        if len(self.held) == 3 * len(self.local):
            self._prepare()

    def _share(self, weight: W4Tensor, shard: str, where: str) -> W4Tensor:
        """This rank's columns of a gate or up projection, or rows of a down projection."""
        whole = self.inner * self.ranks
        k, n = (whole, self.hidden) if shard == "w2" else (self.hidden, whole)
        if k != weight.K or n != weight.N:
            got = f"K = {weight.K}, N = {weight.N}"
            raise CorruptError(where, got=got, wanted=f"K = {k}, N = {n}", todo=OTHER_MODEL)
        if self.ranks == 1:
            return weight
        first, last = self.rank * self.inner, (self.rank + 1) * self.inner
        try:
            return weight.shard_k(first, last) if shard == "w2" else weight.shard_n(first, last)
        except UnsupportedError as error:
            raise error.at(where) from error

    def _prepare(self) -> None:
        """Put the complete layer into its kernel's order."""
        for expert, place in self.local.items():
            gate, up = self.held[place, "w1"], self.held[place, "w3"]
            if (gate.g_idx is not None or up.g_idx is not None) and not torch.equal(gate.groups(), up.groups()):
                raise UnsupportedError(
                    self._name(expert, "w3"),
                    got=f"a g_idx that differs from that of {self._name(expert, 'w1')}",
                    wanted="one act-order for what an expert multiplies its input with",
                    todo=PLAIN_COPY,
                )
        stacks = {shard: self._stack(shard) for shard in ("w1", "w3", "w2")}
        try:
            self.ready = prepare_experts(
                (stacks.pop("w1"), stacks.pop("w3")), stacks.pop("w2"), dtype=self.dtype, device=self.device
            )
        except W4Error as error:
            raise error.at(self.mixture.layer) from error

    def _stack(self, shard: str) -> W4Tensor:
        """One projection of all experts, whose sources are given up."""
        parts = []
        for expert, place in sorted(self.local.items(), key=lambda item: item[1]):
            parts.append(self.held.pop((place, shard)))
            first, here = parts[0], parts[-1]
            if _kind(here) != _kind(first):
                raise UnsupportedError(
                    self._name(expert, shard),
                    got=_kind(here),
                    wanted=f"{_kind(first)}, as in the layer's other experts",
                    todo=PLAIN_COPY,
                )
        return W4Tensor.stack_experts(parts)

    def _name(self, expert: int, shard: str) -> str:
        return self.mixture.parts[self.table[expert, shard]].name

    def finished(self) -> PreparedExperts:
        """The layer in its kernel's order.

        Raises:
            CorruptError, UnsupportedError: as :meth:`Arrivals.check`.
        """
        self.arrivals.check()
        assert self.ready is not None
        return self.ready

    def noise(self) -> PreparedExperts:
        """Random experts of the layer's shape, for ``--load-format dummy``."""
        size = next((part.group_size for part in self.mixture.parts.values() if part.group_size), 128)

        def stack(k: int, n: int) -> W4Tensor:
            lead = len(self.local)
            codes = torch.randint(-(2**31), 2**31 - 1, (lead, k // NIBBLES, n), dtype=torch.int32, device=self.device)
            scales = torch.full((lead, -(-k // size), n), 1e-3, dtype=torch.float16, device=self.device)
            return W4Tensor(codes, scales, None, None, size)

        gate_up, down = stack(self.hidden, 2 * self.inner), stack(self.inner, self.hidden)
        return prepare_experts(gate_up, down, dtype=self.dtype, device=self.device)


def check_sizes(mixture: Mixture, hidden: int, inner: int, ranks: int) -> None:
    """That the experts in the file are those of the architecture.

    Args:
        hidden: features of the layer.
        inner: features inside an expert on this rank.
        ranks: how many ranks share each expert.

    Raises:
        CorruptError: they are of other sizes.
    """
    found = mixture.sizes()
    name = next(part.name for part in mixture.parts.values())
    if found != (hidden, inner * ranks):
        raise CorruptError(
            name,
            got=f"experts of {found[0]} features and {found[1]} inner ones",
            wanted=f"{hidden} and {inner * ranks}, the architecture's",
            todo=OTHER_MODEL,
        )


def _kind(weight: W4Tensor) -> str:
    dtype = str(weight.scales.dtype).removeprefix("torch.")
    return f"{weight.G} groups of {weight.group_size} with {dtype} scales"
