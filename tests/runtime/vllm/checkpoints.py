"""Small random models on disk: packed in any format, and the same weights plain.

Codes, zero points and scales are drawn and packed by the NumPy packers of the format tests, and the plain weights are
computed from the codes here: what a packed folder is read with never touches either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.formats import samples
from tests.formats.samples import Truth

Tensors = dict[str, torch.Tensor]


def _auto_round(t: Truth) -> dict[str, Any]:
    fields = {"bits": 4, "group_size": t.stated, "sym": t.sym, "data_type": "int", "autoround_version": "0.15.1"}
    return {"quant_method": "auto-round", "packing_format": "auto_round", **fields}


FORMATS: dict[str, tuple[Callable[[Truth], Tensors], Callable[[Truth], dict[str, Any]]]] = {
    "gptq": (samples.pack_gptq, samples.gptq_config),
    "gptq_v2": (partial(samples.pack_gptq, offset=0), partial(samples.gptq_config, version="gptq_v2")),
    "auto-round": (partial(samples.pack_gptq, offset=0, g_idx=False), _auto_round),
    "awq": (samples.pack_awq, samples.awq_config),
    "awq-gemv": (samples.pack_gemv, partial(samples.awq_config, version="gemv")),
    "awq-gemv-fast": (samples.pack_fast, partial(samples.awq_config, version="gemv_fast")),
    "awq-marlin": (
        partial(samples.pack_marlin, codes="qweight", scale="scales"),
        partial(samples.awq_config, version="marlin", zero_point=False),
    ),
    "gptq-marlin": (samples.pack_marlin, partial(samples.gptq_config, version="marlin")),
    "compressed-tensors": (samples.pack_ct, samples.ct_config),
    "compressed-tensors act-order": (partial(samples.pack_ct, order=True), samples.ct_config),
}
"""Tensors of a weight, and the config that goes with them."""


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}


@dataclass(frozen=True)
class Recipe:
    """How the weights of a model are quantised.

    Attributes:
        format: registry name of the layout on disk.
        group_size: rows in a group.
        sym: no zero points.
        act_order: a random g_idx; "each" module its own, or "shared" by those with the same input.
        scale_dtype: of the stored scales.
        skip: names, or ends of names, of modules that stay plain.
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
    """The model's architecture: a Llama, a Phi-3, whose q, k, v and gate, up are fused in the file, or a mixture of
    experts, "mixtral", "qwen2_moe" or "deepseek_v2" (with a shared expert), two of ``experts`` for a token."""

    hidden: int = 256
    inner: int = 512
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 512
    bias: bool = False
    tied: bool = False
    fused: bool = False
    mixture: str = ""
    experts: int = 4
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
        attention = {
            "self_attn.q_proj": (self.heads * d, h),
            "self_attn.k_proj": (self.kv_heads * d, h),
            "self_attn.v_proj": (self.kv_heads * d, h),
            "self_attn.o_proj": (h, self.heads * d),
        }
        if self.mixture == "deepseek_v2":  # keys and values by way of ``d`` features, half of a head rotated
            attention = {
                "self_attn.q_proj": (self.heads * d, h),
                "self_attn.kv_a_proj_with_mqa": (d + d // 2, h),
                "self_attn.kv_b_proj": (self.heads * (d // 2 + d), d),
                "self_attn.o_proj": (h, self.heads * d),
            }
        gate, up, down = ("w1", "w3", "w2") if self.mixture == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        inner: dict[str, tuple[int, int]] = {}
        for at in self._feed_forwards():
            inner |= {f"{at}.{gate}": (self.inner, h), f"{at}.{up}": (self.inner, h), f"{at}.{down}": (h, self.inner)}
        return attention | inner

    def _feed_forwards(self) -> list[str]:
        if self.mixture == "mixtral":
            return [f"block_sparse_moe.experts.{e}" for e in range(self.experts)]
        if self.mixture:
            shared = "mlp.shared_experts" if self.mixture == "deepseek_v2" else "mlp.shared_expert"
            return [*(f"mlp.experts.{e}" for e in range(self.experts)), shared]
        return ["mlp"]

    def biased(self) -> tuple[str, ...]:
        """Ends of names of layers that have a bias."""
        some = ("q_proj", "k_proj", "v_proj") if self.bias or self.mixture == "qwen2_moe" else ()
        return (*some, "o_proj") if self.bias else some

    def routers(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the layers of a block that no quantiser packs."""
        if self.mixture == "mixtral":
            return {"block_sparse_moe.gate": (self.experts, self.hidden)}
        gate = {"mlp.gate": (self.experts, self.hidden)}
        if self.mixture == "qwen2_moe":
            return gate | {"mlp.shared_expert_gate": (1, self.hidden)}
        return gate if self.mixture else {}

    def norms(self) -> dict[str, int]:
        """Features of the norms of a block."""
        found = {"input_layernorm": self.hidden, "post_attention_layernorm": self.hidden}
        return found | ({"self_attn.kv_a_layernorm": self.head_dim} if self.mixture == "deepseek_v2" else {})

    def config(self) -> dict[str, Any]:
        kind = "phi3" if self.fused else self.mixture or "llama"
        mixture = {
            "mixtral": {"num_local_experts": self.experts, "num_experts_per_tok": 2},
            "qwen2_moe": {
                "num_experts": self.experts,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": self.inner,
                "shared_expert_intermediate_size": self.inner,
                "norm_topk_prob": False,
            },
            "deepseek_v2": {
                "n_routed_experts": self.experts,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
                "moe_intermediate_size": self.inner,
                "first_k_dense_replace": 0,
                "routed_scaling_factor": 1.5,
                "topk_method": "greedy",
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": False,
                "q_lora_rank": None,
                "kv_lora_rank": self.head_dim,
                "qk_nope_head_dim": self.head_dim // 2,
                "qk_rope_head_dim": self.head_dim // 2,
                "v_head_dim": self.head_dim,
                "num_key_value_heads": self.heads,
            },
        }
        return {
            "architectures": [ARCHITECTURES[kind]],
            "model_type": kind,
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
            **mixture.get(kind, {}),
            **self.extra,
        }


def draw(rng: np.random.Generator, N: int, K: int, recipe: Recipe, g: np.ndarray | None = None) -> Truth:
    """A weight whose products have about the size that keeps activations at unit scale; ``g`` is a given act-order."""
    size = min(recipe.group_size, K)
    groups = -(-K // size)
    z = np.full((groups, N), 8, np.uint8) if recipe.sym else rng.integers(1, 15, (groups, N), dtype=np.uint8)
    s = torch.from_numpy(rng.uniform(0.5, 1.5, (groups, N)) * 0.2 * K**-0.5).to(recipe.scale_dtype)
    if g is None:
        g = np.arange(K) // size
        g = rng.permutation(g) if recipe.act_order else g
    return Truth(rng.integers(0, 16, (K, N), dtype=np.uint8), z, s, g.astype(np.int32), size, recipe.sym)


def plain_weight(t: Truth) -> torch.Tensor:
    """``[N, K]`` float32 of ``(q - z) * s``, exact for 16-bit scales."""
    weight = (t.q.astype(np.int64) - t.z.astype(np.int64)[t.g]) * t.s.double().numpy()[t.g]
    return torch.from_numpy(weight.T.copy()).float()


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
    truths: list[Truth] = []

    def floats(*size: int, std: float) -> torch.Tensor:
        return torch.from_numpy(rng.normal(0, std, size)).to(torch.float16).float()

    def add(name: str, N: int, K: int, how: Recipe, g_idx: np.ndarray | None) -> None:
        if f".{name}".endswith(tuple(f".{skipped}" for skipped in how.skip)):
            shared[f"{name}.weight"] = floats(N, K, std=K**-0.5)
            return
        truth = draw(rng, N, K, how, g_idx)
        packed.update({f"{name}.{suffix}": tensor for suffix, tensor in FORMATS[how.format][0](truth).items()})
        plain[f"{name}.weight"] = plain_weight(truth)
        truths.append(truth)

    shared["model.embed_tokens.weight"] = floats(shape.vocab, shape.hidden, std=1.0)
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        for norm, features in shape.norms().items():
            shared[f"{at}{norm}.weight"] = torch.ones(features)
        for name, (N, K) in shape.routers().items():
            shared[f"{at}{name}.weight"] = floats(N, K, std=K**-0.5)
        orders: dict[str, np.ndarray] = {}
        for name, (N, K) in shape.linears().items():
            parent = name.rpartition(".")[0] + str(name.endswith(("o_proj", "down_proj", "w2")))
            expert = ".experts." in name  # whose gate and up share their act-order, since they share their input
            if (recipe.act_order == "shared" or (recipe.act_order and expert)) and parent not in orders:
                orders[parent] = (np.arange(K) // recipe.group_size)[rng.permutation(K)]
            add(at + name, N, K, recipe, orders.get(parent))
            if name.endswith(shape.biased()):
                shared[f"{at}{name}.bias"] = floats(N, std=0.5)
    if recipe.head == 8:
        tensors, plain["lm_head.weight"] = eight_bit(rng, shape.vocab, shape.hidden)
        packed.update({f"lm_head.{suffix}": tensor for suffix, tensor in tensors.items()})
    elif recipe.head:
        add("lm_head", shape.vocab, shape.hidden, replace(recipe, skip=()), None)
    elif not shape.tied:
        shared["lm_head.weight"] = floats(shape.vocab, shape.hidden, std=shape.hidden**-0.5)
    quant = FORMATS[recipe.format][1](max(truths, key=lambda t: t.K))
    if recipe.head == 8:
        quant = {**quant, "lm_head": True, "dynamic": {"lm_head": {"bits": 8, "group_size": 32, "sym": True}}}
    dtype = getattr(torch, shape.dtype)
    _save(folder / "packed", {**_to(shared, dtype), **packed}, {**shape.config(), "quantization_config": quant})
    config = {**shape.config(), "torch_dtype": "float32"}
    _save(folder / "plain", {**shared, **plain}, config)
    return folder / "packed", folder / "plain"


def eight_bit(rng: np.random.Generator, N: int, K: int) -> tuple[Tensors, torch.Tensor]:
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
