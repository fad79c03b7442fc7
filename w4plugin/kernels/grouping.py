"""How a backend may cut K into equal runs of one group: what act-order and cut groups mean to a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from w4plugin.packing import pack, unpack
from w4plugin.tensor import W4Tensor


@dataclass(frozen=True, eq=False)
class Runs:
    """A weight whose rows, in some order, form runs of ``size`` rows that share a group.

    Attributes:
        order: int64 ``[K]``, the row that comes k-th; None where rows stay where they are.
        size: rows in a run (the last may be shorter).
        group: int64 ``[ceil(K/size)]``, the group of each run; None where run g is group g.
    """

    order: Tensor | None
    size: int
    group: Tensor | None


def runs(w: W4Tensor, multiple: int) -> Runs | None:
    """The longest runs whose size is a multiple of ``multiple`` or all of K; None where groups are too irregular.

    Act-order weights are sorted by group (stably, so the inverse is exact). A row shard that cuts a group keeps its
    order and gets shorter runs.
    """
    if w.g_idx is None:
        whole = w.group_size >= w.K or w.group_size % multiple == 0
        return Runs(None, w.group_size, None) if whole else None
    groups = w.groups()
    order = torch.argsort(groups, stable=True)
    ordered = groups[order]
    kept = None if bool((order[1:] > order[:-1]).all()) else order
    halves = [multiple << i for i in range(8, -1, -1)]
    for size in dict.fromkeys([w.group_size, *halves]):
        if size % multiple and size < w.K:
            continue
        first = ordered[::size]
        if torch.equal(first.repeat_interleave(size)[: w.K], ordered):
            return Runs(kept, size, first)
    return None


def reorder(qweight: Tensor, order: Tensor) -> Tensor:
    """Sequential words ``[K/8, N]`` with row ``order[k]`` in the place of row k."""
    return pack(unpack(qweight, 0).index_select(0, order), 0)


def undo(qweight: Tensor, order: Tensor) -> Tensor:
    """The inverse of :func:`reorder`."""
    codes = unpack(qweight, 0)
    out = torch.empty_like(codes)
    out[order.long()] = codes
    return pack(out, 0)
