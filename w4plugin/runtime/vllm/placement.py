"""Which columns and rows of a checkpoint's weight this rank holds, asked of vLLM's own weight loaders.

vLLM's layers know how to cut a weight: columns, rows, fused q/k/v with replicated key heads, gate and up, a weight that
is fused in the file already, a padded vocabulary, and what single models add. Packed words cannot be cut the way those
loaders would (eight codes share a word, a row shard may cut a group), so the weight is decoded first. What to cut is
learnt by sending a vector of indices, 1..N, through the layer's loader into an empty vector as long as the rank's
share: where index i arrives, column i - 1 belongs; where 0 stays, there is padding. All ranks are asked, so that a
weight wider than the architecture cannot lose columns in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.tensor import W4Tensor

ShardId = str | int | tuple[int, ...] | None
"""How vLLM names one part of a fused layer; None for a layer of one part or a weight fused in the file."""


@dataclass(frozen=True)
class Columns:
    """The columns of one weight in a rank's share of a layer.

    Attributes:
        start: first column of the layer that the weight fills.
        source: int64 ``[n]``, the weight's column for each of the layer's columns from ``start``; -1 is padding.
    """

    start: int
    source: Tensor

    @property
    def stop(self) -> int:
        return self.start + self.source.numel()


def columns(layer: Any, loader: Callable[..., None], n_layer: int, n: int, shard_id: ShardId, where: str) -> Columns:
    """Where the ``n`` columns of a weight go in this rank's ``n_layer`` columns of a layer.

    Raises:
        CorruptError: the layer has no place for a weight of ``n`` columns.
    """
    from vllm.model_executor.parameter import ChannelQuantScaleParameter

    def ask() -> Tensor:
        with torch.device("cpu"):
            probe = ChannelQuantScaleParameter(
                data=torch.zeros(n_layer, dtype=torch.int64), output_dim=0, weight_loader=loader
            )
        return _filled(probe, layer, loader, torch.arange(1, n + 1, device="cpu"), shard_id)

    fits = f"the {n_layer} columns that the architecture has here on each of {layer.tp_size} ranks"
    mine = _on_all_ranks(layer, ask, n, f"N = {n}", fits, where)
    if shard_id is None:  # a weight alone in its layer: what it does not fill is padding
        return Columns(0, mine - 1)
    held = mine.nonzero().flatten()
    return Columns(int(held[0]), mine[int(held[0]) : int(held[-1]) + 1] - 1)


def rows(layer: Any, loader: Callable[..., None], k_layer: int, k: int, where: str) -> tuple[int, int]:
    """First and last row (exclusive) of a row-parallel weight with ``k`` rows that this rank holds.

    Raises:
        CorruptError: the layer has no place for a weight of ``k`` rows.
    """
    from vllm.model_executor.parameter import RowvLLMParameter

    def ask() -> Tensor:
        with torch.device("cpu"):
            probe = RowvLLMParameter(data=torch.zeros(k_layer, dtype=torch.int64), input_dim=0, weight_loader=loader)
        return _filled(probe, layer, loader, torch.arange(1, k + 1, device="cpu"), None)

    fits = f"the {k_layer} rows that the architecture has here on each of {layer.tp_size} ranks"
    mine = _on_all_ranks(layer, ask, k, f"K = {k}", fits, where)
    start, stop = int(mine[0]) - 1, int(mine[-1])
    if not torch.equal(mine, torch.arange(start + 1, stop + 1, device="cpu")):
        raise UnsupportedError(where, got="a layer that cuts its rows into pieces", wanted="one run of rows a rank")
    return start, stop


def cut(weight: W4Tensor | Tensor, source: Tensor) -> W4Tensor | Tensor:
    """The columns ``source`` of a weight (rows of a plain ``[N, K]`` one); a column of padding (-1) is zero."""
    n, first = source.numel(), int(source[0])
    run = first >= 0 and torch.equal(source, torch.arange(first, first + n, device="cpu"))
    if run and isinstance(weight, Tensor):
        return weight[first : first + n].clone()
    if run:
        return weight if n == weight.N else weight.shard_n(first, first + n)
    padding = (source < 0).to(weight.device)
    index = source.clamp(min=0).to(weight.device)
    if isinstance(weight, Tensor):
        return weight[index].masked_fill_(padding.unsqueeze(-1), 0)
    scales = weight.scales.index_select(-1, index).masked_fill_(padding, 0)
    zeros = None if weight.zeros is None else weight.zeros.index_select(-1, index)
    return replace(weight, qweight=weight.qweight.index_select(-1, index), scales=scales, zeros=zeros)


def _rank(layer: Any) -> int:
    """This rank of the layer's own tensor-parallel group; an embedding of vLLM 0.26 does not keep it."""
    from vllm.distributed import get_tensor_model_parallel_rank

    rank = getattr(layer, "tp_rank", None)
    return get_tensor_model_parallel_rank() if rank is None else rank


def _filled(probe: Any, layer: Any, loader: Callable[..., None], indices: Tensor, shard_id: ShardId) -> Tensor:
    probe.tp_rank, probe.tp_size = _rank(layer), layer.tp_size
    loader(probe, indices) if shard_id is None else loader(probe, indices, shard_id)
    return probe.data


def _on_all_ranks(layer: Any, ask: Callable[[], Tensor], count: int, got: str, fits: str, where: str) -> Tensor:
    """What ``ask`` answers on this rank, once the answers of all ranks together are known to use all indices."""
    seen = np.zeros(count + 1, dtype=bool)  # torch would wake all its threads for it, which takes milliseconds
    mine = None
    try:
        for rank in range(layer.tp_size):
            with _as_rank(layer, rank):
                answer = ask()
            seen[answer.numpy()] = True
            if rank == _rank(layer):
                mine = answer
    except (AssertionError, RuntimeError, ValueError, IndexError) as error:
        raise CorruptError(where, got=got, wanted=fits, todo="the checkpoint does not fit config.json") from error
    assert mine is not None
    if not seen[1:].all():
        unused = int((~seen[1:]).sum())
        raise CorruptError(
            where, got=f"{got}, of which {unused} would be dropped", wanted=fits, todo="config.json is of another model"
        )
    return mine


@contextmanager
def _as_rank(layer: Any, rank: int) -> Iterator[None]:
    """The layer as another rank would see it."""
    own = getattr(layer, "tp_rank", None)
    indices = getattr(layer, "shard_indices", None)
    layer.tp_rank = rank
    if indices is not None:  # an embedding keeps its rank's share as numbers
        layer.shard_indices = layer._get_indices(
            layer.num_embeddings_padded,
            layer.org_vocab_size_padded,
            layer.num_embeddings,
            layer.org_vocab_size,
            rank,
            layer.tp_size,
        )
    try:
        yield
    finally:
        if own is None:
            del layer.tp_rank
        else:
            layer.tp_rank = own
        if indices is not None:
            layer.shard_indices = indices
