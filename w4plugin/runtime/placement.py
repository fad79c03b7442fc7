"""Which columns and rows of a checkpoint's weight a rank holds, asked of the host's own weight loaders.

A host's layers know how to cut a weight: columns, rows, fused q/k/v with replicated key heads, gate and up, a weight
that is fused in the file already, a padded vocabulary, and what single models add. Packed words cannot be cut the way
those loaders would (eight codes share a word, a row shard may cut a group), so the weight is decoded first. What to cut
is learnt by sending a vector of indices, 1..N, through the layer's loader into an empty vector as long as the rank's
share: where index i arrives, column i - 1 belongs; where 0 stays, there is padding. All ranks are asked, so that a
weight wider than the architecture cannot lose columns in silence.

How a layer is asked is each host's (:mod:`w4plugin.runtime.vllm.placement`, :mod:`w4plugin.runtime.sglang.placement`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from w4plugin.errors import CorruptError
from w4plugin.runtime.messages import OTHER_MODEL
from w4plugin.tensor import W4Tensor

ShardId = str | int | tuple[int, ...] | None
"""How a host names one part of a fused layer; None for a layer of one part or a weight fused in the file."""


@dataclass(frozen=True)
class Columns:
    """The columns of one weight in a rank's share of a layer.

    Attributes:
        start: first column of the layer that the weight fills.
        source: int64 ``[n]``, the weight's column for each of the layer's columns from ``start``; -1 is padding.
    """

    start: int
    source: Tensor

    @staticmethod
    def of(arrived: Tensor, shard_id: ShardId) -> Columns:
        """From what has arrived in each of the layer's columns."""
        if shard_id is None:  # a weight alone in its layer: what it does not fill is padding
            return Columns(0, arrived - 1)
        held = arrived.nonzero().flatten()
        return Columns(int(held[0]), arrived[int(held[0]) : int(held[-1]) + 1] - 1)

    @property
    def stop(self) -> int:
        return self.start + self.source.numel()


def on_all_ranks(
    ask: Callable[[int], Tensor], own: int, ranks: int, count: int, got: str, fits: str, where: str
) -> Tensor:
    """What ``ask`` answers for rank ``own``, once the answers of all ranks together are known to use all indices.

    Raises:
        CorruptError: the layer has no place for a weight of ``count`` columns or rows.
    """
    seen = np.zeros(count + 1, dtype=bool)  # torch would wake all its threads for it, which takes milliseconds
    mine = None
    try:
        for rank in range(ranks):
            answer = ask(rank)
            seen[answer.numpy()] = True
            if rank == own:
                mine = answer
    except (AssertionError, RuntimeError, ValueError, IndexError) as error:
        raise CorruptError(where, got=got, wanted=fits, todo="the checkpoint does not fit config.json") from error
    assert mine is not None
    if not seen[1:].all():
        unused = int((~seen[1:]).sum())
        raise CorruptError(where, got=f"{got}, of which {unused} would be dropped", wanted=fits, todo=OTHER_MODEL)
    return mine


@contextmanager
def embedding_as_rank(layer: Any, rank: int, ranks: int) -> Iterator[None]:
    """An embedding, which keeps its rank's share as numbers, as another rank would see it; others are left alone."""
    own = getattr(layer, "shard_indices", None)
    if own is None:
        yield
        return
    layer.shard_indices = layer._get_indices(
        layer.num_embeddings_padded,
        layer.org_vocab_size_padded,
        layer.num_embeddings,
        layer.org_vocab_size,
        rank,
        ranks,
    )
    try:
        yield
    finally:
        layer.shard_indices = own


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
