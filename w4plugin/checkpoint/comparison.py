"""One module or tensor against its counterpart; what differs goes into :class:`Findings`.

Integer codes, zero points, scales and groups come from :mod:`w4plugin.reference` on both sides and are compared by
equality, the dequantised weights bit for bit, everything else byte for byte.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from w4plugin.checkpoint import judge
from w4plugin.checkpoint.checkpoint import BLOCK, Checkpoint
from w4plugin.checkpoint.judge import Array
from w4plugin.checkpoint.repack import read
from w4plugin.checkpoint.staging import REPORT
from w4plugin.checkpoint.writer import raw
from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats import other_widths, registry
from w4plugin.formats.format import Decoded, Module
from w4plugin.reference import Exact

PACKER = "w4plugin"
"""How this project names itself in the configs it writes."""


@dataclass
class Findings:
    """What a verification found; threads add to it.

    Attributes:
        modules: packed modules that were compared.
        plain: other tensors that were compared.
        mismatches: tensor (or module), and what differs.
        furthest: of formats that store rounded products, the largest distance from the original kernel's weight, as
            a share of the bound; None where every format stores its zero points.
    """

    modules: int = 0
    plain: int = 0
    mismatches: list[tuple[str, str]] = field(default_factory=list)
    furthest: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def differ(self, tensor: str, what: str) -> None:
        """Note a difference."""
        with self._lock:
            self.mismatches.append((tensor, what))

    def reached(self, share: float) -> None:
        """Note how far a weight is from the original kernel's."""
        with self._lock:
            self.furthest = max(self.furthest or 0.0, share)


def _load(checkpoint: Checkpoint, module: Module) -> tuple[dict[str, Tensor], Decoded]:
    return {s: checkpoint.tensor(n) for s, n in module.tensors.items()}, read(checkpoint, module)


def check_module(one: Checkpoint, module: Module, hashes: Mapping[str, str], found: Findings) -> None:
    tensors, decoded = _load(one, module)
    for piece in judge.pieces(module, tensors, decoded):
        stop = piece.start + piece.exact.q.shape[1]
        weight = decoded.weight if piece.expert is None else decoded.weight.expert(piece.expert)
        mine = weight.shard_n(piece.start, stop).dequantize(torch.float64)
        if not np.array_equal(mine.numpy(), piece.exact.weight().astype(np.float64)):
            found.differ(module.name, "the reader and the reference disagree")
        _within_bound(module.name, piece.exact, found)
    _hashed(tensors, module, hashes, found)


def check_plain(one: Checkpoint, name: str, hashes: Mapping[str, str], found: Findings) -> None:
    digest = hashlib.sha256()
    for block in one.blocks(name):
        digest.update(block)
    if hashes and hashes.get(name) != digest.hexdigest():
        found.differ(name, f"its bytes are not those that {REPORT} recorded")


def compare_packed(
    left: tuple[Checkpoint, Module], right: tuple[Checkpoint, Module], hashes: Mapping[str, str], found: Findings
) -> None:
    (one, module), (two, partner) = left, right
    tensors, decoded = _load(one, module)
    try:
        tensors2, decoded2 = _load(two, partner)
    except (CorruptError, UnsupportedError) as fault:
        found.differ(partner.name, f"cannot be read: {fault}")
        return
    a, b = decoded.weight, decoded2.weight
    if (a.K, a.N, a.G, a.experts) != (b.K, b.N, b.G, b.experts):
        shapes = [f"K = {w.K}, N = {w.N}, {w.G} groups" for w in (a, b)]
        found.differ(module.name, f"{shapes[0]} in the source, {shapes[1]} here")
        return
    if a.scales.dtype != b.scales.dtype:
        found.differ(_named(partner, "scales"), f"{b.scales.dtype}, not {a.scales.dtype}")
    step = max(8, judge.ELEMENTS // a.K // 8 * 8)
    cuts = [_regular(module, tensors, decoded, step), _regular(partner, tensors2, decoded2, step)]
    for mine, theirs in zip(*cuts, strict=True):
        _equal(partner, mine, theirs, found)
        _within_bound(module.name, mine, found)
    _compare_bias((one, module, decoded), (two, partner.tensors.get("bias")), found)
    ours = bool(hashes) or PACKER in (two.quant_config.producer or "")
    _idle_bits(partner, decoded2, tensors2, ours, found)
    _hashed(tensors2, partner, hashes, found)


def _regular(module: Module, tensors: Mapping[str, Tensor], decoded: Decoded, step: int) -> Iterator[Exact]:
    """The reference's view in cuts of ``step`` columns, whatever cuts the format allows."""
    for piece in judge.pieces(module, tensors, decoded, step):
        e = piece.exact
        for at in range(0, e.q.shape[1], step):
            cut = slice(at, at + step)
            original = None if e.original is None else e.original[:, cut]
            bound = None if e.bound is None else e.bound[:, cut]
            yield Exact(e.q[:, cut], e.z[:, cut], e.s[:, cut], e.g, original, bound)


def _equal(partner: Module, mine: Exact, theirs: Exact, found: Findings) -> None:
    for kind, x, y in (
        ("qweight", mine.q, theirs.q),
        ("qzeros", mine.z, theirs.z),
        ("scales", mine.s, theirs.s),
        ("g_idx", mine.g, theirs.g),
    ):
        if not np.array_equal(_bits(x), _bits(y)):
            found.differ(_named(partner, kind), f"{int((_bits(x) != _bits(y)).sum())} values differ from the source's")
    if not np.array_equal(_bits(mine.weight()), _bits(theirs.weight())):
        found.differ(partner.name, "the dequantised weights differ")


def _bits(x: Array) -> Array:
    """Floats as the integers they are stored as: equality then tells 0.0 from -0.0."""
    if x.dtype.kind != "f":
        return x
    view: Array = np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}")
    return view


_KIND = {
    "qweight": ("qweight", "weight_packed", "B"),
    "qzeros": ("qzeros", "weight_zero_point", "scaled_zeros", "zeros"),
    "scales": ("scales", "weight_scale", "s"),
    "g_idx": ("g_idx", "weight_g_idx"),
}


def _named(module: Module, kind: str) -> str:
    """The module's own tensor of that kind; the module where it has none."""
    return next((module.tensors[s] for s in _KIND[kind] if s in module.tensors), module.name)


def _within_bound(name: str, exact: Exact, found: Findings) -> None:
    """Formats that store rounded products: the weight may be off by their stated bound, and no further."""
    if exact.original is None or exact.bound is None:
        return
    distance = np.abs(exact.weight().astype(np.float64) - exact.original)
    share = float(np.divide(distance, exact.bound, out=np.zeros_like(distance), where=exact.bound > 0).max())
    if bool((distance > exact.bound).any()):
        found.differ(name, f"further from the original kernel's weight than the format's bound ({share:.3g} of it)")
    found.reached(share)


def _compare_bias(
    left: tuple[Checkpoint, Module, Decoded], right: tuple[Checkpoint, str | None], found: Findings
) -> None:
    one, module, decoded = left
    two, name = right
    if name is None and (decoded.bias is None or decoded.zero_bias):
        return
    if decoded.bias is None or name is None:
        found.differ(name or module.tensors["bias"], "a bias on one side only")
        return
    if not _same(one, module.tensors["bias"], two, name):
        found.differ(name, "differs from the source's")


def compare_made_plain(
    left: tuple[Checkpoint, Module], right: tuple[Checkpoint, str], hashes: Mapping[str, str], found: Findings
) -> None:
    (one, module), (two, name) = left, right
    tensors, decoded = _load(one, module)
    weight = two.tensor(name)
    w = decoded.weight
    if tuple(weight.shape) != ((w.N, w.K) if w.experts is None else (w.experts, w.N, w.K)):
        found.differ(name, f"{list(weight.shape)}, not that of the packed module")
        return
    dtype = two.headers[name].dtype
    for piece in judge.pieces(module, tensors, decoded):
        rows = weight if piece.expert is None else weight[piece.expert]
        stored = rows[piece.start : piece.start + piece.exact.q.shape[1]]
        _compare_rounded(name, piece.exact.weight(), stored, dtype, found)
    _compare_plain_bias((one, module), two, dtype, found)
    _hash_of(name, weight, hashes, found)


def compare_wide(
    left: tuple[Checkpoint, Module], right: tuple[Checkpoint, str], hashes: Mapping[str, str], found: Findings
) -> None:
    (one, module), (two, name) = left, right
    tensors = {s: one.tensor(n) for s, n in module.tensors.items()}
    config = one.quant_config
    planar = other_widths.is_planar(module, config)
    exact = judge.wide_weight(module, tensors, config.layout, config.for_module(module.name).sym, planar=planar)
    weight, dtype = two.tensor(name), two.headers[name].dtype
    if tuple(weight.shape) != exact.T.shape:
        found.differ(name, f"{list(weight.shape)}, not that of the packed module")
        return
    _compare_rounded(name, exact, weight, dtype, found)
    _compare_plain_bias((one, module), two, dtype, found)
    _hash_of(name, weight, hashes, found)


def _compare_rounded(name: str, exact: Array, stored: Tensor, dtype: str, found: Findings) -> None:
    """``exact`` ``[K, N]`` rounded once against the stored ``[N, K]``, bit for bit."""
    if dtype not in ("F16", "BF16", "F32", "F64"):
        found.differ(name, f"{dtype}: not a dtype for weights")
        return
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[stored.element_size()]
    theirs: Array = stored.contiguous().view(kind).numpy().T
    mine = judge.narrow(exact, dtype).view(theirs.dtype)
    if not np.array_equal(mine, theirs):
        found.differ(name, f"{int((mine != theirs).sum())} weights differ from the dequantised source")


def _compare_plain_bias(left: tuple[Checkpoint, Module], two: Checkpoint, dtype: str, found: Findings) -> None:
    one, module = left
    source = module.tensors.get("bias")
    name = f"{module.name}.bias"
    if (source is None) != (name not in two.headers):
        found.differ(name, "a bias on one side only")
    elif source is not None:
        stored = two.tensor(name)
        if stored.dtype == one.tensor(source).dtype:
            same = _same(one, source, two, name)
        else:
            same = torch.equal(one.tensor(source).to(stored.dtype), stored)
        if not same:
            found.differ(name, "differs from the source's")


def compare_plain(one: Checkpoint, two: Checkpoint, name: str, hashes: Mapping[str, str], found: Findings) -> None:
    if name not in two.headers:
        found.differ(name, "not in the other checkpoint")
    elif one.headers[name] != two.headers[name]:
        _compare_cast(one, two, name, found)
    elif not _same(one, name, two, name):
        found.differ(name, "its bytes differ from the source's")
    elif hashes:
        check_plain(two, name, hashes, found)


def _compare_cast(one: Checkpoint, two: Checkpoint, name: str, found: Findings) -> None:
    """A plain tensor that was cast, as ``dequantize --dtype`` does: the source's values, rounded once."""
    a, b = one.headers[name], two.headers[name]
    floats = {"F16", "BF16", "F32", "F64"}
    if a.shape != b.shape or not {a.dtype, b.dtype} <= floats or two.census.modules:
        found.differ(name, f"{b.dtype} {list(b.shape)}, not {a.dtype} {list(a.shape)}")
        return
    if not torch.equal(one.tensor(name).to(two.tensor(name).dtype), two.tensor(name)):
        found.differ(name, f"is not the source's {a.dtype} values rounded to {b.dtype}")


def _same(one: Checkpoint, name: str, two: Checkpoint, name2: str) -> bool:
    if one.headers[name] != two.headers[name2]:
        return False
    pairs = zip(one.blocks(name, BLOCK), two.blocks(name2, BLOCK), strict=True)
    return all(a == b for a, b in pairs)


def _idle_bits(partner: Module, decoded: Decoded, tensors: Mapping[str, Tensor], ours: bool, found: Findings) -> None:
    """In an output of this project even bits that no reader looks at are those that the writer writes."""
    if not ours:
        return
    for suffix, written in registry.write_module(partner.format, decoded.weight).items():
        if suffix in tensors and not torch.equal(raw(tensors[suffix]), raw(written)):
            found.differ(partner.tensors[suffix], "holds bits that are not what its weight is written as")


def _hashed(tensors: Mapping[str, Tensor], module: Module, hashes: Mapping[str, str], found: Findings) -> None:
    for suffix, tensor in tensors.items():
        _hash_of(module.tensors[suffix], tensor, hashes, found)


def _hash_of(name: str, tensor: Tensor, hashes: Mapping[str, str], found: Findings) -> None:
    if hashes and hashes.get(name) != hashlib.sha256(raw(tensor).numpy().data).hexdigest():
        found.differ(name, f"its bytes are not those that {REPORT} recorded")
