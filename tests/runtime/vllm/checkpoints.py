"""Small random models on disk: packed in any format, and the same weights plain.

Codes, zero points and scales are drawn here, and the plain weights are computed from them here, in NumPy: what the
packed folder is read with never touches the plain one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from w4plugin.formats.format import Layer
from w4plugin.formats.registry import quantization_config, write_module
from w4plugin.packing import pack
from w4plugin.tensor import W4Tensor


@dataclass(frozen=True)
class Recipe:
    """How the weights of a model are quantised.

    Attributes:
        format: registry name of the layout on disk.
        group_size: rows in a group.
        sym: no zero points.
        act_order: a random g_idx; "each" module its own, or "shared" by those with the same input.
        scale_dtype: of the stored scales.
        skip: last names of modules that stay plain.
        head: pack the head as well, in so many bits.
    """

    format: str = "gptq_v2"
    group_size: int = 64
    sym: bool = False
    act_order: str = ""
    scale_dtype: torch.dtype = torch.float16
    skip: tuple[str, ...] = ()
    head: int = 0


@dataclass(frozen=True)
class Shape:
    """The model's architecture: a Llama, or a Phi-3, whose q, k, v and gate, up are fused in the file."""

    hidden: int = 256
    inner: int = 512
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 512
    bias: bool = False
    tied: bool = False
    fused: bool = False
    dtype: str = "float16"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the linear layers of a block."""
        h, d = self.hidden, self.head_dim
        if self.fused:
            return {
                "self_attn.qkv_proj": ((self.heads + 2 * self.kv_heads) * d, h),
                "self_attn.o_proj": (h, self.heads * d),
                "mlp.gate_up_proj": (2 * self.inner, h),
                "mlp.down_proj": (h, self.inner),
            }
        return {
            "self_attn.q_proj": (self.heads * d, h),
            "self_attn.k_proj": (self.kv_heads * d, h),
            "self_attn.v_proj": (self.kv_heads * d, h),
            "self_attn.o_proj": (h, self.heads * d),
            "mlp.gate_proj": (self.inner, h),
            "mlp.up_proj": (self.inner, h),
            "mlp.down_proj": (h, self.inner),
        }

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Phi3ForCausalLM" if self.fused else "LlamaForCausalLM"],
            "model_type": "phi3" if self.fused else "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 512,
            "hidden_act": "silu",
            "attention_bias": self.bias,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
            "tie_word_embeddings": self.tied,
            "torch_dtype": self.dtype,
            **self.extra,
        }


@dataclass(frozen=True)
class Drawn:
    """A random quantised weight: what goes to disk, and what it means."""

    packed: W4Tensor
    plain: np.ndarray  # float64 [K, N]


def draw(rng: np.random.Generator, N: int, K: int, recipe: Recipe, g_idx: np.ndarray | None = None) -> Drawn:
    """A weight whose products have about the size that keeps activations at unit scale."""
    groups = -(-K // recipe.group_size)
    q = rng.integers(0, 16, (K, N))
    z = np.full((groups, N), 8) if recipe.sym else rng.integers(1, 15, (groups, N))
    s = torch.from_numpy(rng.uniform(0.5, 1.5, (groups, N)) * 0.2 * K**-0.5).to(recipe.scale_dtype)
    g = np.arange(K) // recipe.group_size
    if recipe.act_order:
        g = g[rng.permutation(K)] if g_idx is None else g_idx
    plain = (q - z[g]) * s.double().numpy()[g]
    packed = W4Tensor(
        qweight=pack(torch.from_numpy(q).to(torch.uint8), 0),
        scales=s,
        zeros=None if recipe.sym else torch.from_numpy(z).to(torch.uint8),
        g_idx=torch.from_numpy(g).to(torch.int32) if recipe.act_order else None,
        group_size=recipe.group_size,
    )
    return Drawn(packed, plain)


def write(folder: Path, recipe: Recipe, shape: Shape | None = None, seed: int = 0) -> tuple[Path, Path]:
    """A random model, twice.

    Returns:
        the folder with packed weights, and the one with the same weights in float32.
    """
    shape = shape or Shape()
    rng = np.random.default_rng(seed)
    shared: dict[str, torch.Tensor] = {"model.norm.weight": torch.ones(shape.hidden)}
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    layers: list[Layer] = []

    def floats(*size: int, std: float) -> torch.Tensor:
        return torch.from_numpy(rng.normal(0, std, size)).to(torch.float16).float()

    def add(name: str, N: int, K: int, how: Recipe, g_idx: np.ndarray | None) -> None:
        if name.rpartition(".")[2] in how.skip:
            shared[f"{name}.weight"] = floats(N, K, std=K**-0.5)
            return
        drawn = draw(rng, N, K, how, g_idx)
        tensors = gemv(drawn.packed) if how.format == "awq-gemv" else write_module(how.format, drawn.packed)
        packed.update({f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()})
        plain[f"{name}.weight"] = torch.from_numpy(drawn.plain.T.copy()).float()
        layers.append(Layer.of(name, drawn.packed))

    shared["model.embed_tokens.weight"] = floats(shape.vocab, shape.hidden, std=1.0)
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shared[f"{at}{norm}.weight"] = torch.ones(shape.hidden)
        orders: dict[str, np.ndarray] = {}
        for name, (N, K) in shape.linears().items():
            parent = name.partition(".")[0] + str(name.endswith(("o_proj", "down_proj")))
            if recipe.act_order == "shared" and parent not in orders:
                orders[parent] = (np.arange(K) // recipe.group_size)[rng.permutation(K)]
            add(at + name, N, K, recipe, orders.get(parent))
            if shape.bias and name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
                shared[f"{at}{name}.bias"] = floats(N, std=0.5)
    if recipe.head == 8:
        tensors, plain["lm_head.weight"] = eight_bit(rng, shape.vocab, shape.hidden)
        packed.update({f"lm_head.{suffix}": tensor for suffix, tensor in tensors.items()})
    elif recipe.head:
        add("lm_head", shape.vocab, shape.hidden, replace(recipe, skip=()), None)
    elif not shape.tied:
        shared["lm_head.weight"] = floats(shape.vocab, shape.hidden, std=shape.hidden**-0.5)
    names = [n.removesuffix(".weight") for n in shared if n.endswith("_proj.weight")]
    quant = quantization_config(recipe.format.removesuffix("-gemv"), layers, names)
    if recipe.format == "awq-gemv":
        quant["version"] = "gemv"
    if recipe.head == 8:
        quant = {**quant, "lm_head": True, "dynamic": {"lm_head": {"bits": 8, "group_size": 32, "sym": True}}}
    dtype = getattr(torch, shape.dtype)
    _save(folder / "packed", {**_to(shared, dtype), **packed}, {**shape.config(), "quantization_config": quant})
    config = {**shape.config(), "torch_dtype": "float32"}
    _save(folder / "plain", {**shared, **plain}, config)
    return folder / "packed", folder / "plain"


def gemv(weight: W4Tensor) -> dict[str, torch.Tensor]:
    """AWQ's GEMV layout: everything N-major, zero points and scales padded along the groups."""
    padding = -weight.G % (8 * {32: 4, 64: 2}.get(weight.group_size, 1))
    zeros = torch.nn.functional.pad(weight.full_zeros().t(), (0, padding))
    return {
        "qweight": weight.qweight.t().contiguous(),
        "qzeros": pack(zeros, 1),
        "scales": torch.nn.functional.pad(weight.scales.t(), (0, padding)).contiguous(),
    }


def eight_bit(rng: np.random.Generator, N: int, K: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A symmetric 8-bit GPTQ v2 module in groups of 32, as GPTQModel packs a head; and its plain weight ``[N, K]``."""
    q = rng.integers(0, 256, (K, N)).astype(np.uint8)
    s = (rng.uniform(0.5, 1.5, (K // 32, N)) * 0.01 * K**-0.5).astype(np.float16)
    g = np.arange(K) // 32
    tensors = {
        "qweight": q.reshape(K // 4, 4, N).transpose(0, 2, 1).copy().view(np.int32)[..., 0],
        "qzeros": np.full((K // 32, N), 128, np.uint8).view(np.int32),
        "scales": s,
        "g_idx": g.astype(np.int32),
    }
    plain = (q.astype(np.float64) - 128) * s.astype(np.float64)[g]
    return {name: torch.from_numpy(t.copy()) for name, t in tensors.items()}, torch.from_numpy(plain.T.copy()).float()


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; a dotted key ("quantization_config.sym", spelled with __) reaches into a table."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        table, names = config, key.split("__")
        for name in names[:-1]:
            table = table[name]
        if value is None:
            table.pop(names[-1], None)
        else:
            table[names[-1]] = value
    path.write_text(json.dumps(config))


def _to(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _save(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
