"""Small models that are packed here, and the same models with the weights that the packed ones stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

from w4plugin.formats.format import Layer
from w4plugin.formats.registry import quantization_config, write_module
from w4plugin.quantize import quantize
from w4plugin.tensor import W4Tensor

TINY = Path(__file__).parents[2] / "data" / "models" / "llama__gm_gptq_v2_asym_g64_actorder"
"""A whole model as GPTQModel wrote it: act-order, asymmetric, groups of 64."""

IDS = torch.arange(7, 39)[None]


def small(kind: type = LlamaConfig, **settings: Any) -> Any:
    """A config of two small layers."""
    return kind(
        **{
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 128,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
            **settings,
        }
    )


@dataclass(frozen=True)
class Recipe:
    """How to pack a model.

    Attributes:
        format: registry name.
        group_size, sym: of every layer.
        act_order: give every layer a g_idx that follows no order.
        skip: last names of layers that stay plain.
        head: pack lm_head as well.
        bias: a bias for every packed layer, "zero" or "random", whether the architecture has one or not.
    """

    format: str = "gptq_v2"
    group_size: int = 32
    sym: bool = False
    act_order: bool = False
    skip: Sequence[str] = ()
    head: bool = False
    bias: str | None = None
    model: Any = field(default_factory=small)


def write(folder: Path, recipe: Recipe) -> Any:
    """Write a packed checkpoint of a random model; returns the plain float32 model it stands for."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(recipe.model, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    tied = recipe.model.tie_word_embeddings
    if recipe.head and tied:  # the reference's head is its own
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if tied:
        del tensors["lm_head.weight"]
    layers = []
    for name, linear in model.named_modules():
        last = name.rpartition(".")[2]
        if (
            not isinstance(linear, torch.nn.Linear | Conv1D)
            or last in recipe.skip
            or (last == "lm_head" and not recipe.head)
        ):
            continue
        turned = isinstance(linear, Conv1D)  # GPT-2 keeps [K, N]
        plain = linear.weight.detach()
        weight = quantize(plain if turned else plain.t(), recipe.group_size, sym=recipe.sym)
        if recipe.act_order:
            order = torch.randperm(weight.K)
            weight = W4Tensor(
                weight.qweight, weight.scales, weight.zeros, weight.groups()[order].to(torch.int32), weight.group_size
            )
        plain = weight.dequantize(torch.float32)
        linear.weight.data = plain if turned else plain.t().contiguous()
        tensors.pop(f"{name}.weight", None)
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in write_module(recipe.format, weight).items()}
        if recipe.bias:
            bias = torch.zeros(weight.N) if recipe.bias == "zero" else torch.randn(weight.N)
            linear.bias = torch.nn.Parameter(bias)
            tensors[f"{name}.bias"] = bias
        layers.append(Layer.of(name, weight))
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    matrices = [n.removesuffix(".weight") for n, t in tensors.items() if n.endswith(".weight") and t.ndim == 2]
    config = {**recipe.model.to_dict(), "architectures": [type(model).__name__], "dtype": "float32"}
    config["quantization_config"] = quantization_config(recipe.format, layers, matrices)
    (folder / "config.json").write_text(json.dumps(config))
    return model


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Change the tensors of a checkpoint of one file."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change config.json."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    """float32 logits of a few tokens."""
    with torch.no_grad():
        return model(ids).logits.float()


def agree(model: Any, reference: Any) -> None:
    """Logits of two float32 models whose weights are the same numbers, summed in different orders.

    A float32 sum of the longest row here, 512 products, is off by at most 512 / 2**24 = 3e-5 of its magnitudes.
    """
    got, wanted = logits(model), logits(reference)
    torch.testing.assert_close(got, wanted, rtol=0, atol=512 / 2**24 * float(wanted.abs().max()))


def greedy(model: Any, tokens: int = 24) -> list[int]:
    """What a model says next, without chance and without an end."""
    out = model.generate(IDS, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return out[0, IDS.shape[1] :].tolist()
