"""Single layers of SGLang, made, loaded and cut as its model runner would, on pretended ranks in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from sglang.srt.runtime_context import get_parallel

from tests.formats.samples import Truth
from tests.runtime.vllm.checkpoints import FORMATS, Recipe, Tensors, draw, plain_weight
from w4plugin.runtime.sglang.config import W4Config


@contextmanager
def rank_of(rank: int, ranks: int) -> Iterator[None]:
    """Layers made here believe that they are one rank of several."""
    told = {"tp_rank": rank, "tp_size": ranks, "attn_tp_rank": rank, "attn_tp_size": ranks}
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with get_parallel().override(**told, attn_dp_size=1, attn_cp_size=1):
            yield
    finally:
        torch.set_default_dtype(dtype)


def save(folder: Path, modules: Mapping[str, Mapping[str, torch.Tensor]], quant: dict[str, Any], **config: Any) -> Path:
    """A checkpoint of single modules, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{name}.{suffix}": t.contiguous().clone() for name, found in modules.items() for suffix, t in found.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quant}))
    return folder


def opened(folder: Path, **hf_config: Any) -> W4Config:
    """The quantisation config of a checkpoint, as SGLang makes it."""
    quant = json.loads((folder / "config.json").read_text())["quantization_config"]
    hf = SimpleNamespace(_name_or_path=str(folder), **hf_config)
    return W4Config.from_config({**quant, "packed_modules_mapping": {}, "hf_config": hf})


def load(layer: torch.nn.Module, modules: Mapping[Any, Mapping[str, torch.Tensor]]) -> None:
    """Feed a layer the tensors of its weights, by shard id (None for a layer of one), and finish it."""
    for shard_id, tensors in modules.items():
        for suffix, tensor in tensors.items():
            param = dict(layer.named_parameters())[suffix]
            arguments = () if shard_id is None else (shard_id,)
            param.weight_loader(param, tensor.clone(), *arguments)
    layer.quant_method.process_weights_after_loading(layer)


class Made:
    """A checkpoint of one layer's weights, and what they mean."""

    def __init__(self, folder: Path, recipe: Recipe, sizes: dict[str, tuple[int, int]], **plain: torch.Tensor) -> None:
        rng = np.random.default_rng(0)
        self.truths: dict[str, Truth] = {name: draw(rng, n, k, recipe) for name, (n, k) in sizes.items()}
        pack, spell = FORMATS[recipe.format]
        self.tensors: dict[str, Tensors] = {name: pack(truth) for name, truth in self.truths.items()}
        self.tensors.update({name: {"weight": weight} for name, weight in plain.items()})
        self.plain = {name: plain_weight(truth) for name, truth in self.truths.items()} | dict(plain)
        prefixed = {self.at(name): found for name, found in self.tensors.items()}
        self.folder = save(folder, prefixed, spell(max(self.truths.values(), key=lambda t: t.K)))
        self.config = opened(self.folder)

    def at(self, name: str) -> str:
        return f"model.layers.0.{name}"

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """``x @ W`` in float64, from the stored integers."""
        return x.double() @ self.plain[name].double().t()
