"""What tools/bench_experts times: a factory a kernel, from a layer's weights to a function of (x, weights, ids).

Ours is the operator as a host calls it. Peers are what vLLM serves a symmetric GPTQ mixture of experts with: its Marlin
kernels, its WNA16 kernels (its own choice between a CUDA and a Triton kernel, and the Triton kernel alone), and Humming
with vLLM's own steps around it. A factory raises where its kernel cannot run; the words become the peer's reason.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4plugin import kernels
from w4plugin.packing import unpack
from w4plugin.tensor import W4Tensor

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, H], topk_weights [T, topk] float32, topk_ids [T, topk] int32) -> [T, H]."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer of experts."""

    name: str
    experts: int
    topk: int
    hidden: int
    inner: int
    group: int = 128

    def nbytes(self) -> int:
        """Bytes of packed words and 16-bit scales."""
        return int(self.experts * 3 * self.hidden * self.inner * (0.5 + 2 / self.group))


LAYERS = {
    "mixtral-8x7b": Layer("mixtral-8x7b", 8, 2, 4096, 14336),
    "qwen3-30b-a3b": Layer("qwen3-30b-a3b", 128, 8, 2048, 768),
    "deepseek-v2-lite": Layer("deepseek-v2-lite", 64, 6, 2048, 1408),
}
TINY = Layer("tiny", 4, 2, 128, 64, 64)


def ours(backend: str) -> Callable[[Layer, W4Tensor, W4Tensor, torch.dtype, list[int]], Run]:
    """Our operator with one of its backends."""

    def make(layer: Layer, gate_up: W4Tensor, down: W4Tensor, dtype: torch.dtype, tokens: list[int]) -> Run:
        p = kernels.prepare_experts(gate_up, down, dtype=dtype, backend=backend)
        return lambda x, weights, ids: kernels.experts(x, p, weights, ids)

    return make


def marlin(layer: Layer, gate_up: W4Tensor, down: W4Tensor, dtype: torch.dtype, tokens: list[int]) -> Run:
    """vLLM's Marlin experts."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    def order(w: W4Tensor) -> tuple[Tensor, Tensor]:
        nothing = torch.empty((layer.experts, 0), dtype=torch.int32, device=w.device)
        words = ops.gptq_marlin_moe_repack(w.qweight, nothing, w.K, w.N, 4)
        return words, marlin_utils.marlin_moe_permute_scales(w.scales, w.K, w.N, layer.group)

    (w1, s1), (w2, s2) = order(gate_up), order(down)
    workspace = marlin_utils.marlin_make_workspace_new(gate_up.device, 4)

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return fused_marlin_moe(
            x, w1, w2, None, None, s1, s2, weights, ids, scalar_types.uint4b8.id, workspace=workspace,
            activation=MoEActivation.SILU, global_num_experts=layer.experts,
        )  # fmt: skip

    return run


def pairs_of_rows(w: W4Tensor) -> Tensor:
    """uint8 ``[E, N, K/2]``, row 2i of a column in the low nibble: the order of vLLM's WNA16 kernels."""
    return torch.stack([_pairs(w.qweight[e]) for e in range(w.qweight.shape[0])])


def _pairs(qweight: Tensor) -> Tensor:
    codes = unpack(qweight, 0).t()
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).contiguous()


def wna16(triton_alone: bool) -> Callable[[Layer, W4Tensor, W4Tensor, torch.dtype, list[int]], Run]:
    """vLLM's WNA16 experts."""

    def make(layer: Layer, gate_up: W4Tensor, down: W4Tensor, dtype: torch.dtype, tokens: list[int]) -> Run:
        from vllm.model_executor.layers.fused_moe import fused_moe
        from vllm.model_executor.layers.fused_moe.config import int4_w4a16_moe_quant_config

        w1, w2 = pairs_of_rows(gate_up), pairs_of_rows(down)
        s1, s2 = (w.scales.transpose(1, 2).contiguous() for w in (gate_up, down))
        config = int4_w4a16_moe_quant_config(w1_scale=s1, w2_scale=s2, block_shape=[0, layer.group])
        chosen = fused_moe.should_moe_wna16_use_cuda

        def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            if triton_alone:
                fused_moe.should_moe_wna16_use_cuda = lambda *_, **__: False
            try:
                return fused_moe.fused_experts(x, w1, w2, weights, ids, quant_config=config)
            finally:
                fused_moe.should_moe_wna16_use_cuda = chosen

        return run

    return make


def humming(layer: Layer, gate_up: W4Tensor, down: W4Tensor, dtype: torch.dtype, tokens: list[int]) -> Run:
    """Humming's indexed product with vLLM's steps around it, as vLLM's HummingIndexedExperts calls them."""
    _reachable()
    from humming.forward import humming_forward
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

    sizes = {t * layer.topk for t in tokens}
    compute = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"})

    def sublayer(w: W4Tensor) -> tuple[Any, dict[str, Tensor], list[Any]]:
        config = {"quant_method": "humming", "dtype": "uint4", "group_size": layer.group, "has_zero_point": False}
        made = HummingLayer(
            shape_n=w.N, shape_k=w.K, weight_config=config, num_experts=layer.experts, torch_dtype=dtype
        ).to(w.device)
        made.load_from_tensors(
            {"weight": w.qweight.transpose(1, 2).contiguous(), "weight_scale": w.scales.transpose(1, 2).contiguous()}
        )
        made.transform()
        names = ("weight", "weight_scale", "zero_point", "weight_scale_2")
        held = {name: t.data for name in names if (t := getattr(made, name, None)) is not None}
        # only the kernels of the intervals of M that are measured; its launcher wants no gaps between them
        tuned, below = [], 0
        for low, high, config in get_heuristics_config(layer_config=made.humming_config, gemm_type="indexed"):
            if any(low < m <= high for m in sizes):
                tuned.append([below, high, config])
                below = high
        return made, held, tuned

    (first, one, tuned1), (second, two, tuned2) = sublayer(gate_up), sublayer(down)
    strings = json.dumps(tuned1), json.dumps(tuned2)

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        pairs = ids.numel()
        blocks = [next(c[2]["block_shape"][0] for c in t if c[0] < pairs <= c[1]) for t in (tuned1, tuned2)]
        common = {}
        for block in blocks:  # vLLM sorts once, for the first product's; not all tunings agree
            if block not in common:
                slots, owners, padded = moe_align_block_size(
                    topk_ids=ids, block_size=block, num_experts=layer.experts, expert_map=None,
                    ignore_invalid_experts=True,
                )  # fmt: skip
                common[block] = {
                    "sorted_ids": slots, "expert_ids": owners, "num_tokens_padded": padded, "compute_config": compute,
                    "valid_shape_m": pairs,
                }  # fmt: skip
        h = x.new_empty((pairs, 2 * layer.inner))
        inner = x.new_empty((pairs, layer.inner))
        y = x.new_empty((pairs, layer.hidden))
        out = torch.empty_like(x)
        humming_forward(
            first.humming_config, inputs=x, outputs=h, locks=first.locks, top_k=layer.topk, tuning_config=strings[0],
            **common[blocks[0]], **one,
        )  # fmt: skip
        apply_moe_activation(MoEActivation.SILU, inner, h)
        humming_forward(
            second.humming_config, inputs=inner, outputs=y, locks=second.locks, top_k=1, tuning_config=strings[1],
            **common[blocks[1]], **two,
        )  # fmt: skip
        moe_fused_mul_sum(
            inputs=y.view(*ids.shape, -1), topk_weights=weights, topk_ids=ids, expert_map=None, outputs=out
        )
        return out

    return run


def _reachable() -> None:
    """Humming compiles in a process that has to find NVRTC's other library."""
    folders = [Path(d) / "nvidia" / "cu13" / "lib" for d in sys.path] + [Path("/usr/local/cuda/lib64")]
    old = os.environ.get("LD_LIBRARY_PATH", "")
    found = [str(d) for d in folders if d.is_dir() and str(d) not in old]
    os.environ["LD_LIBRARY_PATH"] = ":".join([*found, *([old] if old else [])])


FACTORIES: dict[str, Callable[[Layer, W4Tensor, W4Tensor, torch.dtype, list[int]], Run]] = {
    "w4plugin": ours("portable"),
    "marlin": marlin,
    "vllm-wna16": wna16(triton_alone=False),
    "vllm-triton": wna16(triton_alone=True),
    "humming": humming,
}
PEERS = tuple(name for name in FACTORIES if name != "w4plugin")


def context() -> AbstractContextManager[Any]:
    """vLLM's kernels ask for a configuration of the engine."""
    config = _config()
    if config is None:
        return nullcontext()
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(config)


@functools.cache
def _config() -> Any:
    try:
        from vllm.config import VllmConfig
    except ImportError:
        return None
    return VllmConfig()
