"""Real people's checkpoints at the command line, one test a row of the catalogue of cases.

Each checkpoint goes through inspect, repack, verify and dequantise, and what comes out is compared with the codes, zero
points and scales that went in; or it is refused with the exit code of its class, and nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint import models
from tests.checkpoint.models import folder, layers, name
from tests.formats import samples
from tests.formats.samples import Truth, awq_config, ct_config, gptq_config, pack_awq, pack_ct, pack_gptq, truth

W4 = Callable[..., Any]
LAYER = name(0)


def good(w4: W4, source: Path, truths: Mapping[str, Truth], *, says: str = "", silent: bool = False) -> dict[str, Any]:
    """The whole way through; returns the report of the repack.

    Args:
        truths: what each packed module must be.
        says: part of a warning or conflict that people must see.
        silent: no warning and no conflict may be printed.
    """
    out, plain = source.parent / "out", source.parent / "plain"
    shown = w4("inspect", source, "--values")
    assert shown.code == 0, shown.err
    done = w4("repack", source, out, "--format", "json")
    assert done.code == 0, done.err
    told = [f"{n['level']}: {n['text']}" for n in done.json["notes"] if n["level"] != "info"]
    if says:
        assert any(says in line for line in told), told
        assert says in shown.out
    assert not (silent and told), told
    proved = w4("verify", source, out)
    assert proved.code == 0, proved.out
    assert w4("verify", source).code == 0
    assert w4("dequantize", out, plain, "--dtype", "float32").code == 0
    weights = load_file(plain / "model.safetensors")
    for module, t in truths.items():
        assert torch.equal(weights[f"{module}.weight"].double(), models.exact(t).T.float().double()), module
    return dict(done.json)


def refused(w4: W4, source: Path, code: int, *words: str) -> None:
    """Refused before anything is written, in one line that holds ``words``."""
    done = w4("repack", source, source.parent / "out")
    assert done.code == code, done
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err, done.err
    assert not list(source.parent.glob("out*"))


def one(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None, module: str = LAYER) -> Path:
    """A model of one packed layer."""
    return folder(path / "in", {**layers({module: tensors}), **models.plain()}, config)


def test_a1_the_same_weights_as_v1_and_as_v2(w4: W4, tmp_path: Path) -> None:
    t = truth(lowest=1)
    for version, offset in (("gptq", 1), ("gptq_v2", 0)):
        (tmp_path / version).mkdir()
        source = one(tmp_path / version, pack_gptq(t, offset=offset), gptq_config(t, version))
        good(w4, source, {LAYER: t}, silent=True)
    files = [tmp_path / v / "out" / "model.safetensors" for v in ("gptq", "gptq_v2")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(("offset", "says"), [(0, "8"), (1, "")])
def test_a2_a_label_that_lies(w4: W4, tmp_path: Path, offset: int, says: str) -> None:
    t = truth(sym=True)
    source = one(tmp_path, pack_gptq(t, offset=offset), gptq_config(t))
    good(w4, source, {LAYER: t}, says=says, silent=not says)


def test_a3_zero_points_lost_by_the_quantiser(w4: W4, tmp_path: Path) -> None:
    t = truth(N=8)
    t.z[:] = [5, 5, 0, 5, 5, 5, 5, 5]
    tensors = {**pack_gptq(t), "qzeros": samples.smeared(t.z)}
    source = one(tmp_path, tensors, gptq_config(t))
    lost = t.z.copy()
    lost[:, 3:] = 0
    good(w4, source, {LAYER: Truth(t.q, lost, t.s, t.g, t.size, t.sym)}, says="lost")


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize("key", ["packing_format", "backend"])
@pytest.mark.parametrize(
    ("packing", "offset"), [("auto_round", 0), ("auto_round:gptqmodel", 0), ("auto_round:auto_gptq", 1)]
)
def test_a7_auto_round_in_its_packings(
    w4: W4, tmp_path: Path, method: str, key: str, packing: str, offset: int
) -> None:
    t = truth(lowest=1)
    config = {"quant_method": method, key: packing, "bits": 4, "group_size": 32, "sym": False}
    source = one(tmp_path, pack_gptq(t, offset=offset, g_idx=False), config)
    good(w4, source, {LAYER: t})


def test_a9_empty_zero_points(w4: W4, tmp_path: Path) -> None:
    t = truth(sym=True)
    tensors = {**pack_gptq(t), "qzeros": torch.zeros(0, dtype=torch.int32)}
    good(w4, one(tmp_path, tensors, gptq_config(t)), {LAYER: t})


def test_a12_unsigned_zero_points_in_a_signed_field(w4: W4, tmp_path: Path) -> None:
    t = truth()
    tensors = {**pack_ct(t), "weight_zero_point": torch.from_numpy(t.z.T.astype(np.int8).copy())}
    good(w4, one(tmp_path, tensors, ct_config(t)), {LAYER: t}, says="signed")


def test_b2_b3_act_order_is_kept_and_a_config_that_denies_it_loses(w4: W4, tmp_path: Path) -> None:
    t = truth(K=256, order="act", lowest=1)
    for claimed in (True, False):
        (tmp_path / str(claimed)).mkdir()
        source = one(tmp_path / str(claimed), pack_gptq(t), gptq_config(t, desc_act=claimed))
        report = good(w4, source, {LAYER: t}, says="" if claimed else "the tensor wins")
        assert report["modules"][0]["layer"]["desc_act"] is True
        out = source.parent / "out"
        assert json.loads((out / "config.json").read_text())["quantization_config"]["desc_act"] is True
        assert torch.equal(load_file(out / "model.safetensors")[f"{LAYER}.g_idx"], torch.from_numpy(t.g))


def test_c2_a_short_last_group(w4: W4, tmp_path: Path) -> None:
    t = truth(K=192, size=128, lowest=1)
    assert (t.G, t.g[127], t.g[128]) == (2, 0, 1)
    good(w4, one(tmp_path, pack_gptq(t), gptq_config(t)), {LAYER: t}, silent=True)


@pytest.mark.parametrize("sym", [True, False])
def test_c4_zero_words_that_the_packer_dropped(w4: W4, tmp_path: Path, sym: bool) -> None:
    t = truth(N=48, sym=sym, lowest=1)
    whole = pack_gptq(t)
    assert whole["qzeros"].shape[1] == 6
    good(w4, one(tmp_path / "whole", whole, gptq_config(t)), {LAYER: t})
    cut = one(tmp_path / "cut", {**whole, "qzeros": whole["qzeros"][:, :4]}, gptq_config(t))
    if sym:
        good(w4, cut, {LAYER: t}, says="32 of 48 columns")
    else:
        refused(w4, cut, 4, "16", LAYER)


@pytest.mark.parametrize("act", [False, True])
def test_c7_one_group(w4: W4, tmp_path: Path, act: bool) -> None:
    t = truth(size=-1, lowest=1)
    config = gptq_config(t, group_size=-1, desc_act=act)
    report = good(w4, one(tmp_path, pack_gptq(t), config), {LAYER: t}, silent=True)
    assert report["modules"][0]["layer"]["groups"] == 1


def test_c9_a_wrong_group_size_loses(w4: W4, tmp_path: Path) -> None:
    t = truth(K=512, size=-1, lowest=1)
    source = one(tmp_path, pack_gptq(t), gptq_config(t, group_size=128))
    good(w4, source, {LAYER: t}, says="128")


def test_c13_rows_that_the_packer_dropped(w4: W4, tmp_path: Path) -> None:
    t = truth(K=80, size=16, lowest=1)
    tensors = pack_gptq(t)
    refused(w4, one(tmp_path, {**tensors, "qweight": tensors["qweight"][:8]}, gptq_config(t)), 4, "80", "rows", LAYER)


@pytest.mark.parametrize("said", [True, None])
def test_d3_a_packed_head(w4: W4, tmp_path: Path, said: bool | None) -> None:
    t = truth(lowest=1)
    config = gptq_config(t) if said is None else gptq_config(t, lm_head=said)
    tensors = {**layers({LAYER: pack_gptq(t), "lm_head": pack_gptq(t)}), "model.norm.weight": torch.ones(64)}
    source = folder(tmp_path / "in", tensors, config)
    good(w4, source, {LAYER: t, "lm_head": t})
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["lm_head"] is True


def test_e1_quantize_config_alone_or_missing(w4: W4, tmp_path: Path) -> None:
    t = truth(order="act")
    for where in ("config.json", "quantize_config.json", "quant_config.json"):
        (tmp_path / where).mkdir()
        source = one(tmp_path / where, pack_gptq(t, offset=0), gptq_config(t, "gptq_v2"))
        if where != "config.json":
            (source / "config.json").write_text(json.dumps(models.CONFIG))
            (source / where).write_text(json.dumps(gptq_config(t, "gptq_v2")))
        good(w4, source, {LAYER: t}, silent=True)


def test_e1_configs_that_contradict_each_other(w4: W4, tmp_path: Path) -> None:
    t = truth(lowest=1)
    source = one(tmp_path, pack_gptq(t, offset=0), gptq_config(t, "gptq_v2"))
    (source / "quantize_config.json").write_text(json.dumps(gptq_config(t, "gptq")))
    good(w4, source, {LAYER: t}, says="the latter is used")


def test_e2_no_config_at_all(w4: W4, tmp_path: Path) -> None:
    t = truth(sym=True)
    source = one(tmp_path, pack_gptq(t), None)
    (source / "config.json").unlink()
    report = good(w4, source, {LAYER: t})
    assert any("group_size 32 follows from" in n["text"] for n in report["notes"])


def test_e4_gemv_with_padding(w4: W4, tmp_path: Path) -> None:
    t = truth(K=1152, N=32, size=128)
    assert t.G == 9
    tensors = samples.pack_gemv(t)
    assert tensors["scales"].shape == (32, 16)
    good(w4, one(tmp_path, tensors, awq_config(t, "gemv")), {LAYER: t})


@pytest.mark.parametrize(
    ("codes", "scale", "size"), [("qweight", "scales", 128), ("B", "s", -1), ("B", "s", 128)], ids=str
)
def test_e5_serialised_for_marlin(w4: W4, tmp_path: Path, codes: str, scale: str, size: int) -> None:
    t = truth(K=256, N=256, size=size, sym=True)
    config = awq_config(t, "Marlin", zero_point=False) if codes == "qweight" else gptq_config(t, is_marlin_format=True)
    good(w4, one(tmp_path, samples.pack_marlin(t, codes, scale), config), {LAYER: t})


def test_e6_an_include_list_that_omits_a_packed_layer(w4: W4, tmp_path: Path) -> None:
    t = truth(lowest=1)
    attention = name(0, "self_attn.q_proj")
    tensors = {**layers({LAYER: pack_gptq(t), attention: pack_gptq(t)}), **models.plain()}
    config = gptq_config(t, modules_in_block_to_quantize=[["mlp.down_proj"]])
    source = folder(tmp_path / "in", tensors, config)
    good(w4, source, {LAYER: t, attention: t}, says="modules_in_block_to_quantize")


def test_e9_layers_that_were_never_filled(w4: W4, tmp_path: Path) -> None:
    t = truth(lowest=1)
    empty = {s: torch.zeros_like(x) for s, x in pack_gptq(t).items()}
    tensors = {**layers({LAYER: pack_gptq(t), name(1): empty}), **models.plain()}
    source = folder(tmp_path / "in", tensors, gptq_config(t, dynamic={r"-:.*\.1\..*": {}}))
    report = good(w4, source, {LAYER: t}, says="never filled")
    assert [m["name"] for m in report["modules"] if m["unfilled"]] == [name(1)]
    done = w4("repack", source, tmp_path / "again")
    assert f"never filled by its producer: {name(1)}" in done.out


@pytest.mark.parametrize("actorder", ["static", "weight", True, None, "group"])
def test_e12_every_spelling_of_actorder(w4: W4, tmp_path: Path, actorder: object) -> None:
    t = truth()
    good(w4, one(tmp_path, pack_ct(t), ct_config(t, actorder=actorder)), {LAYER: t})


def test_f1_a_vision_tower_is_copied_bit_for_bit(w4: W4, tmp_path: Path) -> None:
    t = truth(lowest=1)
    tower = torch.randn(48, 16).bfloat16()
    tensors = {**layers({LAYER: pack_gptq(t)}), "visual.blocks.0.attn.qkv.weight": tower}
    source = folder(tmp_path / "in", tensors, gptq_config(t))
    good(w4, source, {LAYER: t})
    after = load_file(tmp_path / "out" / "model.safetensors")["visual.blocks.0.attn.qkv.weight"]
    assert after.dtype == torch.bfloat16
    assert torch.equal(after, tower)


def test_f2_a_list_of_old_names(w4: W4, tmp_path: Path) -> None:
    t = truth()
    config = ct_config(t)
    config["ignore"] = ["model.old_name.0.proj", "lm_head"]
    good(w4, one(tmp_path, pack_ct(t), config), {LAYER: t}, says="model.old_name.0.proj")


def test_f6_fused_names_and_prefixes_are_carried_through(w4: W4, tmp_path: Path) -> None:
    t = truth(lowest=1)
    names = ["model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj",
             "model.language_model.layers.0.mlp.down_proj", "transformer.h.0.attn.c_attn"]  # fmt: skip
    source = folder(tmp_path / "in", layers({n: pack_gptq(t) for n in names}), gptq_config(t))
    report = good(w4, source, dict.fromkeys(names, t))
    assert {m["name"] for m in report["modules"]} == set(names)


def test_f6_stacked_experts(w4: W4, tmp_path: Path) -> None:
    truths = [truth(i, order="act", lowest=1) for i in range(3)]
    packed = [pack_gptq(t) for t in truths]
    stacked = {s: torch.stack([p[s] for p in packed]) for s in packed[0]}
    module = "model.layers.0.mlp.experts.down_proj"
    source = folder(tmp_path / "in", layers({module: stacked}), gptq_config(truths[0]))
    out = tmp_path / "out"
    done = w4("repack", source, out, "--format", "json")
    assert done.code == 0, done.err
    assert done.json["modules"][0]["experts"] == 3
    assert w4("verify", source, out).code == 0
    assert w4("dequantize", out, tmp_path / "plain").code == 0
    weight = load_file(tmp_path / "plain" / "model.safetensors")[f"{module}.weight"]
    for i, t in enumerate(truths):
        assert torch.equal(weight[i].double(), models.exact(t).T.half().double())
    assert w4("verify", source, tmp_path / "plain").code == 0


def test_f7_a_router_beside_packed_experts(w4: W4, tmp_path: Path) -> None:
    t = truth()
    moe = "model.layers.0.block_sparse_moe"
    packed = {f"{moe}.experts.{e}.{w}": pack_awq(t) for e in range(2) for w in ("w1", "w2", "w3")}
    router = torch.randn(2, 64).half()
    tensors = {**layers(packed), f"{moe}.gate.weight": router}
    source = folder(tmp_path / "in", tensors, awq_config(t, modules_to_not_convert=["gate"]))
    good(w4, source, dict.fromkeys(packed, t), silent=True)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[f"{moe}.gate.weight"], router)


def test_f8_an_expert_that_stayed_plain(w4: W4, tmp_path: Path) -> None:
    t = truth(lowest=1)
    expert = "model.layers.0.mlp.experts"
    plain = torch.randn(32, 64).half()
    tensors = {**layers({f"{expert}.0.down_proj": pack_gptq(t)}), f"{expert}.1.down_proj.weight": plain}
    source = folder(tmp_path / "in", tensors, gptq_config(t))
    good(w4, source, {f"{expert}.0.down_proj": t})
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[f"{expert}.1.down_proj.weight"], plain)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert any("1" in pattern for pattern in written["dynamic"])


def test_g3_zero_and_subnormal_scales(w4: W4, tmp_path: Path) -> None:
    t = truth(lowest=1)
    t.s[0, 0], t.s[1, 1] = 0.0, 2.0**-24
    good(w4, one(tmp_path, pack_gptq(t), gptq_config(t)), {LAYER: t})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers(w4: W4, tmp_path: Path, value: float) -> None:
    t = truth(lowest=1)
    t.s[1, 2] = value
    refused(w4, one(tmp_path, pack_gptq(t), gptq_config(t)), 4, f"{LAYER}.scales", "model.safetensors")


@pytest.mark.parametrize(
    ("what", "code"),
    [("missing scales", 4), ("missing zeros", 4), ("g_idx out of range", 4), ("bitsandbytes", 3), ("gguf method", 3)],
)
def test_things_that_are_refused_by_name(w4: W4, tmp_path: Path, what: str, code: int) -> None:
    t = truth(lowest=1)
    tensors, config = pack_gptq(t), gptq_config(t)
    if what == "missing scales":
        del tensors["scales"]
    elif what == "missing zeros":
        del tensors["qzeros"]
    elif what == "g_idx out of range":
        tensors["g_idx"] = tensors["g_idx"] + 2
    elif what == "bitsandbytes":
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        tensors = {"weight": torch.zeros(8, 1, dtype=torch.uint8), "weight.absmax": torch.zeros(2)}
    else:
        config, tensors = {"quant_method": "hqq"}, {"W_q": torch.zeros(2, 2, dtype=torch.uint8)}
    refused(w4, one(tmp_path, tensors, config), code, "w4plugin: ")


def test_h8_every_module_of_a_missing_shard_is_named(w4: W4, tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in", shards=2)
    (source / "model-00002-of-00002.safetensors").unlink()
    refused(w4, source, 4, "model-00002-of-00002.safetensors", name(0))


def test_a_bias_that_is_not_zero_is_never_lost(w4: W4, tmp_path: Path) -> None:
    t = truth(lowest=1)
    source = one(tmp_path, {**pack_gptq(t), "bias": torch.arange(32).half()}, gptq_config(t))
    good(w4, source, {LAYER: t})
    out = tmp_path / "out" / "model.safetensors"
    tensors = load_file(out)
    assert torch.equal(tensors[f"{LAYER}.bias"], torch.arange(32).half())
    del tensors[f"{LAYER}.bias"]
    save_file(tensors, out, {"format": "pt"})
    done = w4("verify", source, tmp_path / "out")
    assert done.code == 1
    assert f"{LAYER}.bias" in done.out
