"""Take the experts of a quantised mixture out of its checkpoint, and route tokens through them in one operator.

    python examples/mixture_of_experts.py MODEL

MODEL is a folder or a hub id with a tensor an expert (Mixtral's w1, w2, w3, or gate_proj, up_proj, down_proj) in any
4-bit format. The result is compared with a loop over tokens in float64 with dequantised weights. To serve a
mixture, nothing is needed but its name: ``vllm serve MODEL``.
"""

from __future__ import annotations

import re
import sys

import torch

import w4plugin
from w4plugin.kernels import experts, prepare_experts
from w4plugin.tensor import W4Tensor

WORDS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def layer_of(checkpoint: w4plugin.Checkpoint) -> dict[str, W4Tensor]:
    """The experts of the first layer that has any: gate, up and down, E leading."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for module in checkpoint.modules:
        match = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)", module.name)
        if match and match[3] in WORDS:
            found.setdefault((match[1], WORDS[match[3]]), {})[int(match[2])] = module.name
    if not found:
        raise SystemExit(f"{checkpoint.source.name} has no packed experts of one tensor each")
    at = next(iter(found))[0]
    stacks = {
        part: W4Tensor.stack_experts([checkpoint.weight(names[e]) for e in sorted(names)])
        for (layer, part), names in found.items()
        if layer == at
    }
    print(f"{at}: {stacks['gate'].experts} experts, H = {stacks['gate'].K}, I = {stacks['down'].K}")
    return stacks


def main(model: str) -> None:
    stacks = layer_of(w4plugin.open(model))
    gate, up, down = (stacks[part] for part in ("gate", "up", "down"))

    # once, at load: the order of the backend that fits this device
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ready = prepare_experts((gate, up), down, dtype=torch.bfloat16, device=device)

    # at every step: tokens, and what a router says about each
    torch.manual_seed(0)
    x = torch.randn(5, gate.K, dtype=torch.bfloat16)
    topk_weights, topk_ids = torch.rand(5, gate.experts).softmax(-1).topk(2)
    y = experts(x.to(device), ready, topk_weights.to(device), topk_ids.to(device)).cpu()
    print(f"{list(x.shape)} through {ready.backend} experts: {list(y.shape)}")

    exact = torch.zeros(y.shape, dtype=torch.float64)
    for token, (weights, ids) in enumerate(zip(topk_weights.double(), topk_ids.tolist(), strict=True)):
        for weight, e in zip(weights, ids, strict=True):
            one, two, three = (w.expert(e).dequantize(torch.float64) for w in (gate, up, down))
            row = x[token].double()
            exact[token] += weight * ((torch.nn.functional.silu(row @ one) * (row @ two)) @ three)
    error = float((y.double() - exact).norm() / exact.norm())
    print(f"relative error {error:.1e} (bfloat16 itself: 4e-03)")
    assert error < 1e-2


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
