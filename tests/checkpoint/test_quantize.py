"""Quantise: which layers, what error, and a checkpoint that the other verbs read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint import models
from w4plugin.checkpoint import quantize as verb
from w4plugin.checkpoint import repack
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.dequantize import dequantize
from w4plugin.checkpoint.quantize import is_decoder_linear, quantize
from w4plugin.checkpoint.verify import verify
from w4plugin.errors import CorruptError, UnsupportedError, UsageError


def moe(path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A plain model with experts, a router and a vision tower."""
    g = torch.Generator().manual_seed(0)
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": (64, 64), "model.layers.0.mlp.gate.weight": (4, 64),
        "model.layers.0.mlp.experts.0.down_proj.weight": (64, 128),
        "model.layers.0.mlp.shared_expert_gate.weight": (1, 64),
        "visual.blocks.0.attn.qkv.weight": (96, 64), "model.embed_tokens.weight": (32, 64), "lm_head.weight": (32, 64),
        "model.layers.0.input_layernorm.weight": (64,), "model.layers.0.mlp.odd_proj.weight": (64, 60),
    }  # fmt: skip
    return models.folder(path, {n: torch.randn(s, generator=g).to(dtype) for n, s in shapes.items()}, None)


PACKED = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.0.down_proj")


@pytest.mark.parametrize("to", ["gptq_v2", "awq", "compressed-tensors"])
@pytest.mark.parametrize("sym", [True, False])
def test_decoder_layers_are_packed_and_close(tmp_path: Path, to: str, sym: bool) -> None:
    source = moe(tmp_path / "in")
    report = quantize(source, tmp_path / "out", to=to, group_size=32, sym=sym)
    assert tuple(sorted(m["name"] for m in report["modules"])) == tuple(sorted(PACKED))
    assert [n["where"] for n in report["notes"] if n["level"] == "warning"] == ["model.layers.0.mlp.odd_proj"]
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert {m.name for m in checkpoint.census.modules} == set(PACKED)
    assert verify(tmp_path / "out")["ok"]
    dequantize(tmp_path / "out", tmp_path / "plain")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "plain" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name.removesuffix(".weight") in PACKED:
            assert_within_half_a_step(tensor, after[name], 32, sym)
        else:
            assert torch.equal(tensor, after[name])


def assert_within_half_a_step(weight: Tensor, back: Tensor, group: int, sym: bool) -> None:
    """Round to nearest errs by half a step, and asymmetric zeros, being rounded, by up to another half at the ends."""
    w = weight.double().unflatten(1, (-1, group))
    step = w.abs().amax(-1) / 7 if sym else (w.amax(-1) - w.amin(-1)) / 15
    error = (w - back.double().unflatten(1, (-1, group))).abs().amax(-1)
    # scales are stored as float16, which moves a code's value by up to 15 steps times 2**-11
    assert bool((error <= step * ((0.5 if sym else 1.0) + 15 * 2.0**-11) + 1e-6).all())


def test_names() -> None:
    for name in ("model.layers.3.mlp.gate_proj", "model.layers.0.block_sparse_moe.experts.1.w2",
                 "transformer.h.0.attn.c_attn", "model.language_model.layers.9.self_attn.o_proj",
                 "model.layers.0.mlp.shared_expert.up_proj"):  # fmt: skip
        assert is_decoder_linear(name), name
    for name in ("lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.0.block_sparse_moe.gate",
                 "model.layers.0.mlp.shared_expert_gate", "visual.blocks.0.attn.qkv", "model.layers.0.input_layernorm",
                 "vision_tower.vision_model.encoder.layers.0.mlp.fc1", "mtp.layers.0.eh_proj"):  # fmt: skip
        assert not is_decoder_linear(name), name


def test_patterns_ask_for_more_or_less(tmp_path: Path) -> None:
    source = moe(tmp_path / "in")
    report = quantize(source, tmp_path / "a", group_size=32, include=["lm_head", "model.layers.*"], exclude=["*.gate"])
    assert {m["name"] for m in report["modules"]} == {*PACKED, "lm_head"}
    config = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert config["lm_head"] is True
    with pytest.raises(UsageError, match="no layer to quantise"):
        quantize(source, tmp_path / "b", include=["model.layers.0.mlp.gate"])
    with pytest.raises(UsageError, match="matches no module"):
        quantize(source, tmp_path / "b", include=["nothing"])


def test_a_tied_head_is_refused(tmp_path: Path) -> None:
    source = moe(tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(UnsupportedError, match="tied"):
        quantize(source, tmp_path / "out", group_size=32, include=["lm_head"])


@pytest.mark.parametrize("group_size", [0, -2, 4, 12])
def test_group_sizes_that_make_no_sense(tmp_path: Path, group_size: int) -> None:
    with pytest.raises(UsageError, match="--group-size"):
        quantize(moe(tmp_path / "in"), tmp_path / "out", group_size=group_size)


def test_quantised_checkpoints_and_broken_weights(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="a quantised checkpoint"):
        quantize(models.awq(tmp_path / "awq"), tmp_path / "out")
    source = moe(tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{PACKED[0]}.weight"][3, 4] = float("nan")
    models.folder(source, tensors, None)
    with pytest.raises(CorruptError, match=rf"{PACKED[0]}\.weight"):
        quantize(source, tmp_path / "out", group_size=32)
    assert not list(tmp_path.glob("out*"))


def test_one_group_and_a_short_last_one(tmp_path: Path) -> None:
    source = moe(tmp_path / "in")
    for size in (-1, 48):
        out = tmp_path / f"out{size}"
        quantize(source, out, group_size=size)
        assert verify(out)["ok"]
        sizes = {m.name: m.group_size for m in Checkpoint.open(out).census.modules}
        assert sizes == ({PACKED[0]: 64, PACKED[1]: 128} if size == -1 else dict.fromkeys(PACKED, 48))


def test_cuts_give_what_the_whole_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = moe(tmp_path / "in")
    for elements in (1, 300, 1 << 22):
        monkeypatch.setattr(repack, "ELEMENTS", elements)
        monkeypatch.setattr(verb, "ELEMENTS", elements)
        quantize(source, tmp_path / f"packed{elements}", group_size=48)
        dequantize(tmp_path / f"packed{elements}", tmp_path / f"plain{elements}")
    for kind in ("packed", "plain"):
        first, *others = (models.contents(tmp_path / f"{kind}{n}")["model.safetensors"] for n in (1, 300, 1 << 22))
        assert all(other == first for other in others)
