"""Repack: real checkpoints in and out, and everything of a folder that is not a weight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint import models
from tests.formats import samples
from tests.formats.samples import truth
from w4plugin.checkpoint.output import Request
from w4plugin.checkpoint.quantize import quantize
from w4plugin.checkpoint.repack import repack
from w4plugin.checkpoint.staging import REPORT, Staging
from w4plugin.checkpoint.verify import verify
from w4plugin.errors import CorruptError, UnsupportedError, UsageError, W4Error
from w4plugin.formats import registry

PURE = [p for p in models.REAL if p.name not in models.MIXED]


@pytest.mark.parametrize("source", PURE, ids=lambda p: p.name)
def test_real_checkpoints_repack_and_verify(source: Path, tmp_path: Path) -> None:
    report = repack(source, tmp_path / "out")
    result = verify(source, tmp_path / "out")
    assert result["ok"], result["mismatches"]
    assert result["modules"] == len(report["modules"]) > 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "gptq"
    assert config["checkpoint_format"] == config["format"] == "gptq_v2"
    assert not (tmp_path / "out" / "quantize_config.json").exists()


@pytest.mark.parametrize("to", ["gptq", "awq", "compressed-tensors", "auto-round"])
def test_every_target_holds_the_same_weights(tmp_path: Path, to: str) -> None:
    source = models.gptq(tmp_path / "in", order="sequential")
    report = repack(source, tmp_path / "out", to=to)
    assert {m["from"] for m in report["modules"]} == {"gptq"}
    result = verify(source, tmp_path / "out")
    assert result["ok"], result["mismatches"]
    assert result["modules"] == 3


def test_plain_tensors_are_bit_for_bit(tmp_path: Path) -> None:
    odd = {
        "a.bool": torch.tensor([True, False]), "b.u8": torch.arange(5, dtype=torch.uint8), "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1.5), "nan": torch.tensor([float("nan"), -0.0]),
        "f8": torch.zeros(3).to(torch.float8_e5m2),
    }  # fmt: skip
    t = truth(lowest=1)
    tensors = {**models.layers({models.name(0): samples.pack_gptq(t)}), **models.plain(), **odd}
    source = models.folder(tmp_path / "in", tensors, samples.gptq_config(t))
    repack(source, tmp_path / "out")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in [*odd, *models.plain()]:
        assert before[name].dtype == after[name].dtype
        assert before[name].shape == after[name].shape
        raw = [x[name].contiguous().reshape(-1).view(torch.uint8) for x in (before, after)]
        assert torch.equal(*raw), name


def test_side_files_and_config(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in")
    for name in ("quantize_config.json", "quant_config.json"):
        (source / name).write_text(json.dumps({"bits": 4, "group_size": 32, "quant_method": "gptq"}))
    (source / "README.md").write_text("---\nlicense: mit\ntags: [llama]\nmodel-index: []\n---\n# Theirs\n")
    (source / "modeling_x.py").write_text("raise SystemExit")
    (source / "onnx").mkdir()
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("t")
    (source / ".hidden").write_text("no")
    (source / "old.bin").write_bytes(b"not opened")
    report = repack(source, tmp_path / "out")
    out = models.contents(tmp_path / "out")
    for name, content in models.SIDE_FILES.items():
        assert out[name].decode() == content
    assert set(out) == {
        *models.SIDE_FILES, "config.json", "model.safetensors", "README.md", "README.source.md", REPORT,
        "modeling_x.py", "additional_chat_templates/tool.jinja",
    }  # fmt: skip
    assert report["side_files"]["replaced"] == ["quant_config.json", "quantize_config.json"]
    assert report["side_files"]["left"] == ["old.bin", "onnx/"]
    config = json.loads(out["config.json"])
    assert {k: config[k] for k in models.CONFIG} == models.CONFIG
    card = out["README.md"].decode()
    assert card.startswith("---\n")
    assert "license: mit" in card
    assert "- llama" in card
    assert "- w4plugin" in card
    assert "model-index" not in card
    assert out["README.source.md"].decode().endswith("# Theirs\n")


def test_nested_and_old_spellings_of_the_config_go(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    quantization = config.pop("quantization_config")
    config["text_config"] = {"hidden_size": 64, "quantization_config": quantization}
    (source / "config.json").write_text(json.dumps(config))
    repack(source, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["text_config"] == {"hidden_size": 64}
    assert written["quantization_config"]["checkpoint_format"] == "gptq_v2"


def test_e2_without_any_config(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in", order="sequential")
    (source / "config.json").unlink()
    repack(source, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert written["checkpoint_format"] == "gptq_v2"
    assert verify(source, tmp_path / "out")["ok"]


def test_d1_zero_bias_is_dropped_and_listed(tmp_path: Path) -> None:
    t = truth(lowest=1)
    zero, real = models.name(0), models.name(1)
    tensors = {**models.layers({n: samples.pack_gptq(t) for n in (zero, real)}), **models.plain()}
    tensors[f"{zero}.bias"], tensors[f"{real}.bias"] = torch.zeros(32).half(), torch.ones(32).half()
    source = models.folder(tmp_path / "in", tensors, samples.gptq_config(t))
    report = repack(source, tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert f"{zero}.bias" not in after
    assert torch.equal(after[f"{real}.bias"], tensors[f"{real}.bias"])
    assert report["dropped"] == [{"tensor": f"{zero}.bias", "reason": "a bias of zeros"}]
    assert verify(source, tmp_path / "out")["ok"]


def test_d4_a_plain_head_stays_plain(tmp_path: Path) -> None:
    source = models.awq(tmp_path / "in")
    repack(source, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["lm_head"] is False
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.float16


@pytest.mark.parametrize("size", ["1KB", 3000, "5GB"])
def test_shards_and_their_index(tmp_path: Path, size: int | str) -> None:
    source = models.gptq(tmp_path / "in", count=12, shards=3)
    report = repack(source, Request(tmp_path / "out", max_shard_size=size))
    assert verify(source, tmp_path / "out")["ok"]
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    if size == "5GB":
        assert files == ["model.safetensors"]
        assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
        return
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held = {name: file for file in files for name in load_file(tmp_path / "out" / file)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for file in files for t in load_file(tmp_path / "out" / file).values()
    )
    for layer in range(12):  # the tensors of a module lie together
        assert len({held[f"{models.name(layer)}.{s}"] for s in ("qweight", "qzeros", "scales", "g_idx")}) == 1
    assert [f["name"] for f in report["files"]] == files


def test_max_shard_size_that_is_no_size(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in")
    with pytest.raises(UsageError, match="--max-shard-size"):
        repack(source, Request(tmp_path / "out", max_shard_size="large"))
    assert not list(tmp_path.glob("out*"))


def test_same_bytes_for_any_hash_seed_worker_count_and_run(tmp_path: Path) -> None:
    source = models.awq(tmp_path / "in", count=9, shards=2)
    script = (
        "import sys; from pathlib import Path; from w4plugin.checkpoint.output import Request;"
        "from w4plugin.checkpoint.repack import repack;"
        "repack(sys.argv[1], Request(Path(sys.argv[2]), workers=int(sys.argv[3]), max_shard_size='4KB'))"
    )
    seen = []
    for seed, workers in (("0", "1"), ("1", "4"), ("12345", "2")):
        out = tmp_path / f"run{seed}" / "out"
        out.parent.mkdir()
        subprocess.run(
            [sys.executable, "-c", script, source, out, workers], check=True, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        seen.append(models.contents(out))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 10


def test_a_wrong_prediction_costs_a_pass_and_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # desc_act and sym are wrong in the config, so compressed-tensors' tensors are predicted wrong
    t = truth(order="act")
    tensors = {**models.layers({models.name(i): samples.pack_gptq(t, offset=0) for i in range(4)}), **models.plain()}
    right = models.folder(tmp_path / "right", tensors, samples.gptq_config(t, "gptq_v2"))
    config = samples.gptq_config(t, "gptq_v2", desc_act=False)
    del config["sym"]
    wrong = models.folder(tmp_path / "wrong", tensors, config)
    learnt = []
    restart = Staging.restart
    monkeypatch.setattr(Staging, "restart", lambda self, what: (learnt.append(sorted(what)), restart(self, what))[1])
    repack(right, tmp_path / "a", to="compressed-tensors")
    assert learnt == [[]]
    repack(wrong, tmp_path / "b", to="compressed-tensors")
    assert learnt == [[], [], [models.name(i) for i in range(4)]]
    assert verify(wrong, tmp_path / "b")["ok"]
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert f"{models.name(0)}.weight_g_idx" in load_file(tmp_path / "b" / name)


def test_a_format_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here knows its shapes: they are learnt in a first pass."""
    mine = replace(registry.get("gptq_v2"), name="mine")
    known = {**registry.formats(), "mine": mine}
    monkeypatch.setattr(registry, "formats", lambda: known)
    source = models.awq(tmp_path / "in", count=4)
    repack(source, Request(tmp_path / "mine", max_shard_size="4KB"), to="mine")
    repack(source, Request(tmp_path / "usual", max_shard_size="4KB"), to="gptq_v2")
    found, want = models.contents(tmp_path / "mine"), models.contents(tmp_path / "usual")
    differing = {name for name in want if found.get(name) != want[name]}
    assert found.keys() == want.keys()
    assert differing == {"README.md", REPORT}  # which name the format


@pytest.mark.parametrize("source", [p for p in models.REAL if p.name in models.MIXED], ids=lambda p: p.name)
def test_layers_of_another_width(source: Path, tmp_path: Path) -> None:
    wide = {"llama__gm_gptq_sym_g128_dynamic": "model.layers.1.mlp.down_proj"}.get(source.name, "lm_head")
    with pytest.raises(UnsupportedError, match=rf"{wide} \(8 bits\).*--other-widths"):
        repack(source, tmp_path / "out")
    with pytest.raises(UnsupportedError, match=r"--to gptq keeps it"):
        repack(source, tmp_path / "out", other_widths="keep")
    assert not list(tmp_path.iterdir())

    report = repack(source, tmp_path / "kept", to="gptq", other_widths="keep")
    assert report["kept"] == [wide]
    result = verify(source, tmp_path / "kept")
    assert result["ok"], result["mismatches"]
    written = json.loads((tmp_path / "kept" / "config.json").read_text())["quantization_config"]
    rule = next(iter(written["dynamic"].items()))
    assert rule[0] == "+:" + wide.replace(".", r"\.") + "$"
    assert rule[1]["bits"] == 8

    report = repack(source, tmp_path / "plain", other_widths="dequantize")
    assert report["made_plain"] == [wide]
    assert f"{wide}.weight" in load_file(tmp_path / "plain" / "model.safetensors")
    result = verify(source, tmp_path / "plain")
    assert result["ok"], result["mismatches"]


def test_patterns_choose_what_stays_packed(tmp_path: Path) -> None:
    source = models.awq(tmp_path / "in")
    report = repack(source, tmp_path / "out", exclude=["*.1.*"])
    assert report["made_plain"] == [models.name(1)]
    after = load_file(tmp_path / "out" / "model.safetensors")
    t = truth(1)
    assert torch.equal(after[f"{models.name(1)}.weight"].double(), models.exact(t).half().double().T)
    assert verify(source, tmp_path / "out")["ok"]
    with pytest.raises(UsageError, match="matches no module"):
        repack(source, tmp_path / "no", include=["*.up_proj"])
    with pytest.raises(UsageError, match="no module packed"):
        repack(source, tmp_path / "no", exclude=["*"])


def test_a6_awq_with_zero_points_of_zero(tmp_path: Path) -> None:
    source = models.awq(tmp_path / "in")
    assert int(samples.truth(0).z.min()) == 0
    with pytest.raises(UnsupportedError, match=r"model\.layers\.\d\.mlp\.down_proj.*zero points of 0.*gptq_v2"):
        repack(source, tmp_path / "v1", to="gptq")
    repack(source, tmp_path / "v2")
    repack(tmp_path / "v2", tmp_path / "back", to="awq")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_a_packed_and_a_plain_form_of_one_layer(tmp_path: Path) -> None:
    t = truth()
    tensors = {**models.layers({models.name(0): samples.pack_awq(t), models.name(1): samples.pack_awq(t)})}
    tensors[f"{models.name(2)}.weight"] = torch.zeros(32, 64)
    source = models.folder(tmp_path / "in", tensors, samples.awq_config(t))
    assert [p["name"] for p in repack(source, tmp_path / "out")["modules"]] == [models.name(0), models.name(1)]
    both = {**tensors, f"{models.name(0)}.weight": torch.zeros(32, 64).half()}
    doubled = models.folder(tmp_path / "doubled", both, samples.awq_config(t))
    with pytest.raises((CorruptError, UnsupportedError), match=models.name(0)):
        repack(doubled, tmp_path / "no", exclude=["*.0.*"])


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = models.awq(tmp_path / "in")
    report = repack(source, Request(tmp_path / "out", dry_run=True))
    assert report["dry_run"] is True
    assert report["bytes_written"] > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_errors_of_the_input_leave_nothing(tmp_path: Path) -> None:
    t = truth(lowest=1)
    tensors = {**models.layers({models.name(i): samples.pack_gptq(t) for i in range(5)}), **models.plain()}
    tensors[f"{models.name(3)}.scales"][1, 2] = float("nan")
    source = models.folder(tmp_path / "in", tensors, samples.gptq_config(t))
    with pytest.raises(CorruptError, match=r"model\.safetensors: model\.layers\.3\.mlp\.down_proj\.scales"):
        repack(source, Request(tmp_path / "out", max_shard_size="4KB"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_the_first_error_is_told_whatever_thread_met_one(tmp_path: Path) -> None:
    t = truth(lowest=1)
    tensors = models.layers({models.name(i): samples.pack_gptq(t) for i in range(12)})
    for i in (4, 7, 9):
        tensors[f"{models.name(i)}.g_idx"] = tensors[f"{models.name(i)}.g_idx"] + 100
    source = models.folder(tmp_path / "in", tensors, samples.gptq_config(t))
    for workers in (1, 4, 4, 4):
        with pytest.raises(CorruptError, match=r"layers\.4\."):
            repack(source, Request(tmp_path / "out", workers=workers))


def test_a_source_that_changes_while_it_is_read(tmp_path: Path) -> None:
    from w4plugin.checkpoint.checkpoint import Checkpoint
    from w4plugin.errors import StorageError

    source = models.awq(tmp_path / "in")
    opened = Checkpoint.open(source)
    save_file(load_file(source / "model.safetensors"), source / "model.safetensors")
    with pytest.raises(StorageError, match="changed while it was read"):
        repack(opened, tmp_path / "out")


@pytest.mark.parametrize(("to", "words"), [("gguf", "got 'gguf'"), ("awq-gemv", "can only be read")])
def test_a_target_that_nobody_writes_is_refused_first(to: str, words: str, tmp_path: Path) -> None:
    """Before the model is opened, whatever else is wrong."""
    for command in (repack, quantize):
        with pytest.raises(W4Error, match=words) as error:
            command(tmp_path / "nothing", tmp_path / "out", to=to)
        assert "gptq_v2 | " in error.value.wanted
