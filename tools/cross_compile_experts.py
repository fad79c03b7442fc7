"""The experts' kernels for :mod:`cross_compile`: every tile that can be chosen, compiled for a GPU that is not here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from w4plugin.kernels import portable, tiles
from w4plugin.kernels.moe import kernels, tile_choice
from w4plugin.kernels.moe import portable as experts
from w4plugin.kernels.moe.backend import Call
from w4plugin.kernels.moe.tile_choice import Layout, Load
from w4plugin.kernels.tiles import Problem, Tile

LAYERS = ((8, 2, 4096, 14336), (128, 8, 2048, 768), (64, 6, 2048, 1408), (32, 4, 2880, 2880))
"""(experts, topk, H, I) of Mixtral 8x7B, Qwen3 30B A3B, DeepSeek V2 Lite and of an odd size."""
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
UNALIGNED = ("P", "known", "held", "most", "chunks", "stride")
"""Integers that are not known to be multiples of 16."""
NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

Build = Callable[[Any, dict[str, str | None], dict[str, Any], str, dict[str, Any]], Any]


@dataclass(frozen=True)
class Variant:
    """One compilation of the product kernel."""

    tile: Tile
    first: bool
    pairs: int
    k: int = 4096
    dtype: str = "fp16"
    scales: str = "fp16"
    asym: bool = True
    group: int = 128
    gated: bool = True
    activation: str = "silu"


def variants(arch: str, sms: int) -> list[Variant]:
    """Each tile, in turn in float16 and bfloat16, with and without zeros; each kind of group and activation once."""
    found: dict[tuple[Tile, bool, int], int] = {}
    for (held, topk, hidden, inner), tokens in itertools.product(LAYERS, TOKENS):
        one = Problem(1, 2 * inner, hidden, 128, True, arch, sms)
        two = Problem(1, hidden, inner, 128, True, arch, sms)
        layout = tile_choice.choose(Load(tokens * topk, held), one, two)
        pairs = min(layout.pairs, 16)  # one of those that compare
        found.setdefault((layout.first, True, pairs), hidden)
        found.setdefault((layout.second, False, pairs), inner)
    out = []
    for i, ((tile, first, pairs), k) in enumerate(found.items()):
        dtype = "fp16" if i % 4 in (0, 3) else "bf16"
        out.append(Variant(tile, first, pairs, k, dtype, dtype, asym=i % 4 in (0, 1)))
    small, large = out[0], max(out, key=lambda v: v.tile.bm if v.first else 0)
    for group in (0, 16, 32, 64):
        for v in (small, large):
            p = Problem(v.tile.bm, 4096, v.k, group, True, arch, sms)
            out.append(replace(v, tile=replace(tiles.fit(v.tile, p), split=1), group=group))
    out.append(replace(small, pairs=tile_choice.INLINE))
    out.append(replace(small, dtype="bf16", scales="fp32"))
    out.append(replace(small, gated=False, activation="relu2"))
    out.extend(replace(small, activation=activation) for activation in ("gelu", "gelu_tanh"))
    return out


def compile_variant(v: Variant, arch: str, sms: int, build: Build) -> Any:
    """The compiled kernel, with the constants that a call would give it."""
    p = Problem(v.tile.bm, 4096, v.k, v.group, v.scales == v.dtype, arch, sms)
    nothing = torch.empty(0)
    call = Call(
        nothing, nothing, None, None, nothing, nothing, None, None, None, 4096, v.group, v.group, v.gated,
        v.activation, False,
    )  # fmt: skip
    layout = Layout(v.tile, v.tile, v.pairs)
    constants = experts.constants(p, v.tile, layout, call, asym=v.asym, share=8 if v.first else 1, first=v.first)
    pointers = {
        "x_ptr": v.dtype,
        "words_ptr": "i32",
        "scales_ptr": v.scales,
        "zeros_ptr": "u8" if v.asym else None,
        "ids_ptr": "i32",
        "map_ptr": None,
        "slots_ptr": None if v.pairs else "i32",
        "experts_ptr": None if v.pairs else "i32",
        "weights_ptr": "fp32",
        "out_ptr": v.dtype if v.first else "fp32",
    }
    return build(kernels.product_kernel, pointers, constants, arch, portable.options(v.tile))


def compile_others(arch: str, build: Build) -> Iterator[tuple[str, Any]]:
    """The kernels around the products, in both kinds of ids, with and without a map."""
    pdl = arch.startswith("sm_") and int(arch[3:]) >= 90
    for ids, mapped in (("i32", False), ("i64", True)):
        common: dict[str, str | None] = {"ids_ptr": ids, "map_ptr": "i32" if mapped else None}
        for held in (8, 128, 512):
            chunk = tile_choice.CHUNKS[not mapped]
            sizes = {"CHUNK": chunk, "E": max(16, tile_choice.power_of_two(held + 1)), "MAPPED": mapped}
            yield (
                f"count {held} {ids}",
                build(kernels.count_kernel, {**common, "counts_ptr": "i32"}, sizes, arch, {"num_warps": 4}),
            )
            more = {"BM": 16, "BLOCKS": experts.placed(sizes["E"]), "COUNTED": not mapped, "PDL": pdl}
            pointers = {**common, "counts_ptr": None if mapped else "i32", "slots_ptr": "i32", "experts_ptr": "i32"}
            warps = {"num_warps": experts.sort_warps(sizes["E"])}
            yield f"place {held} {ids}", build(kernels.place_kernel, pointers, sizes | more, arch, warps)
        pointers = {**common, "x_ptr": "bf16", "order_ptr": "i32", "out_ptr": "bf16"}
        constants = {"SHARE": 8, "BK": 1024, "MAPPED": mapped, "PDL": pdl}
        yield f"gather {ids}", build(kernels.gather_kernel, pointers, constants, arch, {"num_warps": 4})
        pointers = {**common, "y_ptr": "fp32", "out_ptr": "bf16"}
        mode = portable.unpack_mode(arch)
        constants = {"TOPK": 8, "BH": 1024, "MAPPED": mapped, "PDL": pdl, "UNPACK": mode}
        yield f"sum {ids}", build(kernels.sum_kernel, pointers, constants, arch, {"num_warps": 4})
