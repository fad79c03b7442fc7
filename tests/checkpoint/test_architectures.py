"""Names as models have them: fused layers, experts in both spellings, towers, and what a quantiser left plain."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint import models
from tests.formats import samples
from tests.formats.samples import Truth, truth
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.repack import repack
from w4plugin.checkpoint.verify import verify
from w4plugin.formats import find_modules
from w4plugin.quant_config import QuantConfig


@dataclass(frozen=True)
class Family:
    """A model's names.

    Attributes:
        packed: (K, N) of each packed layer.
        plain: shape of every other tensor.
        size: rows in a group.
        skipped: what the producer's skip list says, as substrings of names.
    """

    packed: Mapping[str, tuple[int, int]]
    plain: Mapping[str, tuple[int, ...]]
    size: int = 16
    skipped: tuple[str, ...] = field(default=())


ENDS = {"model.embed_tokens.weight": (40, 32), "model.norm.weight": (32,), "lm_head.weight": (40, 32)}


def experts(prefix: str, count: int, *leaves: str) -> dict[str, tuple[int, int]]:
    """Experts with K = 32 up and N = 32 down."""
    down = leaves[-1]
    return {f"{prefix}.{e}.{leaf}": (48, 32) if leaf == down else (32, 48) for e in range(count) for leaf in leaves}


L = "model.layers.{}"

FAMILIES = {
    "phi3, fused in the file": Family(
        packed={
            f"{L.format(i)}.{leaf}": shape
            for i in range(2)
            for leaf, shape in {
                "self_attn.qkv_proj": (32, 32 + 2 * 8),
                "self_attn.o_proj": (32, 32),
                "mlp.gate_up_proj": (32, 2 * 48),
                "mlp.down_proj": (48, 32),
            }.items()
        },
        plain={**ENDS, "model.layers.0.input_layernorm.weight": (32,)},
    ),
    "mixtral": Family(
        packed={
            "model.layers.0.self_attn.q_proj": (32, 32),
            **experts("model.layers.0.block_sparse_moe.experts", 3, "w1", "w3", "w2"),
        },
        plain={**ENDS, "model.layers.0.block_sparse_moe.gate.weight": (3, 32)},
        skipped=("gate",),
    ),
    "qwen3-moe with a shared expert": Family(
        packed={
            **experts("model.layers.0.mlp.experts", 4, "gate_proj", "up_proj", "down_proj"),
            "model.layers.0.mlp.shared_expert.gate_proj": (32, 48),
            "model.layers.0.mlp.shared_expert.down_proj": (48, 32),
        },
        plain={
            **ENDS,
            "model.layers.0.mlp.gate.weight": (4, 32),
            "model.layers.0.mlp.shared_expert_gate.weight": (1, 32),
        },
        skipped=("mlp.gate.", "shared_expert_gate"),
    ),
    "deepseek: a dense layer, then experts, and latent attention": Family(
        packed={
            "model.layers.0.mlp.gate_proj": (32, 48),
            "model.layers.0.mlp.down_proj": (48, 32),
            "model.layers.0.self_attn.q_a_proj": (32, 16),
            "model.layers.0.self_attn.kv_a_proj_with_mqa": (32, 72),
            "model.layers.0.self_attn.kv_b_proj": (64, 56),
            **experts("model.layers.1.mlp.experts", 2, "gate_proj", "up_proj", "down_proj"),
        },
        plain={
            **ENDS,
            "model.layers.1.mlp.gate.weight": (2, 32),
            "model.layers.1.mlp.gate.e_score_correction_bias": (2,),
        },
    ),
    "experts, layers and a head left plain": Family(
        packed={
            "model.layers.1.mlp.experts.0.down_proj": (48, 32),
            "model.layers.1.mlp.experts.2.down_proj": (48, 32),
            "model.layers.1.self_attn.q_proj": (32, 32),
            "lm_head": (32, 40),
        },
        plain={
            "model.embed_tokens.weight": (40, 32),
            "model.layers.0.self_attn.q_proj.weight": (32, 32),  # a whole layer
            "model.layers.0.mlp.experts.0.down_proj.weight": (32, 48),
            "model.layers.1.mlp.experts.1.down_proj.weight": (32, 48),  # one expert
            "mtp.layers.0.self_attn.q_proj.weight": (32, 32),
            "mtp.fc.weight": (32, 64),
        },
    ),
    "a tower whose layers are named as the language model's": Family(
        packed={
            "language_model.model.layers.0.self_attn.q_proj": (32, 32),
            "language_model.model.layers.0.self_attn.out_proj": (32, 32),
            "language_model.model.layers.1.self_attn.q_proj": (32, 32),
        },
        plain={
            "language_model.model.embed_tokens.weight": (40, 32),
            "language_model.lm_head.weight": (40, 32),
            "vision_tower.vision_model.embeddings.patch_embedding.weight": (8, 3, 4, 4),
            "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight": (24, 24),
            "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.bias": (24,),
            "vision_tower.vision_model.encoder.layers.0.self_attn.out_proj.weight": (24, 24),
            "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight": (24,),
            "multi_modal_projector.linear_1.weight": (32, 24),
            "multi_modal_projector.linear_1.bias": (32,),
        },
        skipped=("vision_tower", "multi_modal_projector", "lm_head"),
    ),
    "qwen-vl": Family(
        packed={f"model.language_model.layers.{i}.mlp.{leaf}": (32, 32) for i in range(2) for leaf in ("up", "down")},
        plain={
            "model.language_model.embed_tokens.weight": (40, 32),
            "model.visual.patch_embed.proj.weight": (24, 3, 2, 4, 4),
            "model.visual.blocks.0.attn.qkv.weight": (72, 24),
            "model.visual.blocks.0.attn.qkv.bias": (72,),
            "model.visual.blocks.0.mlp.up.weight": (48, 24),
            "model.visual.merger.mlp.2.weight": (32, 24),
            "lm_head.weight": (40, 32),
        },
        skipped=("visual",),
    ),
    "activations with scales of their own": Family(
        packed={
            "transformer.h.0.self_attention.query_key_value": (32, 96),
            "transformer.h.0.mlp.dense_h_to_4h": (32, 64),
            "transformer.h.0.mlp.dense_4h_to_h": (64, 32),
        },
        plain={
            "transformer.h.0.mlp.act.scales": (64,),
            "transformer.word_embeddings.weight": (40, 32),
            "transformer.ln_f.weight": (32,),
            "transformer.ln_f.bias": (32,),
        },
    ),
    "other fused names": Family(
        packed={
            "transformer.h.0.attn.c_attn": (32, 96),
            "model.layers.0.self_attn.W_pack": (32, 96),
            "model.layers.0.attention.wqkv": (32, 48),
            "transformer.blocks.0.attn.Wqkv": (32, 96),
            "gpt_neox.layers.0.attention.query_key_value": (32, 96),
            "model.decoder.layers.0.fc1": (32, 64),
        },
        plain={"model.embed_tokens.weight": (40, 32)},
    ),
}

Pack = Callable[[Truth], dict[str, Tensor]]
Spell = Callable[[Truth, tuple[str, ...]], dict[str, Any]]


def _gptq(t: Truth, skipped: tuple[str, ...]) -> dict[str, Any]:
    return samples.gptq_config(t, dynamic={f"-:.*{part.replace('.', chr(92) + '.')}": {} for part in skipped})


def _awq(t: Truth, skipped: tuple[str, ...]) -> dict[str, Any]:
    return samples.awq_config(t, modules_to_not_convert=[part.rstrip(".") for part in skipped if part != "gate"])


def _ct(t: Truth, skipped: tuple[str, ...]) -> dict[str, Any]:
    return {**samples.ct_config(t), "ignore": [f"re:.*{part.replace('.', chr(92) + '.')}" for part in skipped]}


FORMATS: dict[str, tuple[Pack, Spell]] = {
    "gptq": (samples.pack_gptq, _gptq),
    "awq": (samples.pack_awq, _awq),
    "compressed-tensors": (samples.pack_ct, _ct),
}


def make(path: Path, family: Family, name: str) -> tuple[Path, dict[str, Truth], dict[str, Tensor]]:
    """A model of that family in that format, its weights, and its plain tensors."""
    pack, spell = FORMATS[name]
    shapes = enumerate(family.packed.items())
    truths = {n: truth(i, K=k, N=width, size=family.size, lowest=1) for i, (n, (k, width)) in shapes}
    g = torch.Generator().manual_seed(0)
    plain = {n: torch.randn(shape, generator=g).bfloat16() for n, shape in family.plain.items()}
    tensors = {**models.layers({n: pack(t) for n, t in truths.items()}), **plain}
    config = spell(next(iter(truths.values())), family.skipped)
    return models.folder(path, tensors, config), truths, plain


@pytest.mark.parametrize("to", ["gptq_v2", "awq", "compressed-tensors", "auto-round"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_layers_are_rewritten_and_all_else_is_carried_bit_for_bit(
    family: str, name: str, to: str, tmp_path: Path
) -> None:
    source, truths, plain = make(tmp_path / "in", FAMILIES[family], name)
    report = repack(source, tmp_path / "out", to=to)
    assert {m["name"] for m in report["modules"]} == set(truths)
    assert [n["text"] for n in report["notes"] if n["level"] == "conflict"] == []
    result = verify(source, tmp_path / "out")
    assert result["ok"], result["mismatches"]
    after = load_file(tmp_path / "out" / "model.safetensors")
    for key, tensor in plain.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key], tensor), key
    out = Checkpoint.open(tmp_path / "out")
    for module, t in truths.items():
        found = {m.name: m for m in out.census.modules}[module]
        assert (found.K, found.N, found.group_size) == (t.K, t.N, t.size)
    _readers_can_tell_plain_from_packed(out, to)


def _readers_can_tell_plain_from_packed(out: Checkpoint, to: str) -> None:
    """Which layers a reader of the written config alone would make packed ones."""
    assert [n.text for n in out.census.notes if n.level != "info" and "scales of an activation" not in n.text] == []
    config, packed = out.quant_config, {m.name for m in out.census.modules}
    leaves = {name.rpartition(".")[2] for name in packed}
    for name in packed:
        assert config.for_module(name).quantized is not False, name
    for name in out.census.plain_layers:
        if to != "gptq_v2" or name.rpartition(".")[2] in leaves:
            assert config.for_module(name).quantized is False, name


@pytest.mark.parametrize("name", FORMATS)
def test_experts_stacked_in_three_dimensions(name: str, tmp_path: Path) -> None:
    """As transformers 5 keeps them, and compressed-tensors packs them: one tensor for all experts of a layer."""
    pack, spell = FORMATS[name]
    shapes = {"gate_up_proj": (32, 96), "down_proj": (48, 32)}
    truths = {
        f"model.layers.0.mlp.experts.{leaf}": [truth(10 * e + k, K=k, N=n, size=16, lowest=1) for e in range(3)]
        for leaf, (k, n) in shapes.items()
    }
    packed = {
        module: {s: torch.stack([pack(t)[s] for t in parts]) for s in pack(parts[0])}
        for module, parts in truths.items()
    }
    router = torch.randn(3, 32).bfloat16()
    tensors = {**models.layers(packed), "model.layers.0.mlp.gate.weight": router}
    source = models.folder(tmp_path / "in", tensors, spell(truths["model.layers.0.mlp.experts.down_proj"][0], ()))
    assert {m.experts for m in Checkpoint.open(source).census.modules} == {3}
    for to in ("gptq_v2", "compressed-tensors", "awq"):
        repack(source, tmp_path / to, to=to)
        result = verify(source, tmp_path / to)
        assert result["ok"], result["mismatches"]
        assert torch.equal(load_file(tmp_path / to / "model.safetensors")["model.layers.0.mlp.gate.weight"], router)
    back = load_file(tmp_path / {"gptq": "gptq_v2"}.get(name, name) / "model.safetensors")
    for key, tensor in models.layers(packed).items():
        if not key.endswith(("qzeros", "weight_shape")):  # v1 became v2; sizes of a stack are said once
            assert torch.equal(back[key], tensor), key


def test_a_short_last_group_of_192_rows_beside_whole_ones(tmp_path: Path) -> None:
    """DeepSeek's experts have K = 192 where the rest has groups of 128; only GPTQ holds that."""
    truths = {"model.layers.0.a": truth(1, K=256, N=16, size=128, lowest=1)}
    truths["model.layers.0.b"] = truth(2, K=192, N=16, size=128, lowest=1)
    tensors = models.layers({n: samples.pack_gptq(t, g_idx=False) for n, t in truths.items()})
    source = models.folder(tmp_path / "in", tensors, samples.gptq_config(truths["model.layers.0.a"]))
    repack(source, tmp_path / "out")
    assert verify(source, tmp_path / "out")["ok"]
    modules = {m.name: m for m in Checkpoint.open(tmp_path / "out").census.modules}
    assert [(m.K, m.group_size) for m in modules.values()] == [(256, 128), (192, 128)]


def test_a_packed_router_of_eight_columns(tmp_path: Path) -> None:
    """N = 8 is one word of AWQ; N = 1 cannot be packed, and is not."""
    t = truth(3, K=32, N=8, size=16)
    tensors = models.layers({"model.layers.0.mlp.gate": samples.pack_awq(t)})
    assert tensors["model.layers.0.mlp.gate.qweight"].shape == (32, 1)
    tensors["model.layers.0.mlp.shared_expert_gate.weight"] = torch.ones(1, 32).half()
    source = models.folder(tmp_path / "in", tensors, samples.awq_config(t))
    repack(source, tmp_path / "out")
    assert verify(source, tmp_path / "out")["ok"]


@pytest.mark.parametrize("name", ["awq-gemv", "gptq_v2", "compressed-tensors"])
def test_a_layer_with_one_scale(name: str, tmp_path: Path) -> None:
    """One output and one group: a single number, whose strides torch does not care about."""
    t = truth(4, K=128, N=1, size=128, lowest=1)
    pack, config = {
        "awq-gemv": (samples.pack_gemv, samples.awq_config(t, "gemv", group_size=128)),
        "gptq_v2": (lambda t: samples.pack_gptq(t, offset=0), samples.gptq_config(t, "gptq_v2")),
        "compressed-tensors": (samples.pack_ct, samples.ct_config(t)),
    }[name]
    source = models.folder(tmp_path / "in", models.layers({models.name(0): pack(t)}), config)
    for to in ("gptq_v2", "compressed-tensors", "auto-round"):
        repack(source, tmp_path / to, to=to)
        assert verify(source, tmp_path / to)["ok"]


def test_activation_scales_survive_and_are_pointed_out(tmp_path: Path) -> None:
    source, _, plain = make(tmp_path / "in", FAMILIES["activations with scales of their own"], "awq")
    report = repack(source, tmp_path / "out")
    name = "transformer.h.0.mlp.act.scales"
    (note,) = [n for n in report["notes"] if n["where"] == name]
    assert note["level"] == "warning"
    assert "of an activation" in note["text"]
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], plain[name])


def test_gptq_tensors_of_every_family_are_found_without_a_config(tmp_path: Path) -> None:
    for i, family in enumerate(FAMILIES.values()):
        source, truths, _ = make(tmp_path / str(i), family, "gptq")
        (source / "config.json").write_text(json.dumps(models.CONFIG))
        census = find_modules(Checkpoint.open(source).headers, QuantConfig())
        assert {m.name: (m.K, m.N, m.group_size) for m in census.modules} == {
            n: (t.K, t.N, t.size) for n, t in truths.items()
        }
