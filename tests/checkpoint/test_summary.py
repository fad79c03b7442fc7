"""Inspect: what headers tell, what data tells, and what is known of vLLM."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.checkpoint import models
from tests.formats import samples
from tests.formats.samples import truth
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.summary import inspect, kinds


@pytest.mark.parametrize("source", models.REAL, ids=lambda p: p.name)
def test_real_checkpoints(source: Path) -> None:
    result = inspect(source)
    assert result["modules"]
    assert result["packed_weights"] == sum(m["K"] * m["N"] for m in result["modules"])
    assert result["bytes"] == sum(Checkpoint.open(source).nbytes(n) for n in Checkpoint.open(source).headers)
    for module in result["modules"]:
        assert module["bits_per_weight"] == round(8 * module["bytes"] / (module["K"] * module["N"]), 3)
    seen = inspect(source, values=True)
    for before, after in zip(result["modules"], seen["modules"], strict=True):
        if before["bits"] == 4:
            assert after["zero_rule"] is not None
            assert (after["K"], after["N"]) == (before["K"], before["N"])


def test_values_say_what_the_config_does_not(tmp_path: Path) -> None:
    t = truth(sym=True)
    tensors = models.layers({models.name(0): samples.pack_gptq(t), models.name(1): samples.pack_gptq(t)})
    wrong = samples.gptq_config(t, sym=False, desc_act=True)
    source = models.folder(tmp_path / "in", tensors, wrong)
    said = inspect(source)["modules"][0]
    assert (said["sym"], said["desc_act"]) == (False, True)
    seen = inspect(source, values=True)["modules"][0]
    assert (seen["sym"], seen["desc_act"]) == (True, False)


def verdict(source: Path) -> list[str]:
    result = inspect(source)["vllm"]
    assert result["takes"] is not bool(result["reasons"])
    return result["reasons"]


def test_vllm_takes_a_symmetric_gptq(tmp_path: Path) -> None:
    t = truth(sym=True)
    tensors = {**models.layers({models.name(0): samples.pack_gptq(t)}), **models.plain()}
    assert verdict(models.folder(tmp_path / "in", tensors, samples.gptq_config(t))) == []
    t = truth()
    tensors = {**models.layers({models.name(0): samples.pack_awq(t)}), **models.plain()}
    assert verdict(models.folder(tmp_path / "awq", tensors, samples.awq_config(t))) == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("asymmetric", "sym=false"),
        ("packing", "packing_format auto_round: vLLM's loader takes auto_round:auto_gptq"),
        ("act-order", "desc_act=true"),
        ("group 16", "group size 16"),
        ("short group", "a short last group"),
        ("gemv", "awq-gemv under the method awq"),
        ("no zeros", "AWQ without qzeros"),
        ("no config", "no quantization_config"),
        ("head", "a packed head of 40 columns"),
        ("mixed", "packed and other weights in what vLLM makes one layer"),
        ("ct act-order", "weight_g_idx"),
        ("skip list", "modules_to_not_convert"),
        ("experts", "experts that stayed plain"),
        ("stacked experts", "packed experts as stacks"),
        ("fused experts", "gate and up of packed experts in one"),
    ],
)
def test_why_vllm_would_not(tmp_path: Path, kind: str, reason: str) -> None:
    t, path, name = truth(sym=True, lowest=1), tmp_path / "in", models.name(0)
    asym = truth(lowest=1)
    pack, gptq = samples.pack_gptq, samples.gptq_config
    sixteen, short = truth(sym=True, size=16), truth(sym=True, K=80, size=32)
    gemv, wide = truth(K=256, size=64), truth(sym=True, N=40)
    act = truth(order="act", sym=True)
    bare = {k: v for k, v in samples.pack_awq(t).items() if k != "qzeros"}
    plain = {f"{models.name(0, 'self_attn.k_proj')}.weight": torch.zeros(32, 64)}
    expert = "model.layers.0.mlp.experts"
    sources = {
        "asymmetric": lambda: models.folder(path, models.layers({name: pack(asym)}), gptq(asym)),
        "act-order": lambda: models.folder(path, models.layers({name: pack(t)}), gptq(t, desc_act=True)),
        "packing": lambda: models.folder(
            path,
            models.layers({name: pack(asym, offset=0, g_idx=False)}),
            {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 32, "sym": False},
        ),
        "group 16": lambda: models.folder(path, models.layers({name: pack(sixteen)}), gptq(sixteen)),
        "short group": lambda: models.folder(path, models.layers({name: pack(short)}), gptq(short)),
        "gemv": lambda: models.folder(
            path, models.layers({name: samples.pack_gemv(gemv)}), samples.awq_config(gemv, "gemv")
        ),
        "no zeros": lambda: models.folder(
            path, models.layers({name: bare}), {**samples.awq_config(t), "zero_point": False}
        ),
        "no config": lambda: models.folder(path, models.layers({name: pack(t)}), None),
        "head": lambda: models.folder(path, models.layers({"lm_head": pack(wide)}), gptq(wide, lm_head=True)),
        "mixed": lambda: models.folder(
            path, {**models.layers({models.name(0, "self_attn.q_proj"): pack(t)}), **plain}, gptq(t)
        ),
        "ct act-order": lambda: models.folder(
            path, models.layers({name: samples.pack_ct(act, order=True)}), samples.ct_config(act)
        ),
        "skip list": lambda: models.folder(
            path, models.layers({name: samples.pack_awq(t)}), samples.awq_config(t, modules_to_not_convert=["down"])
        ),
        "experts": lambda: models.folder(
            path,
            {**models.layers({f"{expert}.0.down_proj": pack(t)}), f"{expert}.1.down_proj.weight": torch.zeros(32, 64)},
            gptq(t),
        ),
    }
    stack = {suffix: torch.stack([tensor] * 2) for suffix, tensor in pack(t).items()}
    sources |= {
        "stacked experts": lambda: models.folder(path, models.layers({f"{expert}.down_proj": stack}), gptq(t)),
        "fused experts": lambda: models.folder(path, models.layers({f"{expert}.0.gate_up_proj": pack(t)}), gptq(t)),
    }
    assert any(reason in r for r in verdict(sources[kind]())), verdict(path)


def test_what_vllm_is_not_asked_about_experts(tmp_path: Path) -> None:
    """A list that would hit a gate projection does not hit the experts as a whole; a layer may be plain throughout."""
    t, expert = truth(sym=True, lowest=1), "model.layers.{}.mlp.experts.0.gate_proj"
    packed = models.layers({expert.format(0): samples.pack_awq(t)})
    tensors = packed | {f"{expert.format(1)}.weight": torch.zeros(32, 64)}
    lists = {"modules_to_not_convert": ["gate", "model.layers.1."]}
    assert verdict(models.folder(tmp_path / "awq", tensors, samples.awq_config(t, **lists))) == []
    listed = models.layers({expert.format(0): samples.pack_gptq(t), models.name(0): samples.pack_gptq(t)})
    config = samples.gptq_config(t, modules_in_block_to_quantize=[[models.name(0).partition("layers.0.")[2]]])
    assert verdict(models.folder(tmp_path / "gptq", listed, config)) == []


def test_f8_an_expert_that_stayed_plain_is_shown(tmp_path: Path) -> None:
    t = truth(lowest=1)
    expert = "model.layers.0.mlp.experts"
    tensors = {
        **models.layers({f"{expert}.0.down_proj": samples.pack_gptq(t)}),
        f"{expert}.1.down_proj.weight": torch.zeros(32, 64),
    }
    result = inspect(models.folder(tmp_path / "in", tensors, samples.gptq_config(t)))
    assert [p["name"] for p in result["plain_layers"]] == [f"{expert}.1.down_proj"]


def test_kinds_are_counted_in_natural_order() -> None:
    rows = [{"name": f"layers.{i}.{leaf}", "K": 8 if i != 3 else 16} for i in range(12) for leaf in ("b", "a")]
    found = [(name, count, row["K"]) for name, count, row in kinds(rows, ("K",))]
    assert found == [("layers.3.a", 1, 16), ("layers.3.b", 1, 16), ("layers.*.a", 11, 8), ("layers.*.b", 11, 8)]
    assert kinds([{"name": "x.2.y", "K": 1}], ("K",)) == [("x.2.y", 1, {"name": "x.2.y", "K": 1})]


def test_headers_of_a_hundred_shards_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor's data is read; how long it takes is tools/bench_repack's business."""
    source = models.gptq(tmp_path / "in", count=100, shards=100)

    def never(*_: object) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(Checkpoint, "tensor", never)
    monkeypatch.setattr(Checkpoint, "blocks", never)
    started = time.monotonic()
    result = inspect(source)
    assert len(result["source"]["files"]) == 100
    assert len(result["modules"]) == 100
    assert time.monotonic() - started < 30
