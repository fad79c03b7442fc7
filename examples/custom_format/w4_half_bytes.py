"""A checkpoint layout that w4plugin does not know, added from outside.

codes   uint8 [N, K/2]     input 2c in the low half of byte c, input 2c + 1 in the high half
scale   float [N, G]       symmetric: the zero point is 8
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.formats import Candidate, Decoded, Format, Found, Module, RowShard, conformance
from w4plugin.formats.decoding import finish, floats, need, words
from w4plugin.formats.grouping import Parts, size_from_shape
from w4plugin.packing import pack, unpack
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import W4Tensor


def detect(candidate: Candidate) -> Found | None:
    """Headers to K, N and group size."""
    codes, scale = candidate.headers.get("codes"), candidate.headers.get("scale")
    if codes is None or scale is None or codes.dtype != "U8" or len(codes.shape) != 2 or len(scale.shape) != 2:
        return None
    (N, half), (rows, G) = codes.shape, scale.shape
    if rows != N or 0 in codes.shape + scale.shape:
        return None
    size, notes = size_from_shape(candidate.name, 2 * half, G, candidate.config.for_module(candidate.name))
    return Found(4, 2 * half, N, size, None, notes)


def read(module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, shard: RowShard | None) -> Decoded:
    """Tensors to a weight."""
    codes, scale = need(module, tensors, "codes", "scale")
    codes, scale = words(module, "codes", codes), floats(module, "scale", scale)
    if codes.dtype != torch.uint8 or codes.ndim != 2 or scale.ndim != 2 or codes.shape[0] != scale.shape[0]:
        raise CorruptError(
            module.name, got=f"{codes.dtype} {list(codes.shape)}", wanted="uint8 [N, K/2], N as scale has"
        )
    if codes.shape[1] % 4:
        raise UnsupportedError(module.name, got=f"K = {2 * codes.shape[1]}", wanted="a multiple of 8")
    rows = torch.stack([codes & 15, codes >> 4], -1).flatten(1).T
    return finish(module, Parts(pack(rows, 0), scale.T.contiguous(), None), tensors, config, shard, "symmetric")


def write(weight: W4Tensor) -> dict[str, Tensor]:
    """A weight to tensors, or a refusal."""
    if not weight.symmetric or weight.g_idx is not None or weight.experts is not None:
        raise UnsupportedError("half-bytes", got="zero points, act-order or experts", wanted="a symmetric weight")
    codes = unpack(weight.qweight, 0).T
    return {"codes": codes[:, ::2] | codes[:, 1::2] << 4, "scale": weight.scales.T.contiguous()}


FORMAT = Format(
    name="half-bytes",
    title="two codes a byte, an example",
    producers="nobody",
    suffixes=frozenset({"codes", "scale"}),
    key=frozenset({"codes"}),
    detect=detect,
    read=read,
    write=write,
    config=lambda layers, plain: {"quant_method": "half-bytes", "bits": 4, "group_size": layers[0].stated_size},
    limits="written when symmetric, without act-order",
)


def sample(random: Random) -> conformance.Sample:
    """A random module, packed code by code."""
    size = random.choice((8, 16))
    G, N = random.randint(1, 4), random.randint(2, 9)
    K = size * G
    q = torch.tensor([[random.randrange(16) for _ in range(N)] for _ in range(K)], dtype=torch.uint8)
    s = torch.tensor([[random.uniform(0.01, 0.1) for _ in range(N)] for _ in range(G)]).half()
    packed = torch.empty(N, K // 2, dtype=torch.uint8)
    for n in range(N):
        for c in range(K // 2):
            packed[n, c] = int(q[2 * c, n]) + 16 * int(q[2 * c + 1, n])
    return conformance.Sample(
        tensors={"codes": packed, "scale": s.T.contiguous()},
        config={"quant_method": "half-bytes", "bits": 4, "group_size": size},
        q=q,
        z=torch.full_like(s, 8, dtype=torch.uint8),
        s=s,
        g=torch.arange(K) // size,
        group_size=size,
        required=frozenset({"codes", "scale"}),
    )


if __name__ == "__main__":
    for seed in range(20):
        conformance.check(FORMAT, sample, Random(seed))
    print("half-bytes: 20 random modules read, written, damaged; no check failed")
