"""Filling a layer of SGLang: as :mod:`w4plugin.runtime.vllm.loading` does, with SGLang asked where a weight goes."""

from __future__ import annotations

from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats import other_widths
from w4plugin.formats.registry import read_module
from w4plugin.runtime.sglang import host, placement
from w4plugin.runtime.vllm.inventory import Part
from w4plugin.runtime.vllm.loading import OTHER_MODEL, Loading, Share
from w4plugin.runtime.vllm.placement import ShardId, cut
from w4plugin.tensor import W4Tensor


class Filling(Loading):
    """A layer that is being filled."""

    def _share(self, part: Part, tensors: dict[str, Tensor], shard_id: ShardId) -> Share:
        weight = self._decoded(part, tensors)
        packed = isinstance(weight, W4Tensor)
        n, k = (weight.N, weight.K) if packed else weight.shape
        if k != self.k:
            raise CorruptError(part.name, got=f"K = {k}", wanted=f"{self.k}, the architecture's", todo=OTHER_MODEL)
        if self.k_layer != self.k:
            if n != self.n_layer:
                raise CorruptError(part.name, got=f"N = {n}", wanted=f"{self.n_layer}", todo=OTHER_MODEL)
            first, last = placement.rows(self.layer, self.k_layer, k, part.name)
            try:
                return Share(0, n, weight.shard_k(first, last) if packed else weight[:, first:last].contiguous())
            except UnsupportedError as error:
                raise error.at(part.name) from error
        place = placement.columns(self.layer, self.n_layer, n, shard_id, part.name)
        return Share(place.start, place.stop, cut(weight, place.source))

    def _decoded(self, part: Part, tensors: dict[str, Tensor]) -> W4Tensor | Tensor:
        if part.module is None:
            return tensors["weight"].to(self.dtype)
        if part.kind == "wide":
            plain = other_widths.dequantize(part.module, tensors, self.inventory.config, self.dtype)
            notes, weight = plain.notes, plain.weight
        else:
            decoded = read_module(part.module, tensors, self.inventory.config)
            notes, weight = decoded.notes, decoded.weight
            if decoded.unfilled:
                raise CorruptError(
                    part.name,
                    got="codes and scales that are all 0",
                    wanted="a layer that was filled before it was saved",
                    todo="quantise the model again; this layer would multiply everything to 0",
                )
        for note in notes:
            if note.level != "info":
                host.logger.warning("%s", note)
        return weight
