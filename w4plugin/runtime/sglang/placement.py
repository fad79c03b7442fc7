"""Which columns and rows of a checkpoint's weight this rank holds, asked of SGLang's own weight loaders.

:mod:`w4plugin.runtime.placement` says how and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.parameter import ChannelQuantScaleParameter, RowvLLMParameter
from torch import Tensor

from w4plugin.errors import UnsupportedError
from w4plugin.runtime.placement import Columns, ShardId, embedding_as_rank, on_all_ranks


def columns(layer: Any, n_layer: int, n: int, shard_id: ShardId, where: str) -> Columns:
    """Where the ``n`` columns of a weight go in this rank's ``n_layer`` columns of a layer.

    Raises:
        CorruptError: the layer has no place for a weight of ``n`` columns.
    """
    loader = _loader(layer)

    def ask() -> Tensor:
        with torch.device("cpu"):
            probe = ChannelQuantScaleParameter(
                data=torch.zeros(n_layer, dtype=torch.int64), output_dim=0, weight_loader=loader
            )
        return _filled(probe, loader, torch.arange(1, n + 1, device="cpu"), shard_id)

    return Columns.of(_on_all_ranks(layer, ask, n, n_layer, "columns", shard_id, where), shard_id)


def rows(layer: Any, k_layer: int, k: int, where: str) -> tuple[int, int]:
    """First and last row (exclusive) of a row-parallel weight with ``k`` rows that this rank holds.

    Raises:
        CorruptError: the layer has no place for a weight of ``k`` rows.
        UnsupportedError: the rank's rows are not one run, as where SGLang pads a weight that does not divide.
    """
    loader = _loader(layer)

    def ask() -> Tensor:
        with torch.device("cpu"):
            probe = RowvLLMParameter(data=torch.zeros(k_layer, dtype=torch.int64), input_dim=0, weight_loader=loader)
        return _filled(probe, loader, torch.arange(1, k + 1, device="cpu"), None)

    mine = _on_all_ranks(layer, ask, k, k_layer, "rows", None, where)
    start, stop = int(mine[0]) - 1, int(mine[-1])
    if not torch.equal(mine, torch.arange(start + 1, start + 1 + k_layer, device="cpu")) or start < 0:
        raise UnsupportedError(where, got="a layer that pads or cuts up its rows", wanted="one run of rows a rank")
    return start, stop


def _loader(layer: Any) -> Callable[..., None]:
    """The loader that fills parameters by their class; an embedding has one loader for all."""
    loader: Callable[..., None] = getattr(layer, "weight_loader_v2", None) or layer.weight_loader
    return loader


def _filled(probe: Any, loader: Callable[..., None], indices: Tensor, shard_id: ShardId) -> Tensor:
    loader(probe, indices) if shard_id is None else loader(probe, indices, shard_id)
    found: Tensor = probe.data
    return found


def _on_all_ranks(
    layer: Any, ask: Callable[[], Tensor], count: int, room: int, what: str, shard_id: ShardId, where: str
) -> Tensor:
    """What ``ask`` answers on this rank, once the answers of all ranks together are known to use all indices."""
    names = _groups(layer, shard_id, where)
    own, size = get_group_rank_size(getattr(layer, names[0], None))
    got = f"{'N' if what == 'columns' else 'K'} = {count}"
    fits = f"the {room} {what} that the architecture has here on each of {size} ranks"

    def ask_as(rank: int) -> Tensor:
        with _as_rank(layer, names, rank, size):
            return ask()

    return on_all_ranks(ask_as, own, size, count, got, fits, where)


def _groups(layer: Any, shard_id: ShardId, where: str) -> list[str]:
    """The layer's attributes that hold the group over which a weight is cut: keys and values may have their own."""
    heads, keys = getattr(layer, "tp_group", None), getattr(layer, "kv_tp_group", None)
    if keys is None:
        return ["tp_group"]
    if get_group_rank_size(heads) == get_group_rank_size(keys):
        return ["tp_group", "kv_tp_group"]
    if shard_id is None:
        raise UnsupportedError(
            where, got="q, k and v in one weight, cut over different groups", wanted="one group", todo="use plain TP"
        )
    return ["tp_group"] if shard_id == "q" else ["kv_tp_group"]


@dataclass(frozen=True)
class _Seat:
    """As much of a process group as a weight loader asks for."""

    rank_in_group: int
    world_size: int


@contextmanager
def _as_rank(layer: Any, names: list[str], rank: int, size: int) -> Iterator[None]:
    """The layer as another rank would see it."""
    own = {name: vars(layer)[name] for name in names if name in vars(layer)}
    for name in own:
        setattr(layer, name, _Seat(rank, size))
    try:
        with embedding_as_rank(layer, rank, size):
            yield
    finally:
        for name, group in own.items():
            setattr(layer, name, group)
