"""The examples run as they stand; a hub is a cache on the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import w4plugin
from tests.checkpoint import models
from tests.checkpoint.test_hub import COMMIT, cached

EXAMPLES = Path(__file__).parents[2] / "examples"
REAL = EXAMPLES / "llama-gptq-actorder"


def run(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
        env={**os.environ, **environment},
        check=False,
    )


def test_repack_and_verify(tmp_path: Path) -> None:
    done = run("repack_and_verify.py", REAL, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "verified: True (14 modules, 7 other tensors)" in done.stdout
    assert "7 weights are bit for bit what AutoGPTQ computes" in done.stdout
    assert (tmp_path / "out" / "packed" / "README.source.md").read_text().startswith("---\nlicense: apache-2.0")


def test_repack_from_hub(tmp_path: Path) -> None:
    cached(tmp_path / "hub", models.awq(tmp_path / "in"), COMMIT, "main")
    settings = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = run("repack_from_hub.py", "org/name", tmp_path / "out", **settings)
    assert done.returncode == 0, done.stderr
    assert "org/name" in done.stdout.splitlines()[0]
    assert "verified: True (3 modules" in done.stdout
    assert "base_model: org/name" in (tmp_path / "out" / "README.md").read_text()
    assert w4plugin.verify(tmp_path / "in", tmp_path / "out")["ok"]
    assert run("repack_from_hub.py").returncode == 1


def test_repack_from_hub_asks_about_the_target_first(tmp_path: Path) -> None:
    settings = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = run("repack_from_hub.py", REAL, tmp_path / "out", "me/out", **settings)
    assert "hub repository me/out" in done.stderr
    assert not (tmp_path / "out").exists()


def test_awq_to_gptq(tmp_path: Path) -> None:
    done = run("awq_to_gptq.py", models.awq(tmp_path / "in"), tmp_path / "out")
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert first.startswith("awq: ")
    assert second.startswith("gptq_v2: ")
    assert first.split()[-1] != second.split()[-1]
    assert last == "the same codes, zero points and scales in 3 modules"


def test_mixture_of_experts() -> None:
    data = EXAMPLES.parent / "tests" / "data" / "models"
    for model, inner in (("mixtral__aa_awq_gemm_g64", 256), ("qwen2moe__gm_gptq_sym_g64", 128)):
        done = run("mixture_of_experts.py", data / model)
        assert done.returncode == 0, done.stderr
        assert f"4 experts, H = 256, I = {inner}" in done.stdout
        assert "relative error" in done.stdout.splitlines()[-1]
    assert "no packed experts" in run("mixture_of_experts.py", REAL).stderr


def workflow(source: Path, ours: Path, cwd: Path) -> list[int]:
    """Exit codes of the steps of examples/verify_in_ci.yml after the installation, up to the first that fails."""
    content: dict[str, Any] = yaml.safe_load((EXAMPLES / "verify_in_ci.yml").read_text())
    steps = [step["run"] for step in content["jobs"]["verify"]["steps"] if "run" in step]
    assert all(line.startswith("pip install ") for line in steps[0].strip().splitlines())
    cwd.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    codes = []
    for step in steps[1:]:
        environment = {**os.environ, "PATH": path, "SOURCE": str(source), "OURS": str(ours), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(["bash", "-e", "-c", step], cwd=cwd, env=environment, capture_output=True, check=False)
        codes.append(done.returncode)
        if done.returncode:
            break
    return codes


def test_verify_in_ci(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in")
    w4plugin.repack(source, tmp_path / "out")
    assert workflow(source, tmp_path / "out", tmp_path / "good") == [0, 0]
    assert '"ok": true' in (tmp_path / "good" / "proof.json").read_text()
    weights = tmp_path / "out" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert workflow(source, tmp_path / "out", tmp_path / "inconsistent") == [1]  # its report holds every tensor's hash
    (tmp_path / "out" / "w4plugin_report.json").unlink()
    assert workflow(source, tmp_path / "out", tmp_path / "bad") == [0, 1]
    assert '"ok": false' in (tmp_path / "bad" / "proof.json").read_text()


def test_every_example_is_described_and_run() -> None:
    """By this file or by the tests of the host that it needs."""
    tests = Path(__file__).parents[1]
    texts = "".join(p.read_text() for p in tests.rglob("test_*.py"))
    told = (EXAMPLES / "README.md").read_text()
    for path in sorted(EXAMPLES.iterdir()):
        if path.name not in ("README.md", "__pycache__"):
            assert path.name in told, f"{path.name} is not in examples/README.md"
            assert path.name in texts, f"no test runs {path.name}"
