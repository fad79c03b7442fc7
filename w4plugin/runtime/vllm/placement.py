"""Which columns and rows of a checkpoint's weight this rank holds, asked of vLLM's own weight loaders.

:mod:`w4plugin.runtime.placement` says how and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from w4plugin.errors import UnsupportedError
from w4plugin.runtime.placement import Columns, ShardId, embedding_as_rank, on_all_ranks


def columns(layer: Any, loader: Callable[..., None], n_layer: int, n: int, shard_id: ShardId, where: str) -> Columns:
    """Where the ``n`` columns of a weight go in this rank's ``n_layer`` columns of a layer.

    Raises:
        CorruptError: the layer has no place for a weight of ``n`` columns.
    """
    from vllm.model_executor.parameter import ChannelQuantScaleParameter

    probe = functools.partial(ChannelQuantScaleParameter, output_dim=0, weight_loader=loader)
    ask = functools.partial(_filled, layer, loader, probe, n_layer, n, shard_id)
    fits = f"the {n_layer} columns that the architecture has here on each of {layer.tp_size} ranks"
    return Columns.of(on_all_ranks(ask, _rank(layer), layer.tp_size, n, f"N = {n}", fits, where), shard_id)


def rows(layer: Any, loader: Callable[..., None], k_layer: int, k: int, where: str) -> tuple[int, int]:
    """First and last row (exclusive) of a row-parallel weight with ``k`` rows that this rank holds.

    Raises:
        CorruptError: the layer has no place for a weight of ``k`` rows.
    """
    from vllm.model_executor.parameter import RowvLLMParameter

    probe = functools.partial(RowvLLMParameter, input_dim=0, weight_loader=loader)
    ask = functools.partial(_filled, layer, loader, probe, k_layer, k, None)
    fits = f"the {k_layer} rows that the architecture has here on each of {layer.tp_size} ranks"
    mine = on_all_ranks(ask, _rank(layer), layer.tp_size, k, f"K = {k}", fits, where)
    start, stop = int(mine[0]) - 1, int(mine[-1])
    if not torch.equal(mine, torch.arange(start + 1, stop + 1, device="cpu")):
        raise UnsupportedError(where, got="a layer that cuts its rows into pieces", wanted="one run of rows a rank")
    return start, stop


def _rank(layer: Any) -> int:
    """This rank of the layer's own tensor-parallel group; an embedding of vLLM 0.26 does not keep it."""
    from vllm.distributed import get_tensor_model_parallel_rank

    rank = getattr(layer, "tp_rank", None)
    return get_tensor_model_parallel_rank() if rank is None else rank


def _filled(
    layer: Any,
    loader: Callable[..., None],
    make: Callable[..., Any],
    held: int,
    count: int,
    shard_id: ShardId,
    rank: int,
) -> Tensor:
    """Which of the indices 1..``count`` arrives in each of the ``held`` places of a rank, 0 for none."""
    with _as_rank(layer, rank):
        with torch.device("cpu"):
            probe = make(data=torch.zeros(held, dtype=torch.int64))
            indices = torch.arange(1, count + 1)
        probe.tp_rank, probe.tp_size = _rank(layer), layer.tp_size
        loader(probe, indices) if shard_id is None else loader(probe, indices, shard_id)
    return probe.data


@contextmanager
def _as_rank(layer: Any, rank: int) -> Iterator[None]:
    """The layer as another rank would see it."""
    own = getattr(layer, "tp_rank", None)
    layer.tp_rank = rank
    try:
        with embedding_as_rank(layer, rank, layer.tp_size):
            yield
    finally:
        if own is None:
            del layer.tp_rank
        else:
            layer.tp_rank = own
