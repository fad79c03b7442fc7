"""The portable backend of experts: tokens sorted by expert on the device, two grouped Triton kernels, and a sum.

Fragment order of every expert, E leading. Gate and up columns alternate every 8, so one tile holds both and the
activation is part of the first kernel. Columns of gate_up stand in the order of down's rows, so act-order costs the
second product nothing; the first gathers x once per routed row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from w4plugin.errors import UsageError
from w4plugin.kernels import device, portable
from w4plugin.kernels.backend import Groups, Target
from w4plugin.kernels.fragments import COLUMNS, ROWS, blocks, from_fragments, to_fragments
from w4plugin.kernels.moe import rows, tile_choice
from w4plugin.kernels.moe.backend import Call, ExpertsBackend, Kept, PreparedExperts
from w4plugin.kernels.moe.rows import Rows
from w4plugin.kernels.moe.tile_choice import Layout, Load, power_of_two
from w4plugin.kernels.tiles import Problem, Tile
from w4plugin.tensor import W4Tensor

PIECE = 2**26
"""Words put into fragment order at a time."""


# ---------------------------------------------------------------------------------------------------- choice


def why_not(target: Target, weights: tuple[W4Tensor, W4Tensor] | None) -> str | None:
    against = portable.why_not(target, None)
    if against is not None or weights is None:
        return against
    for w in weights:
        # padding at most doubles a weight's rows
        if max(2 * w.K * w.N // 8, 2 * w.G * w.N) >= 2**31:
            return f"K * N = {w.K * w.N} passes the kernels' 32-bit offsets inside an expert"
    return None


# ---------------------------------------------------------------------------------------------------- order


def prepare(gate_up: W4Tensor, down: W4Tensor, gated: bool) -> PreparedExperts:
    """Fragment order; ``gate_up_g_idx`` int32 ``[E, K']`` is the gather of x, -1 for padding."""
    first, second = rows.rows_of(gate_up), rows.rows_of(down)
    experts = int(down.qweight.shape[0])
    columns = rows.columns_of(second.order, down.K, gated, experts, down.device)
    up, up_scales, up_zeros = _ordered(gate_up, first, columns)
    dn, dn_scales, dn_zeros = _ordered(down, second, None)
    prepared = PreparedExperts(
        backend="portable",
        gate_up=up,
        gate_up_scales=up_scales,
        gate_up_zeros=up_zeros,
        gate_up_g_idx=None if first.order is None else first.order.to(torch.int32).contiguous(),
        down=dn,
        down_scales=dn_scales,
        down_zeros=dn_zeros,
        down_g_idx=None,
        E=experts,
        H=gate_up.K,
        I=down.K,
        gate_up_group_size=first.size,
        down_group_size=second.size,
        gated=gated,
        kept=_kept(gate_up, down, first, second),
    )
    if down.device.type == "cuda":
        # A kernel launched early (Tile.pdl) reads weights before the kernel ahead of it is known to have ended.
        torch.cuda.current_stream(down.device).synchronize()
    return prepared


def _kept(gate_up: W4Tensor, down: W4Tensor, first: Rows, second: Rows) -> Kept | None:
    """What the prepared order does not hold: groups as they came, where rows or runs changed them."""
    changed = [w.g_idx is not None or r.group is not None for w, r in ((gate_up, first), (down, second))]
    if not any(changed):
        return None
    up, dn = (
        Groups(w.scales, w.zeros, w.g_idx, w.group_size) if new else None
        for w, new in zip((gate_up, down), changed, strict=True)
    )
    return Kept(up, dn, first.order, second.order)


def _ordered(w: W4Tensor, r: Rows, columns: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(words in fragment order ``[E, ceil(K'/64), ceil(N'/16), 128]``, scales, zeros ``[E, runs, N']``)."""
    scales, zeros = r.spread(w.scales), None if w.zeros is None else r.spread(w.zeros)
    words = []
    step = max(1, PIECE // (w.qweight[0].numel()))
    for first in range(0, w.qweight.shape[0], step):
        part = slice(first, first + step)
        mine = Rows(None if r.order is None else r.order[part], r.size, None)
        z = None if zeros is None else zeros[part]
        sequential = rows.sort_rows(w.qweight[part], z, mine)
        if columns is not None:
            cut = columns if columns.shape[0] == 1 else columns[part]
            sequential = rows.take_columns(sequential, cut)
            z = None if z is None else rows.take_columns(z, cut)
        words.append(_fragments(sequential, None if z is None else z[:, -1]))
    if columns is not None:
        scales = rows.take_columns(scales, columns)
        zeros = None if zeros is None else rows.take_columns(zeros, columns)
    return (
        torch.cat(words) if len(words) > 1 else words[0],
        portable._aligned(scales),
        None if zeros is None else portable._aligned(zeros),
    )


def _fragments(qweight: Tensor, pad_codes: Tensor | None) -> Tensor:
    """Fragment order of a stack; an expert's rows are whole blocks of 64, or it is ordered by itself."""
    experts, words, n = qweight.shape
    if words % (ROWS // 8) == 0:
        ordered = to_fragments(qweight.reshape(experts * words, n), None)
        return ordered.view(experts, -1, *ordered.shape[1:])
    return torch.stack([to_fragments(q, None if pad_codes is None else pad_codes[e]) for e, q in enumerate(qweight)])


def restore(p: PreparedExperts) -> tuple[W4Tensor, W4Tensor]:
    """The weights that :func:`prepare` was given."""
    kept = p.kept or Kept(None, None, None, None)
    columns = rows.columns_of(kept.down_order, p.I, p.gated, p.E, p.down.device)
    n = p.I * (2 if p.gated else 1)
    up = _sequential(p.gate_up, p.H, p.gate_up_scales.shape[2], kept.gate_up_order)
    up = rows.give_columns(up, columns, n)
    dn = _sequential(p.down, p.I, p.H, kept.down_order)
    if kept.gate_up is not None:
        g = kept.gate_up
        first = W4Tensor(up, g.scales, g.zeros, g.g_idx, g.group_size)
    else:
        scales = rows.give_columns(p.gate_up_scales, columns, n)
        zeros = None if p.gate_up_zeros is None else rows.give_columns(p.gate_up_zeros, columns, n)
        first = W4Tensor(up, scales, zeros, None, p.gate_up_group_size)
    if kept.down is not None:
        g = kept.down
        return first, W4Tensor(dn, g.scales, g.zeros, g.g_idx, g.group_size)
    return first, W4Tensor(dn, p.down_scales, p.down_zeros, None, p.down_group_size)


def _sequential(words: Tensor, k: int, n: int, order: Tensor | None) -> Tensor:
    length = k if order is None else order.shape[1]
    out = torch.stack([from_fragments(words[e], length, n) for e in range(words.shape[0])])
    return out if order is None else rows.unsort_rows(out, order, k)


# ---------------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True)
class Sizes:
    """Everything a call's kernels depend on.

    Attributes:
        tokens, topk, held: T, experts a token, experts here.
        x, h: features of x as the first product reads it, of its result as the second does (padding included).
        hidden: features of the result.
        first, second: the two products.
    """

    tokens: int
    topk: int
    held: int
    x: int
    h: int
    hidden: int
    first: Problem
    second: Problem

    @property
    def load(self) -> Load:
        return Load(self.tokens * self.topk, self.held)


def sizes(x: Tensor, topk: int, call: Call) -> Sizes:
    """The sizes of a call."""
    where = device.target(x.device, x.dtype)
    sms = device.multiprocessors(where.device)
    n = call.gate_up_scales.shape[2]
    h = n // 2 if call.gated else n
    k = x.shape[1] if call.gate_up_g_idx is None else call.gate_up_g_idx.shape[1]

    def problem(n: int, k: int, group_size: int, scales: Tensor) -> Problem:
        return Problem(1, n, k, 0 if group_size >= k else group_size, scales.dtype == x.dtype, where.arch, sms)

    return Sizes(
        tokens=x.shape[0],
        topk=topk,
        held=call.down.shape[0],
        x=k,
        h=h,
        hidden=x.shape[1],
        first=problem(n, k, call.gate_up_group_size, call.gate_up_scales),
        second=problem(x.shape[1], h, call.down_group_size, call.down_scales),
    )


def apply(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, call: Call) -> Tensor:
    """x ``[T, H]`` float16 or bfloat16 through prepared experts -> ``[T, H]``."""
    _check(x, call)
    s = sizes(x, topk_ids.shape[1], call)
    layout = tile_choice.choose(s.load, s.first, s.second)
    return run(s, layout, x, topk_weights, topk_ids, call)


def run(s: Sizes, layout: Layout, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, call: Call) -> Tensor:
    """As :func:`apply`, in given tiles."""
    from w4plugin.kernels.moe import kernels

    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
    pairs, where = s.load.pairs, call.expert_map
    known = s.held if where is None else where.shape[0]
    routed = (pairs, known, s.held)
    pdl = layout.first.pdl
    extra = {"launch_pdl": True} if pdl else {}
    share = s.topk
    out = x.new_empty((s.tokens, s.hidden))
    with device.current(x.device):
        if call.gate_up_g_idx is not None:
            gathered = x.new_empty((pairs, s.x))
            grid = (pairs, blocks(s.x, 1024))
            kernels.gather_kernel[grid](
                x, call.gate_up_g_idx, ids, where, gathered, *routed, s.x, x.stride(0), share, 1024,
                where is not None, pdl, **extra,
            )  # fmt: skip
            x, share = gathered, 1
        slots = experts = None
        if not layout.pairs:
            slots, experts = _sort(s, layout, ids, where, known, extra)
        h = x.new_empty((pairs, s.h))
        y = torch.empty((pairs, s.hidden), dtype=torch.float32, device=x.device)
        m = pairs if layout.pairs else s.load.blocks(layout.first.bm)
        for first in (True, False):
            tile, p = (layout.first, s.first) if first else (layout.second, s.second)
            words, scales, zeros = (
                (call.gate_up, call.gate_up_scales, call.gate_up_zeros)
                if first
                else (call.down, call.down_scales, call.down_zeros)
            )
            source, target = (x, h) if first else (h, y)
            chosen = constants(p, tile, layout, call, asym=zeros is not None, share=share if first else 1, first=first)
            kernels.product_kernel[(m, blocks(p.n, tile.bn))](
                source, words, scales, zeros, ids, where, slots, experts, weights, target, *routed,
                p.n, p.k, scales.shape[1], source.stride(0) // 8, words.shape[1], words.shape[2],
                *chosen.values(), **portable.options(tile),
            )  # fmt: skip
        kernels.sum_kernel[(s.tokens, blocks(s.hidden, 1024))](
            y, ids, where, out, *routed, s.hidden, s.topk, 1024, where is not None, pdl,
            portable.unpack_mode(s.first.arch), **extra,
        )  # fmt: skip
    return out


def _sort(
    s: Sizes, layout: Layout, ids: Tensor, where: Tensor | None, known: int, extra: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(slots ``[blocks * BM]``, experts ``[blocks]``): the pairs sorted by expert."""
    from w4plugin.kernels.moe import kernels

    bm, pairs = layout.first.bm, s.load.pairs
    chunk = tile_choice.chunk(pairs)
    most, chunks = s.load.blocks(bm), blocks(pairs, chunk)
    width = max(16, power_of_two(s.held + 1))
    slots = torch.empty(most * bm, dtype=torch.int32, device=ids.device)
    experts = torch.empty(most, dtype=torch.int32, device=ids.device)
    counts = None
    if chunks > 1:
        counts = torch.empty(chunks, width, dtype=torch.int32, device=ids.device)
        kernels.count_kernel[(chunks,)](
            ids, where, counts, pairs, known, s.held, chunk, width, where is not None, num_warps=4
        )
    grid = (chunks + blocks(most, placed(width)),)
    kernels.place_kernel[grid](
        ids, where, counts, slots, experts, pairs, known, s.held, chunks, most, chunk, width, bm, placed(width),
        counts is not None, where is not None, bool(extra), num_warps=sort_warps(width), **extra,
    )  # fmt: skip
    return slots, experts


def sort_warps(width: int) -> int:
    """Warps of the sort for so many experts: their counts must fit the registers."""
    return 4 if width <= 256 else 8


def placed(width: int) -> int:
    """Blocks whose experts one program of the sort writes, comparing each with so many."""
    return max(8, min(64, 8192 // width))


def constants(
    p: Problem, tile: Tile, layout: Layout, call: Call, *, asym: bool, share: int, first: bool
) -> dict[str, Any]:
    """The constexpr arguments of ``product_kernel``, in its order."""
    shared = portable.constants(p, tile, asym=asym, bias=False)
    for name in ("SPLIT", "BY_ROW", "BIAS"):
        del shared[name]
    return shared | {
        "PAIRS": layout.pairs,
        "MAPPED": call.expert_map is not None,
        "SHARE": share,
        "SWIZZLE": 8 if tile.bm >= 64 else 0,
        "FIRST": first,
        "GATED": first and call.gated,
        "ACT": call.activation if first else "",
        "WEIGHTED": call.weight_on_input == first,
    }


# ---------------------------------------------------------------------------------------------------- errors


def _check(x: Tensor, call: Call) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise UsageError("w4a16_experts: x", got=portable._name(x.dtype), wanted="float16 or bfloat16")
    k = x.shape[1] if call.gate_up_g_idx is None else call.gate_up_g_idx.shape[-1]
    n = call.gate_up_scales.shape[-1]
    h = n // 2 if call.gated else n
    experts = call.down.shape[0]
    for name, words, scales, zeros, rows_, columns, size in (
        ("gate_up", call.gate_up, call.gate_up_scales, call.gate_up_zeros, k, n, call.gate_up_group_size),
        ("down", call.down, call.down_scales, call.down_zeros, h, x.shape[1], call.down_group_size),
    ):
        wanted = [experts, blocks(rows_, ROWS), blocks(columns, COLUMNS), 128]
        if words.dtype != torch.int32 or list(words.shape) != wanted or not words.is_contiguous():
            kind = "contiguous" if words.is_contiguous() else "strided"
            raise UsageError(
                f"w4a16_experts: {name}",
                got=f"{kind} {portable._name(words.dtype)} {list(words.shape)}",
                wanted=f"contiguous int32 {wanted}",
                todo="prepare_experts() makes it.",
            )
        groups = [experts, blocks(rows_, size), columns]
        if list(scales.shape) != groups or not scales.is_contiguous():
            raise UsageError(
                f"w4a16_experts: {name}_scales",
                got=f"{portable._name(scales.dtype)} {list(scales.shape)}",
                wanted=f"contiguous {groups} for K = {rows_} and group_size = {size}",
            )
        if zeros is not None and (
            list(zeros.shape) != groups or zeros.dtype != torch.uint8 or not zeros.is_contiguous()
        ):
            raise UsageError(
                f"w4a16_experts: {name}_zeros",
                got=f"{portable._name(zeros.dtype)} {list(zeros.shape)}",
                wanted=f"contiguous uint8 {groups}, as scales",
            )
    order = call.gate_up_g_idx
    if order is not None and (order.shape != (experts, k) or order.dtype != torch.int32 or not order.is_contiguous()):
        raise UsageError(
            "w4a16_experts: gate_up_g_idx",
            got=f"{portable._name(order.dtype)} {list(order.shape)}",
            wanted=f"contiguous int32 [{experts}, K]",
        )


BACKEND = ExpertsBackend("portable", why_not, prepare, restore, apply)
