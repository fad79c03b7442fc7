"""A LoRA adapter over packed weights does what it does over the plain ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.runtime.vllm.checkpoints import Recipe, Shape, write
from tests.runtime.vllm.engines import compare, engine, greedy

RANK = 4


def adapter(folder: Path, shape: Shape) -> Path:
    """A random adapter of every linear layer, strong enough to change what is generated."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for i in range(shape.layers):
        for name, (n, k) in shape.linears().items():
            at = f"base_model.model.model.layers.{i}.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, k, generator=generator) * k**-0.5
            tensors[f"{at}.lora_B.weight"] = torch.randn(n, RANK, generator=generator) * 0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    targets = [name.rpartition(".")[2] for name in shape.linears()]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_adapter_over_packed_weights(tmp_path: Path) -> None:
    packed, plain = write(tmp_path, Recipe("gptq_v2", act_order="each", skip=("v_proj",)), Shape())
    request = LoRARequest("adapter", 1, str(adapter(tmp_path / "adapter", Shape())))
    settings = {"dtype": "float32", "enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    with engine(packed, quantization="w4plugin", **settings) as llm:
        base, adapted = greedy(llm), greedy(llm, lora_request=request)
    assert [text.tokens for text in base] != [text.tokens for text in adapted]
    with engine(plain, **settings) as llm:
        compare(base, greedy(llm), 1e-3)
        compare(adapted, greedy(llm, lora_request=request), 1e-3)
