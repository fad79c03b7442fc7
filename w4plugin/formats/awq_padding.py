"""Scales and zeros that AWQ's GEMV kernels want padded along the groups.

With ``G = K // group_size`` groups the packer allocates W words of zero points a column,

    W = ceil(ceil(G / 8) / m) * m        m = 1 for group_size >= 128, 2 for 64, 4 for 32

and 8 W scales, of which those from G on are 0. The group size cannot be read off the shapes: K = 1152 in groups of 128
gives G = 9 and W = 2, as any G from 9 to 16 does. So the config says it, and the padding is checked against it.
"""

from __future__ import annotations

import math

from torch import Tensor

from w4plugin.errors import CorruptError
from w4plugin.module_rules import Expected

SIZES = (128, 64, 32)
"""Group sizes that headers may suggest when the config's does not fit; with data at hand the padding itself tells."""

PAD = 8


def words(K: int, group_size: int) -> int | None:
    """W for K rows, None for a group size the packer does not know."""
    if group_size < 32 or K % group_size or (group_size < 128 and group_size not in (32, 64)):
        return None
    multiple = {32: 4, 64: 2}.get(group_size, 1)
    return math.ceil(math.ceil(K // group_size / PAD) / multiple) * multiple


def size_from_padding(K: int, W: int, expected: Expected) -> int | None:
    """The config's group size if W fits it, else the only one that fits, else None."""
    claimed = K if expected.group_size == -1 else expected.group_size
    if claimed is not None and words(K, claimed) == W:
        return claimed
    fitting = [size for size in SIZES if words(K, size) == W]
    return fitting[0] if len(fitting) == 1 else None


def true_groups(name: str, scales: Tensor, K: int, expected: Expected) -> int:
    """G of padded scales.

    Args:
        name: tensor, for messages.
        scales: ``[8 W, N]``, groups first.
        K: rows of the whole layer.
        expected: the config's values for the module.

    Raises:
        CorruptError: no group size fits the padding.
    """
    W = scales.shape[0] // PAD
    used = scales.ne(0).any(-1).nonzero()
    last = int(used.max()) + 1 if used.numel() else 0
    claimed = size_from_padding(K, W, expected)
    if claimed is not None and last in (0, K // claimed):  # 0: a layer that was never filled
        return K // claimed
    if last and K % last == 0 and words(K, K // last) == W:
        return last
    raise CorruptError(
        name,
        got=f"{scales.shape[0]} groups allocated and {last} used for K = {K}",
        wanted="0 in every scale from K // group_size on, with padding to match",
        todo="state the right group_size in the checkpoint's quantization_config",
    )
