"""README.md is true: sections are fresh, code runs, and every command, flag, file and anchor that it names exists."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.blocks import PAGES, ROOT, blocks, of_runner, runner
from w4plugin.cli import main
from w4plugin.formats.registry import BUILT_IN

README = (ROOT / "README.md").read_text()
BLOCKS = blocks(ROOT / "README.md")
SHELL = [line for kind, block in BLOCKS if kind in ("", "sh", "bash") for line in block.splitlines()]
CODE = [*SHELL, *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL))]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tools_readme", ROOT / "tools" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sections_are_fresh(tool: ModuleType) -> None:
    assert tuple(PAGES) == tool.PAGES
    names = []
    for page in PAGES:
        text = page.read_text()
        here = [m["name"] for m in tool.MARKED.finditer(text)]
        assert text.count("made by tools/readme -->") == len(here), page.name  # every section has an end
        names += here
    assert sorted(names) == sorted(tool.SECTIONS)  # each stands somewhere, once
    # in a process of its own: which kernels run where is asked of a Triton that compiles, not of the tests' interpreter
    check = [sys.executable, str(ROOT / "tools" / "readme.py"), "--check"]
    done = subprocess.run(check, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_stale_section_is_told_and_mended(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "README.md"
    monkeypatch.setattr(tool, "SECTIONS", {"formats": tool.formats})
    fresh = tool.made(README)
    path.write_text(fresh.replace("| `gptq_v2` |", "| `gptq_v3` |"))
    monkeypatch.setattr(tool, "PAGES", (path,))
    monkeypatch.setattr(sys, "argv", ["readme", "--check"])
    assert tool.main() == 1
    monkeypatch.setattr(sys, "argv", ["readme"])
    assert tool.main() == 0
    assert path.read_text() == fresh
    monkeypatch.setattr(sys, "argv", ["readme", "--check"])
    assert tool.main() == 0


def test_the_table_names_every_format_once_and_says_what_is_written(tool: ModuleType) -> None:
    lines = tool.formats().splitlines()
    for f in BUILT_IN:
        (line,) = [x for x in lines if x.startswith(f"| `{f.name}` |")]
        assert f.title in line
        assert line.rstrip(" |").rpartition("| ")[2].startswith("yes" if f.write else "no")


MEASURED: dict[str, Any] = {
    "machine": {"cores": 2, "cpu": "A CPU"},
    "bytes": 2_200_000_000,
    "rounds": 5,
    "after a pause": {
        "repack_seconds": {"median": 2.04, "best": 1.9, "worst": 2.2},
        "speed_as_share_of_copy": {"median": 0.71, "best": 0.8, "worst": 0.6},
    },
    "at once": {
        "repack_seconds": {"median": 2.04, "best": 1.9, "worst": 2.2},
        "speed_as_share_of_copy": {"median": 0.71, "best": 0.8, "worst": 0.6},
    },
    "to_compressed_tensors_seconds": {"median": 2.5, "best": 2.4, "worst": 2.6},
    "peer": {"compressed-tensors": "0.19.0", "seconds": 30.0},
    "peak_mib_above_interpreter_by_bytes": {"6600000000": 412, "2200000000": 401},
    "inspect": {"shards": 100, "seconds_after_import": 0.234},
}


def test_measurements_of_repack(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "BENCHMARKS", tmp_path)
    assert tool.repack() == ""
    (tmp_path / "repack.json").write_text(json.dumps(MEASURED))
    text = tool.repack()
    assert "2.2 GB of AWQ GEMM to GPTQ v2 on 2 cores (A CPU): 2.0 s, 0.71 times the speed" in text
    assert "401 MiB for 2.2 GB and 412 MiB for 6.6 GB" in text
    assert "compressed-tensors 0.19.0's own AWQ conversion takes 30.0 s" in text
    assert "0.23 s after imports" in text


def test_load_times_of_vllm(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "BENCHMARKS", tmp_path)
    assert tool.load() == ""
    seconds = (("ours", 2.04), ("vllm", 2.5), ("ours", 3.0), ("vllm", 2.0), ("ours", 1.0), ("vllm", 1.61))
    runs = [{"side": side, "load": {"seconds": s}, "versions": {"vllm": "0.26.0"}} for side, s in seconds]
    found = {"device": "NVIDIA Test", "date": "2026-01-01", "model": {"bytes": 5_700_000_000}, "runs": runs}
    found["ratios"] = {"load_time_ours_over_vllm": 1.02}
    (tmp_path / "vllm-load-NVIDIA-H200.json").write_text(json.dumps(found))
    text = tool.load().replace("\n", " ")
    assert "2.04 s with w4plugin and 2.00 s with vLLM's own kernels, 1.02 times as long: medians of 3" in text
    assert "from 1.0 to 3.0 s with w4plugin and from 1.6 to 2.5 s with vLLM's own" in text


SHAPES = ((4096, 4096), (4096, 28672), (8192, 57344), (28672, 8192), (576, 1536))
NINE = ("kernels-NVIDIA-H200-fp16-sym-nine", "kernels-NVIDIA-H200-bf16-asym-nine")


def record(dtype: str, symmetric: bool) -> dict[str, Any]:
    """Ours takes 10 us; of the others the best is Humming at few rows, cuBLAS at many, Machete in between."""
    rows = []
    for k, n in SHAPES:
        for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096):
            times = {"w4plugin-hopper": 10.0, "cublas": 30.0 if m < 1024 else 9.6, "humming": 12.5, "machete": 20.0}
            if 64 <= m <= 512:
                times |= {"humming": 10.5, "machete": 10.0}
            if (k, n, m) == (28672, 8192, 256):
                times["machete"] = 8.2
            if symmetric:
                times["marlin"] = 40.0
            else:
                times["quack"] = 1.0  # and wrong
            for name, us in times.items():
                if name == "machete" and k == 576:
                    continue
                rows.append(
                    {
                        "kernel": name, "K": k, "N": n, "M": m, "dtype": dtype, "symmetric": symmetric,
                        "group": 64 if k == 576 else 128, "us": us, "bytes": 1,
                        "relative_error": 0.5 if name == "quack" else 3e-4,
                    }
                )  # fmt: skip
    return {
        "date": "2026-01-01", "device": "NVIDIA Test", "torch": "2.11.0", "triton": "3.6.0",
        "bandwidth_bytes_per_s": 4.5e12, "matrix_ops_per_s": 6.5e14, "ridge_ops_per_byte": 144.4,
        "critical_m": {"16 bit": 144.4, "4 bit": 36.1}, "rows": rows,
        "crossings": [{"K": k, "N": n, "M": 700.4 if k == 4096 else None, "largest_M": 4096} for k, n in SHAPES],
        "stream_us": {"4096x4096": 4.0, "4096x28672": 8.26, "28672x8192": 9.0, "576x1536": 1.0},
    }  # fmt: skip


@pytest.fixture
def nine(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the records of one run."""
    for name, kind in zip(NINE, (("fp16", True), ("bf16", False)), strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(record(*kind)))
    monkeypatch.setattr(tool, "BENCHMARKS", tmp_path)
    return tmp_path


def cells(text: str, first: str) -> list[str]:
    """Of the one line of a table that begins so."""
    (line,) = [x for x in text.splitlines() if x.startswith(f"| {first} |")]
    return line.strip("| ").split(" | ")


def test_speed_from_the_records_of_one_run(tool: ModuleType, nine: Path) -> None:
    text = tool.speed()
    for name, told in zip(NINE, ("float16, symmetric", "bfloat16, asymmetric"), strict=True):
        of = f"{told}, groups of 128 (64 on 576 x 1536)"
        link = f"[{name}.json](benchmarks/{name}.json)"
        # 4 shapes at 1.00 (one point 0.82) and one, without Machete, at 1.05
        assert cells(text, of) == [
            of, "1.25", f"{(0.82 * 1.05**4) ** (1 / 20):.2f}", "0.96", "1 of 60", "0.82 (28672 x 8192, M = 256)", link
        ]  # fmt: skip
    assert cells(text, "4096 x 4096 | 10.0 / 12.5 humming")[1:] == [
        "10.0 / 12.5 humming", "10.0 / 12.5 humming", "10.0 / 10.0 machete", "10.0 / 10.0 machete",
        "10.0 / 9.6 cublas", "10.0 / 9.6 cublas",
    ]  # fmt: skip
    assert cells(text, "4096 x 28672 | 8.3") == ["4096 x 28672", "8.3", "10.0", "83 %"]
    assert "| 8192 x 57344 | 10.0 / 12.5" in text  # but nobody timed its reading
    assert text.count("| 8192 x 57344 |") == 1
    assert "4.50 TB/s and 650 Tflop/s" in text


def test_each_peer_from_the_records_of_one_run(tool: ModuleType, nine: Path) -> None:
    symmetric, asymmetric = re.split(r"(?=^Time of each)", tool.peers(), flags=re.MULTILINE)[1:]
    assert "NVIDIA Test, float16, symmetric, groups of 128 (64 on 576 x 1536), 2026-01-01, [one run]" in symmetric
    assert f"(../benchmarks/{NINE[0]}.json)" in symmetric
    assert f"(../benchmarks/{NINE[1]}.json)" in asymmetric
    assert cells(symmetric, "cuBLAS, 16-bit weights")[1:] == ["60", "3.00", "3.00", "0.96"]
    assert cells(symmetric, "Marlin")[1:] == ["60", "4.00", "4.00", "4.00"]
    assert cells(asymmetric, "Machete")[1:] == ["48", "2.00", "0.99", "2.00"]
    assert "QuACK" not in symmetric + asymmetric  # its results are wrong
    assert "Marlin" not in asymmetric


def test_the_roofline_from_the_record_in_float16(tool: ModuleType, nine: Path) -> None:
    assert f"benchmarks/{NINE[0]}.json" in tool.roofline()
    assert cells(tool.roofline(), "1024 | 370.0")[2:] == ["10.0", "370.0", "9.6"]
    text = tool.gains().replace("\n ", "")
    assert "measured gain is 3.0 of the 3.9" in text
    assert "at M = 700 (4096 x 28672); 700 (4096 x 4096)." in text
    assert "Up to M = 4096 it stays above 1 on 8192 x 57344, 28672 x 8192, 576 x 1536." in text


def test_half_of_a_run_is_not_shown(tool: ModuleType, nine: Path) -> None:
    (nine / f"{NINE[1]}.json").unlink()
    assert tool.speed() == tool.peers() == tool.roofline() == tool.gains() == ""


def environment() -> dict[str, str]:
    """That of a user: the project importable, its command on the path, no hub."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # one thread: two processes whose threads wait for each other on two cores take ten times as long
    return {**kept, "PYTHONPATH": str(ROOT), "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def bash(script: str, cwd: Path, said: str = "") -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd, env=environment(), input=said, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PYTHON = of_runner("python")


@pytest.mark.parametrize("block", PYTHON, ids=lambda b: b.strip().splitlines()[-1][:40])
def test_python_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_block_is_run_by_a_test() -> None:
    """Here, or in the environment of the host that it needs; ``text`` is no code."""
    for kind, block in BLOCKS:
        assert runner(kind, block) in ("", "python", "tools", "verbs", "transformers", "vllm")
    for page in PAGES:
        for kind, block in blocks(page):
            runner(kind, block)
    assert len(PYTHON) >= 6
    for name in ("tools", "verbs", "transformers", "vllm"):
        assert of_runner(name), name
    for host in ("transformers", "vllm"):
        text = (ROOT / "tests" / "runtime" / host / "test_readme.py").read_text()
        assert f'of_runner("{host}")' in text


@pytest.mark.slow
def test_the_first_commands() -> None:
    """As they stand, in this checkout: they make their environments if they are not there."""
    (block,) = of_runner("tools")
    out = bash(block, ROOT, said="the cat\n")
    assert "every integer code, zero point, scale and group of it is in the repacked checkpoint" in out
    assert out.rpartition("> ")[0].rpartition("> ")[2].strip()  # what it answered


@pytest.mark.slow
@pytest.mark.parametrize("block", of_runner("verbs"), ids=lambda b: b.split()[1])
def test_the_command_line(block: str, tmp_path: Path) -> None:
    """With MODEL in its place; OUT, PLAIN and the other capitals are folders."""
    (tmp_path / "MODEL").symlink_to(ROOT / "examples" / "llama-gptq-actorder")
    out = bash(block, tmp_path)
    made = {name for name in re.findall(r"\b[A-Z]{3,}\b|(?<=--out )\w+", re.sub(r"#.*", "", block)) if name != "MODEL"}
    assert made
    for name in made:
        assert any((tmp_path / name).iterdir()), name
    assert "microseconds a call" in out


def test_what_pip_installs_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {extra for page in PAGES for extra in re.findall(r"'\.\[(\w+)\]'", page.read_text())}
    assert {"vllm", "transformers", "sglang", "bench"} <= named
    assert named <= set(project["optional-dependencies"])


def test_scripts_exist_and_can_be_started() -> None:
    named = {m for text in CODE for m in re.findall(r"(?<![\w/.])(?:\./)?(tools/[\w-]+|examples/[\w./-]+)", text)}
    assert {"tools/demo", "tools/test"} <= named
    for name in sorted(named):
        path = ROOT / name
        assert path.exists(), name
        assert name.startswith("examples/") or os.access(path, os.X_OK), f"{name} is not executable"


def test_verbs_exist() -> None:
    texts = [text for text in CODE if not text.startswith("pip ")]
    shown = {m for text in texts for m in re.findall(r"(?<![\w/-])w4plugin ([a-z]+)", text)}
    assert shown == set(main.commands)


def test_flags_exist() -> None:
    known = {flag for command in main.commands.values() for p in command.params for flag in p.opts}
    foreign = {"--quantization", "--help", "--check", "--no-cache"}  # vLLM's, and those of scripts
    named = {flag for text in CODE for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", text)}
    assert named - foreign <= known, named - foreign - known


def test_targets_of_to_exist() -> None:
    (line,) = [x for x in SHELL if x.startswith("w4plugin repack")]
    writable = {f.name for f in BUILT_IN if f.write is not None}
    named = set(re.findall(r"[a-z_0-9-]+", line.partition("--to ")[2].partition(" where")[0]))
    assert named <= writable
    assert named | {"gptq_v2"} == writable


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    def anchors(text: str) -> set[str]:
        return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}

    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        other = page if not name else page.parent / name
        assert other.exists(), target
        assert not anchor or anchor in anchors(other.read_text()), target
