"""Layers of experts: drawn and packed, made as vLLM makes them, loaded, and computed from the plain weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import layer as fused_moe

from tests.formats.samples import Truth
from tests.runtime.vllm.checkpoints import FORMATS, Recipe, Tensors, draw, plain_weight
from tests.runtime.vllm.layers import opened, rank_of, save
from w4plugin.runtime.vllm.config import W4Config

AT = "model.layers.0.mlp.experts"
WORDS = {"llama": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
EXACT = 2e-5
"""Of outputs of unit size in float32: sums of K = 192 products, each rounded at 6e-8, in another order."""


@dataclass(frozen=True)
class Sizes:
    """Of one layer."""

    experts: int = 6
    hidden: int = 64
    inner: int = 192
    topk: int = 2


@dataclass
class Experts:
    """The experts of one layer in a checkpoint.

    Attributes:
        folder: where the checkpoint lies, once it is written.
        sizes: of the layer.
        words: names of gate, up and down.
        quant: the checkpoint's quantization_config.
        tensors: by name below the layer, "3.w1", the tensors of a weight by suffix.
        plain: by the same names, the weights ``[N, K]`` in float32.
    """

    folder: Path
    sizes: Sizes
    words: tuple[str, str, str]
    quant: dict[str, Any]
    tensors: dict[str, Tensors]
    plain: dict[str, torch.Tensor]

    @staticmethod
    def drawn(folder: Path, recipe: Recipe, sizes: Sizes | None = None, words: str = "llama", seed: int = 0) -> Experts:
        """Random experts; with act-order each has its own, which its gate and up share."""
        sizes = sizes or Sizes()
        rng = np.random.default_rng(seed)
        pack, spell = FORMATS[recipe.format]
        truths: dict[str, Truth] = {}
        gate, up, down = WORDS[words]
        for e in range(sizes.experts):
            first = draw(rng, sizes.inner, sizes.hidden, recipe)
            truths[f"{e}.{gate}"] = first
            truths[f"{e}.{up}"] = draw(rng, sizes.inner, sizes.hidden, recipe, first.g)
            truths[f"{e}.{down}"] = draw(rng, sizes.hidden, sizes.inner, recipe)
        return Experts(
            folder,
            sizes,
            WORDS[words],
            spell(max(truths.values(), key=lambda t: t.K)),
            {name: pack(truth) for name, truth in truths.items()},
            {name: plain_weight(truth) for name, truth in truths.items()},
        )

    def fused(self) -> Experts:
        """Gate and up of each expert in one ``gate_up_proj``; GPTQ's layouts, whose columns come last."""
        gate, up, down = self.words
        tensors, plain = {}, {}
        for e in range(self.sizes.experts):
            pair = [self.tensors[f"{e}.{word}"] for word in (gate, up)]
            whole = {s: torch.cat([t[s] for t in pair], -1) for s in pair[0] if s != "g_idx"}
            tensors[f"{e}.gate_up_proj"] = whole | {s: t for s, t in pair[0].items() if s == "g_idx"}
            tensors[f"{e}.{down}"] = self.tensors[f"{e}.{down}"]
        return replace(self, tensors=tensors, plain=self.plain | plain)

    def stacked(self) -> Experts:
        """Every projection as one tensor with a leading E."""
        tensors: dict[str, Tensors] = {}
        for word in dict.fromkeys(name.partition(".")[2] for name in self.tensors):
            each = [self.tensors[f"{e}.{word}"] for e in range(self.sizes.experts)]
            tensors[word] = {suffix: torch.stack([t[suffix] for t in each]) for suffix in each[0]}
        return replace(self, tensors=tensors)

    def written(self) -> Path:
        """The folder, with the checkpoint in it."""
        return save(self.folder, {f"{AT}.{name}": found for name, found in self.tensors.items()}, self.quant)

    def opened(self) -> W4Config:
        """Written to disk and opened as vLLM opens it."""
        return opened(self.written())

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors by their names below the layer, as vLLM's loader hands them over."""
        for name, found in self.tensors.items():
            for suffix, tensor in found.items():
                yield f"{name}.{suffix}", tensor.clone()

    def routed(self, tokens: int = 5, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x ``[T, H]``, routing weights and expert ids ``[T, topk]``; no token names an expert twice."""
        rng = np.random.default_rng(seed)
        ids = np.stack([rng.permutation(self.sizes.experts)[: self.sizes.topk] for _ in range(tokens)])
        x = torch.from_numpy(rng.normal(size=(tokens, self.sizes.hidden))).float()
        return x, torch.from_numpy(rng.uniform(0.1, 1, ids.shape)).float(), torch.from_numpy(ids).int()

    def reference(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, act: Any = None) -> torch.Tensor:
        """What the plain weights make of routed tokens, in float64."""
        act = act or torch.nn.functional.silu
        out = torch.zeros(x.shape, dtype=torch.float64)
        for t in range(x.shape[0]):
            for weight, e in zip(weights[t].double(), ids[t].tolist(), strict=True):
                gate, up, down = (self.plain[f"{e}.{word}"].double() for word in self.words)
                out[t] += weight * ((act(x[t].double() @ gate.t()) * (x[t].double() @ up.t())) @ down.t())
        return out.float()


@contextmanager
def rank(index: int, count: int, *, whole: bool = False) -> Iterator[None]:
    """Layers made here believe that they are one rank of several; ``whole`` experts are spread, not cut."""
    with (
        rank_of(index, count),
        set_current_vllm_config(VllmConfig(parallel_config=ParallelConfig(enable_expert_parallel=whole))),
    ):
        yield


def make(config: W4Config, sizes: Sizes, ranks: int, words: tuple[str, str, str], at: str = AT, **settings: Any) -> Any:
    """vLLM's layer of experts, its router and runner included."""
    factory = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    gate, up, down = words
    return factory(
        num_experts=sizes.experts,
        top_k=sizes.topk,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        params_dtype=torch.float32,
        quant_config=config,
        tp_size=ranks,
        dp_size=1,
        pcp_size=1,
        prefix=at,
        ckpt_names=(gate, down, up),
        **settings,
    )


def load(runner: Any, stream: Iterator[tuple[str, torch.Tensor]]) -> Any:
    """Fill the layer as vLLM's AutoWeightsLoader does, finish it, and hand back what holds its weights."""
    held = dict(runner.named_parameters())
    for name in runner.load_weights(stream):
        assert any(known.endswith(name) for known in held), name
    return finish(runner)


def finish(runner: Any) -> Any:
    """As vLLM does once all weights are loaded."""
    layer = runner.routed_experts
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def run(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The layer's own share of the output."""
    return layer.quant_method.apply(layer, x, weights, ids, None, None)
