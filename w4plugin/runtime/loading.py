"""Filling a layer: tensors of the file in, weights that a kernel can multiply with out; no host is imported.

A host's loader hands over one tensor at a time, whole, in the order of the file. A weight is put on the device, and is
decoded and cut to this rank's share while the tensors of the next one are on their way; a layer goes into its kernel's
order as soon as its last weight is there: memory holds what is ready, one weight that is about to be, and what is
incomplete, never a second copy of the checkpoint.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from w4plugin.errors import CorruptError, UnsupportedError, W4Error
from w4plugin.formats import other_widths
from w4plugin.formats.format import Module
from w4plugin.formats.registry import read_module
from w4plugin.kernels import Prepared, prepare
from w4plugin.packing import NIBBLES
from w4plugin.quant_config import QuantConfig
from w4plugin.runtime import pieces
from w4plugin.runtime.inventory import Inventory
from w4plugin.runtime.messages import OTHER_MODEL, loaded_twice, warn
from w4plugin.runtime.part import Part
from w4plugin.runtime.placement import Columns, ShardId, cut
from w4plugin.runtime.transfer import to_device
from w4plugin.tensor import W4Tensor


@dataclass(frozen=True)
class Share:
    """This rank's share of one weight: packed, or plain as ``[n, K]``, in columns ``start:stop`` of the layer."""

    start: int
    stop: int
    weight: W4Tensor | Tensor


@dataclass
class Loading(ABC):
    """A layer that is being filled; subclasses ask their host where a weight goes.

    Until it is filled the layer's parameters are empty placeholders with the names of the file's tensors; after that
    they are what the kernels read (:mod:`.pieces`).

    Attributes:
        layer: the host's layer.
        prefix: its name.
        inventory: of the checkpoint.
        parts: the weights of the layer, in the order in which it fuses them.
        device, dtype: of the layer's activations.
        k, k_layer: rows of the whole weight, and of this rank.
        n_layer: columns of this rank.
        logger: the host's.
        waiting: tensors of weights that are not complete, by weight.
        shares: weights that wait for the others of their layer.
        ready: the layer's multiplications, once all its weights are there.
        closed: the layer has its parameters; whatever arrives from now on is an error.
    """

    layer: Any
    prefix: str
    inventory: Inventory
    parts: list[Part]
    device: torch.device
    dtype: torch.dtype
    k: int
    k_layer: int
    n_layer: int
    logger: logging.Logger
    waiting: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    shares: dict[str, Share] = field(default_factory=dict)
    ready: list[Prepared | Tensor] | None = None
    closed: bool = False

    @abstractmethod
    def _columns(self, n: int, shard_id: ShardId, where: str) -> Columns:
        """Where the ``n`` columns of a weight go in this rank's columns of the layer."""

    @abstractmethod
    def _rows(self, where: str) -> tuple[int, int]:
        """First and last row (exclusive) of a row-parallel weight that this rank holds."""

    def open(self) -> None:
        """Give the layer a placeholder for every tensor that will arrive."""
        for suffix, dtype in self._placeholders().items():
            self.layer.register_parameter(suffix, placeholder(dtype, functools.partial(self.one, suffix)))

    def _placeholders(self) -> dict[str, torch.dtype]:
        """Suffixes of all tensors that will arrive, with the file's dtype: vLLM warns when a parameter's is another."""
        return {suffix: dtype for part in self.parts for suffix, dtype in part.dtypes.items()}

    def one(self, suffix: str, param: Parameter, loaded_weight: Tensor, shard_id: ShardId = None) -> None:
        """The weight loader of a placeholder. Newer versions of vLLM hang the shard id on the tensor."""
        if self.closed:
            raise loaded_twice(f"{self.prefix}.{suffix}")
        if shard_id is None:
            shard_id = getattr(loaded_weight, "shard_id", None)
        self.receive(suffix, loaded_weight, shard_id)

    def close(self, dummy: bool) -> tuple[pieces.Piece, ...]:
        """Put the layer's multiplications in the placeholders' place.

        Args:
            dummy: fill it with noise, whatever has arrived.

        Raises:
            CorruptError, UnsupportedError: as :meth:`finished`.
        """
        ready = self.noise() if dummy else self.finished()
        for suffix in self._placeholders():
            delattr(self.layer, suffix)
        self.ready, self.closed = None, True
        return pieces.register(self.layer, ready)

    def receive(self, suffix: str, tensor: Tensor, shard_id: ShardId) -> None:
        """Take one tensor of the file.

        Raises:
            CorruptError, UnsupportedError: the weight that was complete before, of this layer or another, cannot be
                decoded or does not fit; the message names it.
        """
        part = self.part(shard_id)
        if suffix not in part.dtypes:
            raise CorruptError(f"{part.name}.{suffix}", got="this tensor", wanted=f"only {', '.join(part.dtypes)}")
        tensors = self.waiting.setdefault(part.name, {})
        # A copy, since some loaders use the buffer that they hand over again. Most g_idx say nothing (0, 0, .., 1, ..);
        # to see that takes a dozen answers, each of which a device would be asked for and waited for.
        device = torch.device("cpu") if suffix.endswith("g_idx") else self.device
        later = self.inventory.later
        tensors[suffix] = to_device(tensor, device, later.settle)
        if len(tensors) == len(part.dtypes):
            del self.waiting[part.name]
            later.put_off(lambda: self._complete(part, tensors, shard_id))

    def _complete(self, part: Part, tensors: dict[str, Tensor], shard_id: ShardId) -> None:
        self.shares[part.name] = self._share(part, tensors, shard_id)
        if len(self.shares) == len(self.parts):
            self._prepare()

    def part(self, shard_id: ShardId) -> Part:
        """The weight meant by a shard id: its place among q, k, v, or its first column in the fused layer."""
        if len(self.parts) == 1:
            return self.parts[0]
        if isinstance(shard_id, str) and shard_id in ("q", "k", "v"):
            found = self.parts["qkv".index(shard_id)]
            # a model that uses its keys as values sends the key weight twice
            return replace(self.parts[1], name=found.name) if found.kind == "absent" and shard_id == "v" else found
        if isinstance(shard_id, int) and len(self.parts) == len(self.layer.output_sizes):
            return self.parts[shard_id]
        if isinstance(shard_id, int | tuple):
            column = sum(self.layer.output_sizes[: shard_id[0] if isinstance(shard_id, tuple) else shard_id])
            for part in self.parts:
                if column == 0:
                    return part
                column -= part.N
        names = ", ".join(part.name for part in self.parts)
        raise UnsupportedError(self.prefix, got=f"a weight for its shard {shard_id!r}", wanted=f"one of {names}")

    def _share(self, part: Part, tensors: dict[str, Tensor], shard_id: ShardId) -> Share:
        weight = decode(part, tensors, self.inventory.config, self.dtype, self.logger)
        packed = isinstance(weight, W4Tensor)
        n, k = (weight.N, weight.K) if packed else weight.shape
        if k != self.k:
            raise CorruptError(part.name, got=f"K = {k}", wanted=f"{self.k}, the architecture's", todo=OTHER_MODEL)
        if self.k_layer != self.k:
            if n != self.n_layer:
                raise CorruptError(part.name, got=f"N = {n}", wanted=f"{self.n_layer}", todo=OTHER_MODEL)
            first, last = self._rows(part.name)
            try:
                return Share(0, n, weight.shard_k(first, last) if packed else weight[:, first:last].contiguous())
            except UnsupportedError as error:
                raise error.at(part.name) from error
        place = self._columns(n, shard_id, part.name)
        return Share(place.start, place.stop, cut(weight, place.source))

    def _prepare(self) -> None:
        """Put the complete layer into as few multiplications as its weights allow."""
        shares = sorted(self.shares.values(), key=lambda share: share.start)
        self.shares.clear()
        covered = 0
        for share in shares:
            covered = share.stop if share.start == covered else covered
        if covered != self.n_layer:
            wanted = f"{self.n_layer}, the architecture's"
            raise CorruptError(self.prefix, got=f"{covered} columns in one run", wanted=wanted, todo=OTHER_MODEL)
        self.ready = []
        try:
            while shares:
                weight = _merged(shares)
                packed = isinstance(weight, W4Tensor)
                self.ready.append(prepare(weight, dtype=self.dtype, device=self.device) if packed else weight)
        except W4Error as error:
            raise error.at(self.prefix) from error

    def finished(self) -> list[Prepared | Tensor]:
        """The layer's multiplications, in the order of its columns.

        Raises:
            CorruptError: a tensor is missing.
            UnsupportedError: the file has a bias for which the architecture has no place.
            CorruptError, UnsupportedError: the last weight to arrive, of this layer or another, as for :meth:`receive`.
        """
        self.inventory.later.settle()
        if self.ready is None:
            for part in self.parts:
                if part.name not in self.shares:
                    arrived = self.waiting.get(part.name, {})
                    missing = [
                        f"{part.name}.{suffix}" for suffix in part.dtypes or ("weight",) if suffix not in arrived
                    ]
                    raise CorruptError(self.prefix, got=f"no {', '.join(missing)}", wanted="every tensor of the layer")
        assert self.ready is not None
        self._check_bias()
        return self.ready

    def _check_bias(self) -> None:
        """Hosts drop a bias that their model has no place for; only one that is all zero may go that way."""
        if getattr(self.layer, "bias", None) is not None:
            return
        for name in self.inventory.nonzero_biases(part.name for part in self.parts):
            raise UnsupportedError(
                f"{name}.bias",
                got="a bias that is not zero",
                wanted="none, since the architecture has no place for it",
                todo="serve it with a model class that adds this bias; without it the output would be wrong",
            )

    def noise(self) -> list[Prepared | Tensor]:
        """A random weight of the layer's shape, for ``--load-format dummy``."""
        size = next((p.module.group_size for p in self.parts if p.kind == "int4" and p.module is not None), None) or 128
        codes = torch.randint(
            -(2**31), 2**31 - 1, (self.k_layer // NIBBLES, self.n_layer), dtype=torch.int32, device=self.device
        )
        groups = -(-self.k_layer // size)
        scales = torch.full((groups, self.n_layer), 1e-3, dtype=torch.float16, device=self.device)
        return [prepare(W4Tensor(codes, scales, None, None, size), dtype=self.dtype, device=self.device)]


def placeholder(dtype: torch.dtype, loader: Callable[..., Any]) -> Parameter:
    """An empty parameter that stands for a tensor of the file, and what a host's loader calls with that tensor."""
    empty = Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
    empty.weight_loader = loader
    return empty


def decode(
    part: Part, tensors: Mapping[str, Tensor], config: QuantConfig, dtype: torch.dtype, logger: logging.Logger
) -> W4Tensor | Tensor:
    """A weight as its tensors say: packed, or plain ``[N, K]`` in the layer's dtype.

    Raises:
        CorruptError, UnsupportedError: they contradict each other, or were never filled.
    """
    if part.module is None:
        return tensors["weight"].to(dtype)
    if part.kind == "wide":
        plain = other_widths.dequantize(part.module, tensors, config, dtype)
        warn(plain.notes, logger)
        return plain.weight
    return decode_packed(part.module, tensors, config, logger)


def decode_packed(
    module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, logger: logging.Logger
) -> W4Tensor:
    """A weight in four bits as its tensors say.

    Raises:
        CorruptError, UnsupportedError: they contradict each other, or were never filled.
    """
    decoded = read_module(module, tensors, config)
    warn(decoded.notes, logger)
    if decoded.unfilled:
        raise CorruptError(
            module.name,
            got="codes and scales that are all 0",
            wanted="a layer that was filled before it was saved",
            todo="quantise the model again; this layer would multiply everything to 0",
        )
    return decoded.weight


def _merged(shares: list[Share]) -> W4Tensor | Tensor:
    """Take the first weights that can be one off the list, as one."""
    taken = [shares.pop(0).weight]
    while shares and _fit(taken[0], shares[0].weight):
        taken.append(shares.pop(0).weight)
    if len(taken) == 1:
        return taken[0]
    return W4Tensor.cat_n(taken) if isinstance(taken[0], W4Tensor) else torch.cat(taken)


def _fit(first: W4Tensor | Tensor, other: W4Tensor | Tensor) -> bool:
    """Whether the two can stand side by side in one multiplication."""
    if not isinstance(first, W4Tensor) or not isinstance(other, W4Tensor):
        return type(first) is type(other)
    if first.scales.dtype != other.scales.dtype:
        return False
    if first.g_idx is None and other.g_idx is None:
        return True
    return first.G == other.G and torch.equal(first.groups(), other.groups())
