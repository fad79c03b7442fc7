"""Filling a layer of vLLM: as :mod:`w4plugin.runtime.loading` says, with vLLM asked where a weight goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from w4plugin.runtime.loading import Loading
from w4plugin.runtime.placement import Columns, ShardId
from w4plugin.runtime.vllm import placement


@dataclass(kw_only=True)
class Filling(Loading):
    """A layer that is being filled.

    Attributes:
        loader: the layer's own weight loader, which knows where a weight goes.
    """

    loader: Callable[..., None]

    def _columns(self, n: int, shard_id: ShardId, where: str) -> Columns:
        return placement.columns(self.layer, self.loader, self.n_layer, n, shard_id, where)

    def _rows(self, where: str) -> tuple[int, int]:
        return placement.rows(self.layer, self.loader, self.k_layer, self.k, where)
