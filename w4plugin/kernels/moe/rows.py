"""How rows of a stack of experts are brought into equal runs of one group, whatever their groups are.

Every expert has its own g_idx, and kernels want one shape for all: runs of a fixed number of rows that share a group.
Rows are sorted by group; where groups are irregular (act-order cut by tensor parallelism, odd group sizes) each group
is filled up with padding, rows of weight 0, to whole runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from w4plugin.packing import pack, unpack
from w4plugin.tensor import SYMMETRIC_ZERO, W4Tensor

RUN = 16
"""Rows that must share a group for a tile to take their scale at once: the K of one tensor-core instruction."""

RUNS = (128, 64, 32, RUN)
"""Runs that irregular groups are cut into: the longest that costs no padding, else 32 rows."""


@dataclass(frozen=True, eq=False)
class Rows:
    """An order of rows of each expert.

    Attributes:
        order: int64 ``[E, K']``, the row in the k-th place, -1 for padding; None where rows stay.
        size: rows in a run (the last may be shorter).
        group: int64 ``[E, ceil(K'/size)]``, the group of each run; None where run g is group g.
    """

    order: Tensor | None
    size: int
    group: Tensor | None

    def spread(self, values: Tensor) -> Tensor:
        """Scales or zeros ``[E, G, N]`` by run, ``[E, runs, N]``."""
        if self.group is None:
            return values
        return values.gather(1, self.group[..., None].expand(-1, -1, values.shape[-1]))


def rows_of(w: W4Tensor) -> Rows:
    """The order that a stack of experts is prepared in."""
    if w.g_idx is None and (w.group_size >= w.K or w.group_size % RUN == 0):
        return Rows(None, w.group_size, None)
    groups = w.groups()
    order = torch.argsort(groups, dim=1, stable=True)
    ordered = groups.gather(1, order)
    k = torch.arange(w.K, device=w.device)
    if (w.group_size >= w.K or w.group_size % RUN == 0) and bool((ordered == k // w.group_size).all()):
        kept = bool((order == k).all())
        return Rows(None if kept else order, w.group_size, None)
    counts = torch.zeros(groups.shape[0], w.G, dtype=torch.int64, device=w.device)
    counts.scatter_add_(1, groups, torch.ones_like(groups))
    free = [size for size in RUNS if _padded(counts, size) <= -(-w.K // 64) * 64]
    return _fill(order, ordered, counts, free[0] if free else 32)


def _padded(counts: Tensor, size: int) -> int:
    return int(((counts + size - 1) // size * size).sum(1).max())


def _fill(order: Tensor, ordered: Tensor, counts: Tensor, size: int) -> Rows:
    """Every group in whole runs; experts with fewer runs get runs of padding at the end."""
    whole = (counts + size - 1) // size * size
    start, first = whole.cumsum(1) - whole, counts.cumsum(1) - counts
    rank = torch.arange(order.shape[1], device=order.device) - first.gather(1, ordered)
    place = start.gather(1, ordered) + rank
    length = int(whole.sum(1).max())
    out = torch.full((order.shape[0], length), -1, dtype=torch.int64, device=order.device).scatter_(1, place, order)
    group = torch.zeros(order.shape[0], length // size, dtype=torch.int64, device=order.device)
    group.scatter_(1, place // size, ordered)
    return Rows(out, size, group)


def sort_rows(qweight: Tensor, zeros: Tensor | None, rows: Rows) -> Tensor:
    """Sequential words ``[E, K/8, N]`` in prepared order, ``[E, K'/8, N]``; zeros by run as :meth:`Rows.spread` gives
    them make padding's codes, whose weight is 0."""
    if rows.order is None:
        return qweight
    out = []
    for e in range(qweight.shape[0]):
        order = rows.order[e]
        codes = unpack(qweight[e], 0).index_select(0, order.clamp(0))
        if zeros is None:
            nothing = torch.full((1, 1), SYMMETRIC_ZERO, dtype=torch.uint8, device=codes.device)
        else:
            nothing = zeros[e].repeat_interleave(rows.size, 0)[: len(order)]
        out.append(pack(torch.where((order < 0)[:, None], nothing, codes), 0))
    return torch.stack(out)


def unsort_rows(qweight: Tensor, order: Tensor, k: int) -> Tensor:
    """The inverse: ``[E, K'/8, N]`` to ``[E, k/8, N]``."""
    out = []
    for e in range(qweight.shape[0]):
        codes = unpack(qweight[e], 0)
        there = order[e] >= 0
        natural = codes.new_empty(k, codes.shape[1])
        natural[order[e][there].long()] = codes[there]
        out.append(pack(natural, 0))
    return torch.stack(out)


def columns_of(order: Tensor | None, inner: int, gated: bool, experts: int, device: torch.device) -> Tensor:
    """The first product's columns in prepared order, int64 ``[E or 1, N']``, -1 for padding.

    They come in the order of down's rows, so that nothing is gathered between the products; gate and up alternate
    every 8 columns, so that one thread's share of a tile holds both.
    """
    if order is None:
        order = torch.arange(inner, device=device)[None]
    if not gated:
        return order
    eights = order.unflatten(1, (-1, 8))
    up = torch.where(eights < 0, -1, eights + inner)
    return torch.stack([eights, up], 2).flatten(1)


def take_columns(values: Tensor, columns: Tensor) -> Tensor:
    """``[E, R, N]`` to ``[E, R, N']``: columns in prepared order, padding 0."""
    if columns.shape[0] == 1 and int(columns.min()) >= 0:
        return values.index_select(2, columns[0])
    index = columns.clamp(0)[:, None].expand(values.shape[0], values.shape[1], -1)
    return values.gather(2, index).masked_fill_((columns < 0)[:, None], 0)


def give_columns(values: Tensor, columns: Tensor, n: int) -> Tensor:
    """The inverse: ``[E, R, N']`` to ``[E, R, n]``."""
    out = values.new_empty(*values.shape[:2], n)
    for e in range(values.shape[0]):
        source = columns[min(e, columns.shape[0] - 1)]
        there = source >= 0
        out[e][:, source[there].long()] = values[e][:, there]
    return out
