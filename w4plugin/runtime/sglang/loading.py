"""Filling a layer of SGLang: as :mod:`w4plugin.runtime.loading` says, with SGLang asked where a weight goes."""

from __future__ import annotations

from w4plugin.runtime.loading import Loading
from w4plugin.runtime.placement import Columns, ShardId
from w4plugin.runtime.sglang import placement


class Filling(Loading):
    """A layer that is being filled."""

    def _columns(self, n: int, shard_id: ShardId, where: str) -> Columns:
        return placement.columns(self.layer, self.n_layer, n, shard_id, where)

    def _rows(self, where: str) -> tuple[int, int]:
        return placement.rows(self.layer, self.k_layer, self.k, where)
