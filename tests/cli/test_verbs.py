"""Verbs, flags, output modes and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file

import w4plugin
from tests.checkpoint import models
from tests.cli.conftest import SCHEMA
from w4plugin.checkpoint.staging import REPORT
from w4plugin.cli import main

W4 = Callable[..., Any]
MIXED = models.DATA / "checkpoints" / "qwen2__gm_gptq_sym_g128_lmhead"


def test_0_the_whole_way(w4: W4, tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in")
    shown = w4("inspect", source)
    assert shown.code == 0
    assert "model.layers.*.mlp.down_proj      3  gptq" in shown.out
    assert "sym=false" in shown.out
    done = w4("repack", source, tmp_path / "out")
    assert done.code == 0
    assert "in repacked as gptq_v2" in done.out
    assert "3 modules" in done.out
    proved = w4("verify", source, tmp_path / "out")
    assert proved.code == 0
    assert "verified" in proved.out
    assert "weights bit-equal" in proved.out
    assert w4("verify", tmp_path / "out").code == 0
    assert w4("dequantize", tmp_path / "out", tmp_path / "plain", "--dtype", "bfloat16").code == 0
    assert w4("verify", source, tmp_path / "plain").code == 0
    back = w4("quantize", tmp_path / "plain", tmp_path / "rtn", "--group-size", 32, "--sym", "--to", "awq")
    assert back.code == 0
    assert "quantised as awq" in back.out
    assert not any(r.err for r in (shown, done, proved, back))


def test_1_a_mismatch(w4: W4, tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in")
    w4("repack", source, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    for mode in ("human", "quiet", "json"):
        done = w4("verify", source, tmp_path / "out", "--format", mode)
        assert done.code == 1
        if mode == "human":
            assert "NOT the same" in done.out
            assert "model.norm.weight: its bytes differ from the source's" in done.out
        elif mode == "json":
            assert done.json["ok"] is False
        else:
            assert done.out == ""
    assert "NOT consistent" in w4("verify", tmp_path / "out").out


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"], ["inspect"], ["inspect", "a", "b"], ["repack", "x", "y", "--to"], ["inspect", "x", "--wrong"],
        ["repack", "x", "y", "--other-widths", "perhaps"], ["inspect", "/no/such/folder"], ["inspect", "not a hub id!"],
        ["repack", "SOURCE", "OUT", "--to", "gguf"], ["repack", "SOURCE", "OUT", "--include", "nothing"],
        ["repack", "SOURCE", "OUT", "--max-shard-size", "big"], ["quantize", "PLAIN", "OUT", "--group-size", "3"],
        ["repack", "SOURCE", "SOURCE"], ["inspect", "SOURCE", "--revision", "main"],
        ["repack", "SOURCE", "OUT", "--device", "abacus"], ["repack", "SOURCE", "OUT", "--workers", "0"],
    ],
)  # fmt: skip
def test_2_usage(w4: W4, tmp_path: Path, arguments: list[str]) -> None:
    places = {"SOURCE": models.gptq(tmp_path / "in"), "PLAIN": models.folder(tmp_path / "plain", models.plain(), None)}
    done = w4(*(places.get(a, tmp_path / "out" if a == "OUT" else a) for a in arguments))
    assert done.code == 2, done
    assert done.err
    assert not list(tmp_path.glob("out*"))


def test_3_unsupported(w4: W4, tmp_path: Path) -> None:
    done = w4("repack", MIXED, tmp_path / "out")
    assert done.code == 3
    assert done.err.count("\n") == 1
    assert "lm_head (8 bits)" in done.err
    assert "--other-widths keep" in done.err
    assert not list(tmp_path.iterdir())
    assert w4("repack", MIXED, tmp_path / "plain", "--other-widths", "dequantize").code == 0
    assert w4("verify", MIXED, tmp_path / "plain").code == 0
    assert w4("repack", MIXED, tmp_path / "kept", "--other-widths", "keep", "--to", "gptq").code == 0
    assert w4("verify", MIXED, tmp_path / "kept").code == 0
    plain = models.folder(tmp_path / "none", models.plain(), None)
    done = w4("repack", plain, tmp_path / "out")
    assert done.code == 3
    assert "w4plugin quantize" in done.err


def test_4_corrupt_and_unsafe(w4: W4, tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in")
    file = source / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    for verb in (["inspect", source], ["verify", source], ["repack", source, tmp_path / "out"]):
        done = w4(*verb)
        assert done.code == 4
        assert "w4plugin: corrupt: model.safetensors: got" in done.err
        assert done.err.count("\n") == 1
    file.write_bytes(whole)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    done = w4("inspect", source)
    assert done.code == 4
    assert "w4plugin: unsafe:" in done.err
    assert not list(tmp_path.glob("out*"))


def test_5_storage(w4: W4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.gptq(tmp_path / "in")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        done = w4("repack", source, tmp_path / "out")
    assert done.code == 5
    assert "No space left on device" in done.err
    assert w4("repack", source, tmp_path / "out").code == 0


def test_json_of_every_verb_is_what_the_schema_says(w4: W4, tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in", shards=2)
    json_ = ("--format", "json")
    assert w4("inspect", source, *json_).json["command"] == "inspect"
    assert w4("inspect", source, "--values", *json_).json["values"] is True
    assert w4("repack", source, tmp_path / "no", "--dry-run", *json_).json["dry_run"] is True
    assert w4("repack", source, tmp_path / "out", *json_).json["out"] == str(tmp_path / "out")
    assert w4("verify", source, tmp_path / "out", *json_).json["ok"] is True
    assert w4("verify", source, *json_).json["other"] is None
    assert w4("dequantize", source, tmp_path / "plain", *json_).json["files"]
    assert w4("quantize", tmp_path / "plain", tmp_path / "rtn", "--group-size", "32", *json_).json["modules"]
    assert w4("formats", *json_).json["formats"]
    assert w4("env", *json_).json["devices"][0]["device"] == "cpu"
    mixed = w4("repack", MIXED, tmp_path / "mixed", "--other-widths", "dequantize", *json_).json
    assert mixed["made_plain"] == ["lm_head"]
    for name in ("out", "plain", "rtn", "mixed"):
        jsonschema.validate(json.loads((tmp_path / name / REPORT).read_text()), SCHEMA)
    for real in models.REAL:
        w4("inspect", real, *json_).json  # noqa: B018


def test_errors_in_json(w4: W4, tmp_path: Path) -> None:
    done = w4("inspect", tmp_path / "nothing", "--format", "json")
    assert done.code == 2
    assert done.json["command"] == "inspect"
    assert done.json["error"]["kind"] == "usage"
    assert done.json["error"]["exit_code"] == 2
    assert "nothing there" in done.err


def test_the_schema_is_one_and_refuses_what_is_not_said() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"command": "inspect"}, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"command": "env", "packages": {}, "devices": [], "more": 1}, SCHEMA)


def test_quiet_and_verbose(w4: W4, tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in")
    assert w4("inspect", source, "-q").out == ""
    assert w4("inspect", source, "--format", "quiet").out == ""
    assert w4("inspect", source, "-q", "--format", "json").json
    few, many = w4("inspect", source).out, w4("inspect", source, "-v").out
    assert "model.layers.*.mlp.down_proj" in few
    assert "model.layers.2.mlp.down_proj" not in few
    assert "model.layers.2.mlp.down_proj" in many


def test_flags_that_shape_the_output(w4: W4, tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in", count=6, order="sequential")
    flags = ["--to", "awq", "--max-shard-size", "3KB", "--workers", "3", "--exclude", "*.0.*", "--exclude", "*.1.*"]
    done = w4("repack", source, tmp_path / "out", *flags, "--format", "json")
    assert done.code == 0, done.err
    assert len(done.json["modules"]) == 6
    assert done.json["made_plain"] == [models.name(0), models.name(1)]
    assert len(done.json["files"]) > 2
    assert w4("repack", source, tmp_path / "out").code == 2
    assert w4("repack", source, tmp_path / "out", "--force").code == 0
    assert "--dry-run" not in w4("repack", source, tmp_path / "new", "--dry-run").out
    assert not (tmp_path / "new").exists()


def test_names_cannot_move_a_terminals_cursor(w4: W4, tmp_path: Path) -> None:
    tensors = {**models.plain(), "evil\x1b[2J\x07.weight": torch.zeros(2, 2), "\u202egpj.weight": torch.zeros(2, 2)}
    source = models.folder(tmp_path / "in", tensors, None)
    done = w4("inspect", source, "-v")
    assert done.code == 0
    assert "\\x1b[2J\\x07" in done.out
    assert not any(c in done.out for c in "\x1b\x07\u202e")
    assert not any(c in w4("inspect", source, "--format", "json").out for c in "\x1b\x07\u202e")


def test_help_of_every_verb(w4: W4) -> None:
    for name in main.commands:
        done = w4(name, "--help")
        assert done.code == 0
        assert done.out.startswith("Usage: w4plugin")
    assert w4("--version").out == f"w4plugin {w4plugin.__version__}\n"
    assert w4("-h").out == w4("--help").out


def test_formats_and_env(w4: W4) -> None:
    assert "gptq_v2             read, write" in w4("formats").out
    assert "gptq: written without zero points of 0" in w4("formats", "-v").out
    shown = w4("env").out
    assert "cpu (cpu)" in shown
    linear, experts = shown.split("of experts")[:2]
    for table in (linear, experts):
        assert re.search(r"^  plain +yes$", table, re.MULTILINE)
        assert re.search(r"^  portable +no: no Triton kernels for cpu$", table, re.MULTILINE)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(w4: W4, shell: str) -> None:
    assert "_W4PLUGIN_COMPLETE" in w4("completion", shell).out


def test_completion_knows_formats() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "w4plugin"], capture_output=True, text=True, check=True,
        env={**os.environ, "_W4PLUGIN_COMPLETE": "bash_complete", "COMP_WORDS": "w4plugin repack a b --to g",
             "COMP_CWORD": "5"},
    )  # fmt: skip
    assert done.stdout.split() == ["plain,gptq", "plain,gptq_v2"]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from w4plugin.cli import main\n"
        "try: main(['repack', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'safetensors', 'huggingface_hub', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in", count=400)
    done = subprocess.run(
        f"{sys.executable} -m w4plugin inspect -v {source} | head -1", shell=True, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.startswith("in  LlamaForCausalLM")
    assert done.stderr == ""


INTERRUPT = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell without job control has it ignored in its background
real, calls = os.fsync, []
def fsync(file):
    real(file)
    calls.append(file)
    if len(calls) == 3:
        signal.raise_signal(signal.SIGINT)
os.fsync = fsync
from w4plugin.cli import main
main()
"""


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in", count=300, shards=2)
    arguments = ["repack", str(source), str(tmp_path / "out"), "--max-shard-size", "20KB"]
    command = [sys.executable, "-m", "w4plugin", *arguments]
    # Ctrl-C at the third fsync, from within: whoever watches from outside may come too late on a fast machine
    interrupted = [sys.executable, "-c", INTERRUPT, *arguments]
    running = subprocess.run(interrupted, capture_output=True, text=True, timeout=120)
    err = running.stderr
    assert running.returncode == 130, err
    assert "resumes" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["resumed"] is True
    again = [*command[:5], str(tmp_path / "again"), *command[6:]]
    subprocess.run(again, capture_output=True, check=True)
    assert models.contents(tmp_path / "out") == models.contents(tmp_path / "again")


def test_one_version_everywhere() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == w4plugin.__version__
    assert project["scripts"]["w4plugin"] == "w4plugin.cli:main"


def test_the_python_interface(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in")
    checkpoint = w4plugin.open(source)
    assert checkpoint.modules[0].name == models.name(0)
    weight = checkpoint.weight(models.name(0))
    assert (weight.N, weight.K) == (checkpoint.modules[0].N, checkpoint.modules[0].K)
    with pytest.raises(w4plugin.UsageError, match="lm_head"):
        checkpoint.weight("lm_head")
    assert w4plugin.inspect(source)["vllm"]["takes"] is False
    w4plugin.repack(source, tmp_path / "out")
    again = w4plugin.open(tmp_path / "out").weight(models.name(0))
    assert all(torch.equal(again.tensors()[field], tensor) for field, tensor in weight.tensors().items())
    assert w4plugin.verify(source, tmp_path / "out")["ok"]
    w4plugin.dequantize(source, w4plugin.Request(tmp_path / "plain", workers=1))
    w4plugin.quantize_checkpoint(tmp_path / "plain", tmp_path / "rtn", group_size=32)
    assert w4plugin.W4Tensor.__name__ == "W4Tensor"
    assert set(w4plugin.__all__) <= set(dir(w4plugin))
    with pytest.raises(AttributeError, match="nothing"):
        w4plugin.nothing  # noqa: B018
