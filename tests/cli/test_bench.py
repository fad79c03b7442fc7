"""`w4plugin bench` on the CPU of this machine: its numbers are real, if small."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Done
from w4plugin.bench import run, timing

W4 = Callable[..., Done]
SMALL = ("--device", "cpu", "--shapes", "64x32,96x64", "--m", "1,8", "--group-size", "32")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two rates of the roofline take a second each; here any will do."""
    monkeypatch.setattr(timing, "bandwidth", lambda device="cuda": 1e10)
    monkeypatch.setattr(timing, "matrix_rate", lambda dtype, device="cuda": 1e11)


def test_json_table_and_picture(w4: W4, tmp_path: Path) -> None:
    done = w4("bench", *SMALL, "--out", tmp_path / "out", "--format", "json")
    assert done.code == 0, done.err
    result = done.json["result"]
    assert result["arch"] == "cpu"
    assert result["ridge_ops_per_byte"] == 10
    assert result["critical_m"] == {"16 bit": 10, "4 bit": 2.5}
    points = {(r["kernel"], r["K"], r["N"], r["M"]) for r in result["rows"]}
    kernels = ("dense", "w4plugin-cpu", "w4plugin-plain")
    assert points == {(k, *kn, m) for k in kernels for kn in ((64, 32), (96, 64)) for m in (1, 8)}
    for row in result["rows"]:
        assert row["us"] > 0
        assert row["relative_error"] < 0.03, row  # bfloat16 keeps 8 bits of x, of the weight and of the sum
    json_file, picture = (Path(name) for name in done.json["files"])
    assert json.loads(json_file.read_text())["rows"] == result["rows"]
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {p.name for p in (tmp_path / "out").iterdir()} == {json_file.name, picture.name}
    text = w4("bench", *SMALL).out
    assert "K = 96, N = 64: microseconds a call" in text
    assert "ridge 10.0 operations a byte" in text


def test_zero_points_and_single_precision(w4: W4) -> None:
    done = w4("bench", *SMALL, "--asym", "--dtype", "fp32", "--format", "json")
    rows = done.json["result"]["rows"]
    assert all(r["relative_error"] < 1e-5 and not r["symmetric"] for r in rows)
    assert {r["kernel"] for r in rows} == {"dense", "w4plugin-plain"}
    assert "w4plugin-cpu, 64 x 32, M = 1: " in done.json["failed"][0]  # PyTorch's kernel refuses these zero points


def test_a_kernel_that_fails_is_named_and_the_others_go_on(w4: W4, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run.backend

    def broken(name: str) -> run.Factory:
        def make(weight: run.W4Tensor, dtype: torch.dtype) -> tuple[run.State, run.Run]:
            state, call = real(name)(weight, dtype)

            def fail(s: run.State, x: torch.Tensor) -> torch.Tensor:
                if len(x) == 8:
                    raise RuntimeError("no tile for 8 rows")
                return call(s, x)

            return state, fail

        return make

    monkeypatch.setattr(run, "backend", broken)
    done = w4("bench", *SMALL, "--format", "json")
    assert done.code == 0
    assert done.json["failed"][0] == "w4plugin-cpu, 64 x 32, M = 8: RuntimeError: no tile for 8 rows"
    assert sum(r["kernel"] == "dense" for r in done.json["result"]["rows"]) == 4
    assert "failed: w4plugin-cpu, 64 x 32, M = 8" in w4("bench", *SMALL).out


@pytest.mark.parametrize("arguments", [("--shapes", "64"), ("--shapes", "60x8"), ("--m", "0"), ("--m", "few")])
def test_what_cannot_be_measured_is_a_usage_error(w4: W4, arguments: tuple[str, str]) -> None:
    assert w4("bench", "--device", "cpu", *arguments).code == 2
    assert w4("bench", "--model", "smollm2-135m", "--shapes", "64x64", "--device", "cpu").code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu(w4: W4) -> None:
    done = w4("bench", "--device", "cuda")
    assert done.code == 3
    assert "no CUDA device" in done.err


def test_the_rates_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1e8 < timing.bandwidth("cpu") < 1e13
    assert 1e8 < timing.matrix_rate(torch.float32, "cpu") < 1e15
