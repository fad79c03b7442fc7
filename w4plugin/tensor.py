"""W4Tensor, the one type in the middle: every checkpoint format decodes to it, every writer and kernel takes it.

    W[k, n] = (q[k, n] - zero[g, n]) * scale[g, n]        g = g_idx[k] if present else k // group_size

K is in_features, N out_features, G groups, E experts. The packed word order is the sequential one of
:mod:`w4plugin.packing`: nibble j of ``qweight[r, n]`` is row ``8r + j``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError, UsageError
from w4plugin.packing import NIBBLES, unpack

SYMMETRIC_ZERO = 8
"""The zero point of symmetric 4-bit quantisation: codes 0..15 stand for -8..7."""

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class W4Tensor:
    """One INT4 group-quantised weight, or a stack of E of them.

    Attributes:
        qweight: int32 ``[*E, K/8, N]``.
        scales: float16, bfloat16 or float32 ``[*E, G, N]``, in the dtype the checkpoint stores.
        zeros: uint8 ``[*E, G, N]``, true zero points 0..15; None means symmetric, 8 everywhere.
        g_idx: int32 ``[*E, K]``, the group of each row; None means sequential groups.
        group_size: rows in a group, never -1. With ``g_idx`` it is the nominal size and only informs.

    Raises:
        CorruptError: shapes, dtypes or values contradict each other; checked once, here.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    group_size: int

    def __post_init__(self) -> None:
        self._check_words()
        self._check_groups()
        self._check_values()

    def _check_words(self) -> None:
        if self.qweight.dtype != torch.int32 or self.qweight.ndim not in (2, 3):
            raise CorruptError("qweight", got=_what(self.qweight), wanted="int32 [K/8, N] or [E, K/8, N]")
        if min(self.qweight.shape) < 1:
            raise CorruptError("qweight", got=_what(self.qweight), wanted="at least 8 rows and one column")
        if self.group_size < 1:
            raise CorruptError("group_size", got=str(self.group_size), wanted="a resolved size, at least 1")

    def _check_groups(self) -> None:
        lead, n = self.qweight.shape[:-2], self.N
        if (
            self.scales.dtype not in SCALE_DTYPES
            or self.scales.shape[:-2] != lead
            or self.scales.ndim != self.qweight.ndim
        ):
            raise CorruptError(
                "scales", got=_what(self.scales), wanted=f"float16, bfloat16 or float32 {[*lead, 'G', n]}"
            )
        if self.scales.shape[-1] != n:
            raise CorruptError("scales", got=f"{self.scales.shape[-1]} columns", wanted=f"{n}, as in qweight")
        if self.zeros is not None and (self.zeros.dtype != torch.uint8 or self.zeros.shape != self.scales.shape):
            raise CorruptError("zeros", got=_what(self.zeros), wanted=f"uint8 {list(self.scales.shape)}, as scales")
        if self.g_idx is None:
            groups = math.ceil(self.K / self.group_size)
            if groups != self.G:
                raise CorruptError(
                    "scales",
                    got=f"{self.G} groups",
                    wanted=f"{groups} for K = {self.K}, group_size = {self.group_size}",
                )
        elif self.g_idx.dtype != torch.int32 or self.g_idx.shape != (*lead, self.K):
            raise CorruptError("g_idx", got=_what(self.g_idx), wanted=f"int32 {[*lead, self.K]}")

    def _check_values(self) -> None:
        devices = {t.device for t in self.tensors().values()}
        if len(devices) > 1:
            raise UsageError("W4Tensor", got=f"tensors on {sorted(map(str, devices))}", wanted="one device")
        if self.qweight.is_meta:
            return
        if self.scales.numel() and not math.isfinite(_largest(self.scales)):
            bad = int((~torch.isfinite(self.scales)).sum())
            raise CorruptError("scales", got=f"{bad} values that are NaN or infinite", wanted="finite scales")
        if self.zeros is not None and int(self.zeros.max()) > 15:
            raise CorruptError("zeros", got=f"a zero point of {int(self.zeros.max())}", wanted="0..15")
        if self.g_idx is not None:
            low, high = int(self.g_idx.min()), int(self.g_idx.max())
            if low < 0 or high >= self.G:
                raise CorruptError("g_idx", got=f"values {low}..{high}", wanted=f"0..{self.G - 1}")

    @property
    def K(self) -> int:  # noqa: N802
        """in_features."""
        return self.qweight.shape[-2] * NIBBLES

    @property
    def N(self) -> int:  # noqa: N802
        """out_features."""
        return self.qweight.shape[-1]

    @property
    def G(self) -> int:  # noqa: N802
        """Groups along K."""
        return self.scales.shape[-2]

    @property
    def experts(self) -> int | None:
        """E of a stack, None of a single weight."""
        return self.qweight.shape[0] if self.qweight.ndim == 3 else None

    @property
    def symmetric(self) -> bool:
        """True when every zero point is 8 by construction (``zeros`` is None)."""
        return self.zeros is None

    @property
    def device(self) -> torch.device:
        return self.qweight.device

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by field name."""
        fields = {"qweight": self.qweight, "scales": self.scales, "zeros": self.zeros, "g_idx": self.g_idx}
        return {name: t for name, t in fields.items() if t is not None}

    def _with(self, tensors: dict[str, Tensor]) -> W4Tensor:
        fields: dict[str, Any] = {**tensors}
        return replace(self, **fields)

    def nbytes(self) -> int:
        """Bytes of the tensors held, zeros as one byte each."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def to(self, device: torch.device | str) -> W4Tensor:
        """The same weight on another device."""
        return self._with({name: t.to(device) for name, t in self.tensors().items()})

    def groups(self) -> Tensor:
        """int64 ``[*E, K]``, the group of each row."""
        if self.g_idx is not None:
            return self.g_idx.long()
        rows = torch.arange(self.K, device=self.device) // self.group_size
        return rows.expand(*self.qweight.shape[:-2], -1)

    def full_zeros(self) -> Tensor:
        """uint8 ``[*E, G, N]``: ``zeros``, or 8 everywhere when symmetric."""
        if self.zeros is not None:
            return self.zeros
        return torch.full(self.scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8, device=self.device)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain weight.

        The product is formed exactly (float32 holds |q - z| <= 15 times a 16-bit float's significand; float64 holds it
        for float32 scales) and rounded once to ``dtype``, so the result is the nearest value the dtype can hold.

        Args:
            dtype: float16, bfloat16, float32 or float64; None means the dtype of ``scales``.

        Returns:
            ``[*E, K, N]``.
        """
        exact = torch.float64 if self.scales.dtype == torch.float32 else torch.float32
        index = self.groups().unsqueeze(-1).expand(*self.qweight.shape[:-2], self.K, self.N)
        weight = unpack(self.qweight, -2).to(exact)
        if self.zeros is None:
            weight -= SYMMETRIC_ZERO
        else:
            weight -= self.zeros.to(exact).gather(-2, index)
        weight *= self.scales.to(exact).gather(-2, index)
        return rounded_once(weight, dtype or self.scales.dtype)

    def shard_n(self, start: int, stop: int) -> W4Tensor:
        """Columns ``start:stop``, as a column-parallel rank holds them."""
        _check_range("shard_n", start, stop, self.N)
        cut = {name: t[..., start:stop].contiguous() for name, t in self.tensors().items() if name != "g_idx"}
        return self._with(cut)

    def shard_k(self, start: int, stop: int) -> W4Tensor:
        """Rows ``start:stop``, as a row-parallel rank holds them.

        A shard whose edge cuts a group keeps that group's scale on both sides and gets a local ``g_idx``. Act-order
        keeps all scales, because its rows may use any of them.
        """
        _check_range("shard_k", start, stop, self.K)
        if start % NIBBLES or stop % NIBBLES:
            raise UnsupportedError(
                "shard_k", got=f"rows {start}:{stop}", wanted="multiples of 8, since eight rows share a word"
            )
        qweight = self.qweight[..., start // NIBBLES : stop // NIBBLES, :].contiguous()
        if self.g_idx is not None:
            return replace(self, qweight=qweight, g_idx=self.g_idx[..., start:stop].contiguous())
        first, last = start // self.group_size, math.ceil(stop / self.group_size)
        g_idx = None
        if start % self.group_size and last - first > 1:
            local = self.groups()[..., start:stop] - first
            g_idx = local.to(torch.int32).contiguous()
        return replace(
            self,
            qweight=qweight,
            scales=self.scales[..., first:last, :].contiguous(),
            zeros=None if self.zeros is None else self.zeros[..., first:last, :].contiguous(),
            g_idx=g_idx,
        )

    def regroup(self, group_size: int) -> W4Tensor:
        """The same weight in smaller sequential groups of ``group_size``: scales repeat, nothing changes."""
        if group_size == self.group_size:
            return self
        if self.g_idx is not None or self.group_size % group_size:
            raise UnsupportedError(
                "regroup", got=f"group_size {self.group_size} to {group_size}", wanted="sequential groups and a divisor"
            )
        rows = torch.arange(0, self.K, group_size, device=self.device) // self.group_size
        zeros = None if self.zeros is None else self.zeros.index_select(-2, rows)
        return replace(self, scales=self.scales.index_select(-2, rows), zeros=zeros, group_size=group_size)

    @staticmethod
    def cat_n(parts: Sequence[W4Tensor]) -> W4Tensor:
        """Weights side by side along N, as a fused q/k/v or gate/up layer holds them.

        Different sequential group sizes are brought to their greatest common divisor; a symmetric part beside an
        asymmetric one gets explicit zeros of 8.

        Raises:
            UnsupportedError: parts differ in K, ``g_idx`` or the dtype of ``scales``; no single tensor can hold them.
        """
        if len({p.K for p in parts}) != 1 or len({p.experts for p in parts}) != 1:
            raise UnsupportedError("cat_n", got=f"K = {[p.K for p in parts]}", wanted="the same K in every part")
        if len({p.scales.dtype for p in parts}) != 1:
            raise UnsupportedError("cat_n", got=f"scales {[p.scales.dtype for p in parts]}", wanted="one dtype")
        if any(p.g_idx is not None for p in parts):
            first = parts[0].groups()
            if not all(p.G == parts[0].G and torch.equal(p.groups(), first) for p in parts):
                raise UnsupportedError("cat_n", got="parts with different g_idx", wanted="the same g_idx in every part")
        else:
            shared = math.gcd(*(p.group_size for p in parts))
            parts = [p.regroup(shared) for p in parts]
        zeros = None
        if any(p.zeros is not None for p in parts):
            zeros = torch.cat([p.full_zeros() for p in parts], -1)
        return replace(
            next((p for p in parts if p.g_idx is not None), parts[0]),
            qweight=torch.cat([p.qweight for p in parts], -1),
            scales=torch.cat([p.scales for p in parts], -1),
            zeros=zeros,
        )

    @staticmethod
    def stack_experts(parts: Sequence[W4Tensor]) -> W4Tensor:
        """E single weights of equal shape as one tensor with a leading E axis.

        Raises:
            UnsupportedError: parts differ in shape, group size or the dtype of ``scales``.
        """
        shapes = {(p.K, p.N, p.G, p.group_size, p.scales.dtype) for p in parts}
        if len(shapes) != 1 or any(p.experts is not None for p in parts):
            raise UnsupportedError(
                "stack_experts", got=f"{len(shapes)} kinds of experts", wanted="equal K, N and groups"
            )
        zeros = g_idx = None
        if any(p.zeros is not None for p in parts):
            zeros = torch.stack([p.full_zeros() for p in parts])
        if any(p.g_idx is not None for p in parts):
            g_idx = torch.stack([p.groups().to(torch.int32) for p in parts])
        return W4Tensor(
            qweight=torch.stack([p.qweight for p in parts]),
            scales=torch.stack([p.scales for p in parts]),
            zeros=zeros,
            g_idx=g_idx,
            group_size=parts[0].group_size,
        )

    def expert(self, index: int) -> W4Tensor:
        """One weight of a stack."""
        if self.experts is None:
            raise UsageError("expert", got="a single weight", wanted="a stack of experts")
        return self._with({name: t[index] for name, t in self.tensors().items()})


def rounded_once(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """``exact`` in ``dtype``, each value the nearest one; ties go to the even one.

    torch turns float64 into a 16-bit float by way of float32, which rounds twice: 1 + 2**-11 + 2**-40 becomes a tie in
    float32 and then 1, not 1 + 2**-10. A float32 that was rounded to odd (towards 0, with its last bit set if anything
    was cut off) never looks like a tie.
    """
    if exact.dtype != torch.float64 or dtype not in (torch.float16, torch.bfloat16):
        return exact.to(dtype)
    near = exact.to(torch.float32)
    back = near.to(torch.float64)
    bits = near.view(torch.int32) - (back.abs() > exact.abs()).to(torch.int32)
    return (bits | (back != exact).to(torch.int32)).view(torch.float32).to(dtype)


def _largest(t: Tensor) -> float:
    """The largest magnitude, NaN where there is a NaN: one pass and one answer, where isfinite takes four."""
    return float(torch.linalg.vector_norm(t, math.inf, dtype=torch.float32))


def _what(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


def _check_range(where: str, start: int, stop: int, size: int) -> None:
    if not 0 <= start < stop <= size:
        raise UsageError(where, got=f"{start}:{stop}", wanted=f"a range inside 0:{size}")
