"""Single layers of vLLM, made, loaded and cut as an engine would, on any number of pretended ranks in one process."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from vllm import platforms
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms.cpu import CpuPlatform

from w4plugin.runtime.vllm.config import W4Config

ASKED = (
    "vllm.distributed",
    "vllm.distributed.parallel_state",
    "vllm.model_executor.layers.fused_moe.config",
    "vllm.model_executor.layers.fused_moe.layer",
    "vllm.model_executor.layers.linear",
    "vllm.model_executor.layers.vocab_parallel_embedding",
    "vllm.model_executor.parameter",
)
"""Modules that hold the functions which tell a layer its rank."""


if not platforms.current_platform.device_type:
    # a CUDA build on a machine without a GPU: its layers can be made, if it takes the machine for what it is
    unknown, platforms._current_platform = platforms.current_platform, CpuPlatform()
    for module in [m for name, m in sys.modules.items() if name.startswith("vllm.")]:
        if vars(module).get("current_platform") is unknown:  # imported above
            module.current_platform = platforms._current_platform


@contextmanager
def rank_of(rank: int, ranks: int) -> Iterator[None]:
    """Layers made here believe that they are one rank of several."""
    told = {"get_tensor_model_parallel_rank": rank, "get_tensor_model_parallel_world_size": ranks}
    patches = []
    for name in ASKED:
        module = importlib.import_module(name)
        patches += [mock.patch.object(module, f, lambda v=v: v) for f, v in told.items() if hasattr(module, f)]
    for patch in patches:
        patch.start()
    try:
        with set_current_vllm_config(VllmConfig()):
            yield
    finally:
        for patch in patches:
            patch.stop()


def save(folder: Path, modules: Mapping[str, Mapping[str, torch.Tensor]], quant: dict[str, Any], **config: Any) -> Path:
    """A checkpoint of single modules, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{name}.{suffix}": t.contiguous().clone() for name, found in modules.items() for suffix, t in found.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quant}))
    return folder


def opened(folder: Path, packed: Mapping[str, list[str]] | None = None) -> W4Config:
    """The quantisation config of a checkpoint, as vLLM makes it."""
    config = W4Config.from_config(json.loads((folder / "config.json").read_text())["quantization_config"])
    config.maybe_update_config(str(folder))
    config.packed_modules_mapping = dict(packed or {})
    return config


def load(layer: torch.nn.Module, modules: Mapping[Any, Mapping[str, torch.Tensor]], *, hung: bool = False) -> None:
    """Feed a layer the tensors of its weights, by shard id (None for a layer of one), and finish it.

    ``hung``: the shard id hangs on the tensor, as newer versions hand it over, instead of being an argument.
    """
    for shard_id, tensors in modules.items():
        for suffix, tensor in tensors.items():
            param = dict(layer.named_parameters())[suffix]
            tensor = tensor.clone()
            if shard_id is not None and hung:
                tensor.shard_id = shard_id
                param.weight_loader(param, tensor)
            elif shard_id is not None:
                param.weight_loader(param, tensor, shard_id)
            else:
                param.weight_loader(param, tensor)
    layer.quant_method.process_weights_after_loading(layer)
