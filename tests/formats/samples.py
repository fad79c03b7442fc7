"""Packers in NumPy, one a format: from codes to the tensors that its producer stores.

They share nothing with the readers under test: each computes where a code goes, where a reader computes what a place
holds. That they agree with the producers' own packers is tests/data/upstream's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from w4plugin.formats import Census, Decoded, RowShard, find_modules, read_module
from w4plugin.formats.conformance import Sample, headers
from w4plugin.packing import unpack
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import W4Tensor

# ruff: noqa: N802

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Truth:
    """A weight by its parts: q ``[K, N]``, z ``[G, N]``, g ``[K]`` in NumPy, s ``[G, N]`` in torch (bfloat16)."""

    q: Array
    z: Array
    s: Tensor
    g: Array
    size: int
    sym: bool

    @property
    def K(self) -> int:
        return int(self.q.shape[0])

    @property
    def N(self) -> int:
        return int(self.q.shape[1])

    @property
    def G(self) -> int:
        return int(self.s.shape[0])

    @property
    def stated(self) -> int:
        return -1 if self.size == self.K else self.size


def truth(
    seed: int | Random = 0,
    K: int = 64,
    N: int = 32,
    size: int = 32,
    *,
    sym: bool = False,
    order: str = "sequential",
    dtype: torch.dtype = torch.float16,
    lowest: int = 0,
) -> Truth:
    """A random weight.

    Args:
        size: rows in a group, -1 for one group.
        order: "sequential", "act" (rows of a group scattered, as many in each) or "free" (any group for any row).
        lowest: the smallest zero point.
    """
    rng = np.random.default_rng(seed.randrange(2**31) if isinstance(seed, Random) else seed)
    size = K if size == -1 else size
    G = -(-K // size)
    q = rng.integers(0, 16, (K, N), dtype=np.uint8)
    z = np.full((G, N), 8, np.uint8) if sym else rng.integers(lowest, 16, (G, N), dtype=np.uint8)
    if not sym:
        z.flat[0], z.flat[-1] = 3, 9  # never all 8 by chance
    s = torch.from_numpy(rng.uniform(0.001, 0.1, (G, N))).to(dtype)
    g = np.arange(K) // size
    if order == "act":
        g = rng.permutation(g)
    elif order == "free":
        g = rng.integers(0, G, K)
        g[:2] = (G - 1, 0)  # neither sequential nor all zero by chance
    return Truth(q, z, s, g.astype(np.int32), size, sym)


def words(codes: Array, axis: int, bits: int = 4, dtype: Any = np.int32) -> Array:
    """Codes packed along an axis, low bits first; the last word is filled with zeros."""
    per = np.dtype(dtype).itemsize * 8 // bits
    codes = np.moveaxis(codes.astype(object), axis, -1)
    pad = -codes.shape[-1] % per
    codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], pad), object)], -1)
    grouped = codes.reshape(*codes.shape[:-1], -1, per)
    packed = sum(grouped[..., i] << (bits * i) for i in range(per))
    unsigned = packed.astype(np.dtype(dtype).str.replace("i", "u"))
    return np.ascontiguousarray(np.moveaxis(unsigned.view(dtype), -1, axis))


def tensor(a: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(a))


def pack_gptq(t: Truth, *, offset: int = 1, g_idx: bool = True, dtype: Any = np.int32) -> dict[str, Tensor]:
    found = {
        "qweight": tensor(words(t.q, 0, dtype=dtype)),
        "qzeros": tensor(words((t.z.astype(int) - offset) & 15, 1, dtype=dtype)),
        "scales": t.s.clone(),
        "g_idx": tensor(t.g),
    }
    return found if g_idx else {k: v for k, v in found.items() if k != "g_idx"}


def borrowed(z: Array) -> Tensor:
    """v1 zeros as GPTQModel and AutoRound make them: 0x11111111 subtracted from the word."""
    return tensor((words(z, 1).view(np.uint32) - np.uint32(0x11111111)).view(np.int32))


def smeared(z: Array) -> Tensor:
    """v1 zeros as AutoGPTQ makes them: z - 1 cast to uint32, shifted, OR-ed in."""
    minus = (z.astype(np.int64) - 1).astype(np.uint32).reshape(z.shape[0], -1, 8)
    word = np.zeros(minus.shape[:2], np.uint32)
    for i in range(8):
        word |= minus[..., i] << np.uint32(4 * i)
    return tensor(word.view(np.int32))


def pack_awq(t: Truth) -> dict[str, Tensor]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(codes: Array) -> Tensor:
        return tensor(words(codes.reshape(codes.shape[0], -1, 8)[..., order].reshape(codes.shape), 1))

    return {"qweight": interleaved(t.q), "qzeros": interleaved(t.z), "scales": t.s.clone()}


def zero_words(G: int, size: int) -> int:
    """AutoAWQ's calculate_zeros_width."""
    multiplier = 1 if size >= 128 else {64: 2, 32: 4}[size]
    base = -(-G // 8)
    return -(-base // multiplier) * multiplier


def padded(a: Array, to: int, axis: int) -> Array:
    shape = list(a.shape)
    shape[axis] = to - a.shape[axis]
    return np.concatenate([a, np.zeros(shape, a.dtype)], axis)


def pack_gemv(t: Truth) -> dict[str, Tensor]:
    W = zero_words(t.G, t.size)
    scales = torch.zeros(t.N, 8 * W, dtype=t.s.dtype)
    scales[:, : t.G] = t.s.T
    return {
        "qweight": tensor(words(t.q.T, 1)),
        "qzeros": tensor(words(padded(t.z.T, 8 * W, 1), 1)),
        "scales": scales,
    }


def pack_fast(t: Truth, zeros: str = "qzeros") -> dict[str, Tensor]:
    """Where each code goes: words of four outputs side by side in spans of 64 inputs."""
    k, n = np.meshgrid(np.arange(t.K), np.arange(t.N), indexing="ij")
    word = k // 64 * 64 + n % 4 * 16 + k % 64 // 32 * 8 + k % 8
    packed = np.zeros((t.N // 4, t.K), np.uint16)
    np.bitwise_or.at(packed, (n // 4, word), t.q.astype(np.uint16) << (k % 32 // 8 * 4).astype(np.uint16))
    rows = 8 * zero_words(t.G, t.size)
    scales = torch.zeros(rows, t.N, dtype=t.s.dtype)
    products = torch.zeros(rows, t.N, dtype=t.s.dtype)
    scales[: t.G] = t.s
    products[: t.G] = -(t.s.double() * tensor(t.z.astype(np.float64))).to(t.s.dtype)
    return {"qweight": tensor(packed.view(np.int16)), zeros: products, "scales": scales}


def pack_marlin(t: Truth, codes: str = "B", scale: str = "s") -> dict[str, Tensor]:
    """Where each code goes: the thread, tile and register of a tensor core's 16 x 8 operand that holds it."""
    k, n = np.meshgrid(np.arange(t.K), np.arange(t.N), indexing="ij")
    r, c = k % 16, n % 16
    thread = c % 8 * 4 + r % 8 // 2
    register = c // 8 * 4 + r // 8 * 2 + r % 2
    nibble = register // 2 + register % 2 * 4
    slot = thread * 32 + n // 16 % 4 * 8 + nibble
    placed = np.zeros((t.K // 16, t.N * 16), np.uint8)
    placed[k // 16, n // 64 * 1024 + slot] = t.q
    run = 64 if t.G > 1 else 32
    column = np.arange(t.N) % run
    several, single = column % 8 * 8 + column // 8, column % 8 // 2 * 8 + column // 8 * 2 + column % 2
    place = several if t.G > 1 else single
    s = torch.empty_like(t.s)
    s[:, np.arange(t.N) // run * run + place] = t.s
    return {codes: tensor(words(placed, 1)), scale: s}


def pack_ct(t: Truth, *, order: bool = False) -> dict[str, Tensor]:
    found = {
        "weight_packed": tensor(words(t.q.T, 1)),
        "weight_scale": t.s.T.contiguous(),
        "weight_shape": torch.tensor([t.N, t.K]),
    }
    if not t.sym:
        found["weight_zero_point"] = tensor(words(t.z.T, 0))
    if order:
        found["weight_g_idx"] = tensor(t.g)
    return found


def pack_v0(t: Truth) -> dict[str, Tensor]:
    s = t.s.float().T.contiguous()
    return {"qweight": tensor(words(t.q, 0)), "scales": s, "zeros": s * tensor(t.z.T.astype(np.float32))}


def gptq_config(t: Truth, version: str = "gptq", **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "checkpoint_format": version,
        "bits": 4,
        "group_size": t.stated,
        "sym": t.sym,
        "desc_act": bool((t.g != np.arange(t.K) // t.size).any()),
        **more,
    }


def awq_config(t: Truth, version: str = "gemm", **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "version": version, "bits": 4, "group_size": t.stated, "zero_point": True, **more}


def ct_config(t: Truth, **weights: Any) -> dict[str, Any]:
    scheme = {
        "num_bits": 4,
        "type": "int",
        "symmetric": t.sym,
        "strategy": "channel" if t.G == 1 else "group",
        "group_size": None if t.G == 1 else t.size,
        "actorder": "group" if bool((t.g != np.arange(t.K) // t.size).any()) else None,
        **weights,
    }
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def sample(t: Truth, tensors: Mapping[str, Tensor], config: Mapping[str, Any], **more: Any) -> Sample:
    made = Sample(tensors, config, tensor(t.q), tensor(t.z), t.s, tensor(t.g), t.size, required=frozenset(tensors))
    return replace(made, **more)


NAME = "model.layers.0.mlp.down_proj"


def checkpoint(**layers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by full name; ``__`` in a keyword stands for a dot."""
    return {f"{name.replace('__', '.')}.{s}": t for name, tensors in layers.items() for s, t in tensors.items()}


def census(tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None) -> Census:
    """The census of tensors by full name."""
    return find_modules(headers(tensors), QuantConfig.from_dict(config) if config else QuantConfig())


def read(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any] | None,
    shard: RowShard | None = None,
    whole: Mapping[str, Tensor] | None = None,
) -> Decoded:
    """One module's tensors by suffix, from headers (of ``whole``, when they are a shard) to weight."""
    found = census({f"{NAME}.{suffix}": t for suffix, t in (whole or tensors).items()}, config)
    (module,) = found.modules
    return read_module(module, tensors, QuantConfig.from_dict(config) if config else QuantConfig(), shard)


def same(weight: W4Tensor, t: Truth, *, z: Any = None, g: Any = None) -> None:
    """Assert that a weight holds exactly the codes, zeros, scales and groups of ``t``."""
    assert torch.equal(unpack(weight.qweight, -2), tensor(t.q))
    assert torch.equal(weight.full_zeros(), tensor(t.z if z is None else np.asarray(z, np.uint8)))
    assert torch.equal(weight.scales, t.s)
    assert torch.equal(weight.groups(), tensor(t.g if g is None else g).long())


def levels(decoded: Decoded) -> list[str]:
    return [n.level for n in decoded.notes]


def _dtype(random: Random) -> torch.dtype:
    return random.choice((torch.float16, torch.bfloat16, torch.float32))


def _gptq_rows(tensors: Mapping[str, Tensor], per: int = 8) -> Callable[[int, int], dict[str, Tensor]]:
    def rows(first: int, last: int) -> dict[str, Tensor]:
        cut = {**tensors, "qweight": tensors["qweight"][first // per : last // per]}
        return {**cut, "g_idx": tensors["g_idx"][first:last]} if "g_idx" in tensors else cut

    return rows


def gptq(random: Random, version: str = "gptq", g_idx: bool = True) -> Sample:
    sym = random.random() < 0.4
    K, size = 8 * random.randint(1, 24), random.choice((16, 32, 64, 128, -1))
    t = truth(
        random,
        K=K,
        N=random.choice((1, 3, 8, 24, 32, 40)),
        size=min(K, size) if size > 0 else size,
        sym=sym,
        order=random.choice(("sequential", "act")) if g_idx else "sequential",
        dtype=_dtype(random),
        lowest=0 if version == "gptq_v2" else 1,
    )
    tensors = pack_gptq(t, offset=version == "gptq", g_idx=g_idx)
    config = gptq_config(t, version)
    return sample(
        t,
        tensors,
        config,
        rows=_gptq_rows(tensors),
        required=frozenset({"qweight", "qzeros", "scales"}),
        whole=frozenset({"qweight", "scales"}) if t.N > 1 else frozenset(),
    )


def gptq_v2(random: Random) -> Sample:
    return gptq(random, "gptq_v2")


def auto_round(random: Random) -> Sample:
    found = gptq(random, "gptq_v2", g_idx=False)
    config = {k: v for k, v in found.config.items() if k not in ("checkpoint_format", "desc_act")}
    return replace(found, config={**config, "quant_method": "auto-round", "packing_format": "auto_round"})


def awq(random: Random) -> Sample:
    size = random.choice((16, 32, 64, -1))
    K = size * random.randint(1, 4) if size > 0 else 8 * random.randint(1, 12)
    t = truth(random, K=K, N=8 * random.randint(1, 6), size=size, sym=random.random() < 0.3)
    tensors = pack_awq(t)

    def rows(first: int, last: int) -> dict[str, Tensor]:
        return {**tensors, "qweight": tensors["qweight"][first:last]}

    return sample(t, tensors, awq_config(t), rows=rows, whole=frozenset(tensors))


def awq_gemv(random: Random) -> Sample:
    size = random.choice((32, 64, 128))
    t = truth(random, K=size * random.randint(1, 12), N=random.randint(1, 20), size=size)
    tensors = pack_gemv(t)

    def rows(first: int, last: int) -> dict[str, Tensor]:
        return {**tensors, "qweight": tensors["qweight"][:, first // 8 : last // 8]}

    return sample(t, tensors, awq_config(t, "gemv"), rows=rows, whole=frozenset({"qzeros", "scales"}))


def awq_fast(random: Random) -> Sample:
    size = random.choice((32, 64, 128))
    t = truth(random, K=128 * random.randint(1, 6), N=4 * random.randint(1, 6), size=size)
    tensors = pack_fast(t)
    return sample(t, tensors, awq_config(t, "gemv_fast"), whole=frozenset(tensors))


def llm_awq(random: Random) -> Sample:
    t = truth(random, K=128 * random.randint(1, 6), N=4 * random.randint(1, 6), size=128, dtype=torch.bfloat16)
    tensors = pack_fast(t, "scaled_zeros")
    return sample(t, tensors, {"quant_method": "awq", "backend": "llm-awq", "bits": 4, "group_size": 128})


def marlin(random: Random, codes: str = "B", scale: str = "s") -> Sample:
    size = random.choice((128, -1))
    t = truth(random, K=128 * random.randint(1, 3), N=256 * random.randint(1, 2), size=size, sym=True)
    tensors = pack_marlin(t, codes, scale)
    config = gptq_config(t, "marlin") if codes == "B" else awq_config(t, "marlin", zero_point=False)
    return sample(t, tensors, config, whole=frozenset(tensors))


def awq_marlin(random: Random) -> Sample:
    return marlin(random, "qweight", "scales")


def compressed_tensors(random: Random) -> Sample:
    size = random.choice((16, 32, 64, -1))
    K = size * random.randint(1, 4) if size > 0 else 8 * random.randint(1, 12)
    act = random.random() < 0.4
    t = truth(
        random,
        K=K,
        N=random.choice((1, 3, 8, 24, 33)),
        size=size,
        sym=random.random() < 0.4,
        order="act" if act else "sequential",
        dtype=_dtype(random),
    )
    tensors = pack_ct(t, order=act)

    def rows(first: int, last: int) -> dict[str, Tensor]:
        cut = {k: v for k, v in tensors.items() if k != "weight_shape"}
        cut["weight_packed"] = cut["weight_packed"][:, first // 8 : last // 8].contiguous()
        return {**cut, "weight_g_idx": cut["weight_g_idx"][first:last]} if act else cut

    return sample(
        t,
        tensors,
        ct_config(t),
        rows=rows,
        required=frozenset({"weight_packed", "weight_scale"} | (set() if t.sym else {"weight_zero_point"})),
        whole=frozenset({"weight_packed"}),
    )


def gptq_v0(random: Random) -> Sample:
    t = truth(random, K=8 * random.randint(1, 16), N=random.randint(2, 20), size=-1, dtype=torch.float32)
    return sample(t, pack_v0(t), {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False})


MAKERS: Mapping[str, Callable[[Random], Sample]] = {
    "auto-round": auto_round,
    "gptq": gptq,
    "gptq_v2": gptq_v2,
    "awq": awq,
    "awq-gemv": awq_gemv,
    "awq-gemv-fast": awq_fast,
    "llm-awq": llm_awq,
    "awq-marlin": awq_marlin,
    "gptq-marlin": marlin,
    "compressed-tensors": compressed_tensors,
    "gptq-v0": gptq_v0,
}
"""A sample maker for every built-in format."""
