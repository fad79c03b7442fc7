"""Groups along K: how large they are, what ``g_idx`` means, and the W4Tensor that follows.

Group size: the config's holds if ``ceil(K / group_size) == G``; otherwise K / G if it divides evenly, with a note that
names both numbers; otherwise the module is refused. The config's value is never used against the tensors.

``g_idx``: absent or ``k // group_size`` is sequential. All zero with several groups, or (compressed-tensors) any -1,
is a placeholder and means sequential. Negative numbers count from the end. Anything else is a real act-order, whatever
the config says about ``desc_act``: it stays as the file has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats.format import RowShard
from w4plugin.module_rules import Expected
from w4plugin.note import Note
from w4plugin.packing import NIBBLES
from w4plugin.tensor import W4Tensor


@dataclass(frozen=True, eq=False)
class Parts:
    """The pieces of a weight before its groups are settled; axes as in W4Tensor, leading E allowed.

    Attributes:
        qweight: int32 ``[*E, K/8, N]``, sequential.
        scales: ``[*E, G, N]``.
        zeros: uint8 ``[*E, G, N]`` true zero points, None for 8 everywhere.
        g_idx: ``[*E, K]`` as stored, any dtype, None when the file has none; the host's memory will do.
        unset: the value in ``g_idx`` that means "not initialised" (compressed-tensors: -1), None when there is none.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None = None
    unset: int | None = None


def size_from_shape(name: str, K: int, G: int, expected: Expected) -> tuple[int | None, tuple[Note, ...]]:
    """Rows in a group by K, G and the config alone.

    Returns:
        The size (None when nothing fits) and notes.
    """
    claimed = expected.group_size
    if claimed == -1 and G == 1:
        return K, ()
    if claimed is not None and claimed != -1 and math.ceil(K / claimed) == G:
        return claimed, ()
    if K % G:
        return None, ()
    size = K // G
    if claimed is None:
        return size, (Note("info", name, f"group_size {size} follows from K = {K} and {G} groups"),)
    text = f"the config says group_size {claimed}, but K = {K} with {G} groups makes it {size}; the tensors win"
    return size, (Note("conflict", name, text),)


def assemble(name: str, parts: Parts, expected: Expected, shard: RowShard | None) -> tuple[W4Tensor, tuple[Note, ...]]:
    """Settle the groups of one module.

    Args:
        name: for messages.
        parts: pieces of the module, or of a row shard of it.
        expected: the config's values for this module.
        shard: which rows ``parts`` hold, when they are not all.

    Raises:
        CorruptError: ``g_idx`` does not fit, or values are out of range.
        UnsupportedError: no group size fits K and G.
    """
    K, G = parts.qweight.shape[-2] * NIBBLES, parts.scales.shape[-2]
    first, total = (0, K) if shard is None else (shard.first, shard.total)
    if not 0 <= first <= first + K <= total:
        raise CorruptError(name, got=f"rows {first}..{first + K} of {total}", wanted="a shard inside the layer")
    g_idx: Tensor | None = None
    notes: tuple[Note, ...] = ()
    if parts.g_idx is not None:
        shape = (*parts.qweight.shape[:-2], K)
        g_idx, notes = read_index(f"{name}.g_idx", parts.g_idx, shape, G, parts.unset)
    size, size_notes = _group_size(name, parts, g_idx, (first, K, total), expected)
    notes += size_notes
    lowest, groups = first // size, math.ceil(total / size)
    whole = groups == G
    if not whole and (shard is None or (g_idx is not None and not _sequential(g_idx, size, first))):
        raise CorruptError(f"{name}.scales", got=f"{G} groups", wanted=f"{groups} for K = {total} in groups of {size}")
    if g_idx is None or _sequential(g_idx, size, first):
        return _sequential_weight(parts, size, (first, K), lowest if whole else 0), notes
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= G:
        raise CorruptError(f"{name}.g_idx", got=f"groups {low}..{high}", wanted=f"0..{G - 1}, one for each scale")
    if expected.desc_act is False:
        text = "the config says desc_act false, but g_idx is a real act-order; the tensor wins"
        notes += (Note("conflict", f"{name}.g_idx", text),)
    g_idx = g_idx.contiguous().to(parts.qweight.device)
    return W4Tensor(parts.qweight, parts.scales, parts.zeros, g_idx, size), notes


def _sequential_weight(parts: Parts, size: int, rows: tuple[int, int], lowest: int) -> W4Tensor:
    """The weight with sequential groups; a shard that starts inside a group gets an index of its own."""
    first, K = rows
    begin, end = first // size, math.ceil((first + K) / size)
    take = slice(lowest, lowest + end - begin)
    scales, zeros = parts.scales[..., take, :], None if parts.zeros is None else parts.zeros[..., take, :]
    g_idx = None
    if first % size and end - begin > 1:
        local = (torch.arange(first, first + K, device=parts.qweight.device) // size - begin).to(torch.int32)
        g_idx = local.expand(*parts.qweight.shape[:-2], K).contiguous()
    return W4Tensor(parts.qweight, scales.contiguous(), None if zeros is None else zeros.contiguous(), g_idx, size)


def read_index(
    where: str, stored: Tensor, shape: tuple[int, ...], G: int, unset: int | None = None
) -> tuple[Tensor | None, tuple[Note, ...]]:
    """A stored ``g_idx`` as int32 with negative numbers resolved; None when it is only a placeholder.

    Raises:
        CorruptError: it counts rows that the weight does not hold, or names groups by fractions.
    """
    K = shape[-1]
    if stored.numel() == 0:
        return None, (Note("info", where, "empty; groups are sequential"),)
    if stored.ndim and stored.shape[-1] > K:
        missing = stored.shape[-1] - K
        raise CorruptError(
            where,
            got=f"{stored.shape[-1]} rows, {missing} more than qweight holds",
            wanted=f"{K}",
            todo=f"the packer dropped the last {missing} rows of the weight; quantise the model again",
        )
    if stored.shape != shape:
        raise CorruptError(where, got=str(list(stored.shape)), wanted=str(list(shape)))
    index = stored.to(torch.int64)
    if stored.is_floating_point() and not bool((index == stored).all()):
        raise CorruptError(where, got="fractions", wanted="whole numbers")
    if stored.dtype == torch.bool or stored.is_complex():
        raise CorruptError(where, got=str(stored.dtype), wanted="integers")
    if unset is not None and bool((index == unset).any()):
        return None, (Note("info", where, f"holds {unset} (not initialised); groups are sequential"),)
    notes: tuple[Note, ...] = ()
    if bool((index < 0).any()):
        index = torch.where(index < 0, index + G, index)
        notes = (Note("warning", where, f"negative group numbers; {G} was added to them"),)
    if bool((index < 0).any()) or int(index.max()) >= 2**31:
        raise CorruptError(where, got=f"groups {int(index.min())}..{int(index.max())}", wanted=f"0..{G - 1}")
    if G > 1 and not bool(index.any()) and K > 1:
        notes += (Note("warning", where, f"all zero with {G} groups: a placeholder; groups are sequential"),)
        return None, notes
    return index.to(torch.int32), notes


def _group_size(
    name: str, parts: Parts, g_idx: Tensor | None, rows: tuple[int, int, int], expected: Expected
) -> tuple[int, tuple[Note, ...]]:
    first, K, total = rows
    G = parts.scales.shape[-2]
    if first or total != K:  # the scales may be whole or cut: only the config can say how rows fall into groups
        claimed = total if expected.group_size == -1 else expected.group_size
        if claimed is None:
            if total % G:
                raise UnsupportedError(name, got="a row shard without a group_size", wanted="a stated group_size")
            return total // G, ()
        touched = math.ceil((first + K) / claimed) - first // claimed
        if G in (math.ceil(total / claimed), touched):
            return claimed, ()
        size, notes = size_from_shape(name, total, G, expected)
    else:
        size, notes = size_from_shape(name, K, G, expected)
    return _settled(name, g_idx, (first, K, total), G, size, notes, expected)


def _settled(
    name: str,
    g_idx: Tensor | None,
    rows: tuple[int, int, int],
    G: int,
    size: int | None,
    notes: tuple[Note, ...],
    expected: Expected,
) -> tuple[int, tuple[Note, ...]]:
    """The group size that shapes and config suggest, corrected by what ``g_idx`` spells.

    Raises:
        UnsupportedError: nothing fits.
    """
    first, K, total = rows
    if g_idx is not None:
        own = _uniform_size(g_idx)
        if own is not None and own != size and math.ceil(K / own) == G and (first, total) == (0, K):
            text = f"g_idx is sequential in groups of {own}, where the config and shapes suggest {size}; g_idx wins"
            return own, (Note("conflict", f"{name}.g_idx", text),)
        if size is None:  # with an explicit index the size only informs
            text = f"no group size fits K = {total} and {G} groups; g_idx names each row's group"
            return math.ceil(total / G), (Note("warning", name, text),)
    if size is None:
        said = "nothing" if expected.group_size is None else f"group_size {expected.group_size}"
        raise UnsupportedError(
            name,
            got=f"K = {total} in {G} groups while the config says {said}",
            wanted="a group size g with ceil(K / g) groups",
            todo="state the right group_size in the checkpoint's quantization_config",
        )
    return size, notes


def group_index(
    name: str, stored: Tensor | None, K: int, G: int, expected: Expected, device: torch.device
) -> tuple[Tensor, tuple[Note, ...]]:
    """int64 ``[K]``, the group of each row of a whole module, by the same rules as :func:`assemble`.

    Raises:
        CorruptError: ``g_idx`` does not fit.
        UnsupportedError: no group size fits.
    """
    index, notes = (None, ()) if stored is None else read_index(f"{name}.g_idx", stored, (K,), G)
    size, more = size_from_shape(name, K, G, expected)
    size, more = _settled(name, index, (0, K, K), G, size, more, expected)
    if index is None:
        return torch.arange(K, device=device) // size, notes + more
    if int(index.max()) >= G:
        raise CorruptError(f"{name}.g_idx", got=f"group {int(index.max())}", wanted=f"0..{G - 1}, one for each scale")
    return index.long().to(device), notes + more


def _uniform_size(g_idx: Tensor) -> int | None:
    """The size of equal sequential groups if that is what the index spells, else None."""
    row = g_idx.reshape(-1, g_idx.shape[-1])[0]
    if int(row[0]) != 0:
        return None
    size = int((row == 0).sum())
    return size if _sequential(g_idx, size, 0) else None


def _sequential(g_idx: Tensor, size: int, first: int) -> bool:
    rows = torch.arange(first, first + g_idx.shape[-1], device=g_idx.device, dtype=torch.int32) // size
    return bool((g_idx == rows).all())
