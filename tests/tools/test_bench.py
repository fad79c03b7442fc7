"""The bench's arithmetic and its report, without a GPU."""

from __future__ import annotations

import argparse
import functools
import importlib.machinery
import importlib.util
import json
import operator
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from w4plugin.bench import report as bench_report
from w4plugin.bench import roofline, timing

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def a100() -> Any:
    return roofline.Device(bandwidth=2.0e12, rate=312e12)


def test_critical_m_of_an_a100() -> None:
    """The figures everybody quotes: 156 rows for 16-bit weights, 39 for 4-bit ones."""
    assert roofline.critical_m(a100(), 2.0) == pytest.approx(156)
    assert roofline.critical_m(a100(), 0.5) == pytest.approx(39)


def test_predicted_speedup() -> None:
    k = n = 4096
    few = roofline.speedup(a100(), 1, k, n)
    assert few == pytest.approx((2 * k * n + 4 * k) / (k * n / 2 + k * n / 128 * 2 + 4 * k))
    assert 3.8 < few < 4.0
    assert roofline.speedup(a100(), 4096, k, n) == 1.0  # both bound by the matrix units
    assert roofline.speedup(a100(), 1, k, n, asym=True) < few
    assert roofline.intensity(1, k, n, False, 128, False) == pytest.approx(1.0, rel=1e-3)
    assert roofline.intensity(1, k, n, True, 128, False) == pytest.approx(3.87, rel=1e-2)


def test_crossing() -> None:
    assert roofline.crossing([(1, 3.0), (64, 2.0), (256, 0.5)]) == pytest.approx(64 * 4 ** (1.0 / 1.5))
    assert roofline.crossing([(1, 3.0), (64, 1.5)]) is None
    assert roofline.crossing([(1, 0.9), (64, 0.8)]) is None


FACTS = {
    "device": "NVIDIA Test",
    "arch": "sm_90",
    "sms": 132,
    "driver": "580.0",
    "cuda": "13.0",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "bandwidth_bytes_per_s": 4.0e12,
    "matrix_ops_per_s": 7.2e14,
}


def rows() -> list[dict[str, Any]]:
    times = {"cublas": (13.0, 14.0, 50.0), "w4plugin-hopper": (6.0, 10.0, 55.0), "w4plugin-portable": (7.0, 9.0, 60.0)}
    times |= {"w4plugin-dense": (1.0, 1.0, 1.0), "marlin": (9.3, 21.0, 98.0)}
    return [
        {"peer": name, "K": 4096, "N": 4096, "G": 128, "M": m, "us": us, "rel_err": 1e-3}
        for name, each in times.items()
        for m, us in zip((1, 64, 1024), each, strict=True)
    ]


def test_result_says_all(tmp_path: Path) -> None:
    result = bench_report.result(FACTS, rows(), "fp16", False, "tools/bench --m 1,64,1024")
    path = bench_report.write(result, tmp_path / "out" / "result.json")
    read = json.loads(path.read_text())
    assert list(path.parent.iterdir()) == [path]
    for key in (*FACTS, "date", "command", "ridge_ops_per_byte", "critical_m", "crossings"):
        assert read[key] is not None, key
    assert read["critical_m"] == {"16 bit": 180.0, "4 bit": 45.0}
    row = read["rows"][3]
    assert row == {
        "kernel": "w4plugin-hopper", "K": 4096, "N": 4096, "M": 1, "dtype": "fp16", "symmetric": True, "group": 128,
        "us": 6.0, "bytes": 4096 * 4096 // 2 + 32 * 4096 * 2 + 2 * 8192, "relative_error": 1e-3,
    }  # fmt: skip
    assert read["rows"][0]["bytes"] == 2 * 4096 * 4096 + 2 * 8192
    (crossing,) = read["crossings"]
    assert 64 < crossing["M"] < 1024


def test_the_best_of_ours_counts() -> None:
    result = bench_report.result(FACTS, rows(), "fp16", False, "")
    assert bench_report.speedups(result["rows"], 4096, 4096) == [(1, 13 / 6), (64, 14 / 9), (1024, 50 / 55)]
    assert bench_report.speedups(result["rows"], 4096, 4096, "marlin")[0] == (1, 13 / 9.3)


def test_table_marks_the_fastest() -> None:
    result = bench_report.result(FACTS, [r for r in rows() if r["peer"] != "w4plugin-dense"], "fp16", False, "")
    out = "\n".join(bench_report.lines(result))
    assert "6.0*" in out
    assert "9.0*" in out
    assert "13.0*" not in out
    assert "overtakes at M = " in out


def test_share_of_reading_alone() -> None:
    reading = {"4096x4096": 4.2004, "64x32": 1.5}
    result = bench_report.result(FACTS, rows(), "fp16", False, "", reading)
    assert list(result)[-1] == "rows"
    assert result["stream_us"] == {"4096x4096": 4.2, "64x32": 1.5}
    assert list(bench_report.lines(result))[-2:] == [
        "4096 x 4096: to read the packed words alone takes 4.2 us, 70 % of ours at M = 1",
        "64 x 32: to read the packed words alone takes 1.5 us",
    ]
    assert "stream_us" not in bench_report.result(FACTS, rows(), "fp16", False, "", {})


def test_reading_alone() -> None:
    found = timing.reading([(64, 32), (576, 1536)], cold_mb=1, budget_ms=1, device="cpu")
    assert list(found) == ["64x32", "576x1536"]
    assert all(0 < us < 1e6 for us in found.values())
    assert timing.cold_copies(2**20, 150) == 150
    assert timing.cold_copies(2**28, 150) == 2
    assert timing.cold_copies(1, 150) == 400


def test_launches_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs of a launch hold all words, and those of WAVES fit the device."""
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: sms)
    found = timing.launches(8192 // 8 * 57344)
    assert found[-2:] == [(4096, 55, 8), (4096, 28, 8)]
    few = timing.launches(576 // 8 * 1536)
    assert len(few) == len(set(few)) == len(timing.LAUNCHES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton was imported for the GPU")
@pytest.mark.parametrize("launch", [(1024, 4, 4), (512, 1, 4)])
def test_what_is_read(launch: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every word once, whether programs divide them or not."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.spec_from_file_location("interpreted", TOOLS.parent / "w4plugin/bench/stream_kernel.py")
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    monkeypatch.setitem(sys.modules, "w4plugin.bench.stream_kernel", kernel)
    for count in (8192, 576 // 8 * 24):
        words = torch.randint(-(2**31), 2**31 - 1, (2, count), dtype=torch.int32)
        for i in range(2):
            out = timing.reader(words, *launch)(i)
            assert len(out) == -(-count // (launch[0] * launch[1]))
            assert functools.reduce(operator.xor, out.tolist()) == functools.reduce(operator.xor, words[i].tolist())


def test_picture(tmp_path: Path) -> None:
    assert bench_report.can_draw()
    path = bench_report.picture([bench_report.result(FACTS, rows(), "fp16", False, "")], tmp_path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_shapes_and_help(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    monkeypatch.setenv("COLUMNS", "500")

    out = subprocess.run(
        [sys.executable, str(TOOLS / "bench"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    for model in ("llama-3-8b", "llama-3-70b", "qwen2.5-7b", "qwen2.5-32b", "smollm2-135m"):
        assert model in out


FAKE = """
import argparse, json, os, sys, time
from pathlib import Path
p = argparse.ArgumentParser()
for name in ("extra", "peers", "shapes", "m", "dtype", "group", "out", "cold-mb", "rep-ms", "budget", "eager-m"):
    p.add_argument("--" + name)
p.add_argument("--asym", action="store_true")
a = p.parse_args()
with open(os.environ["SEEN"], "a") as seen:
    seen.write(json.dumps([a.shapes, a.m, a.rep_ms, os.environ.get("EXTRA_PEERS", "")]) + "\\n")
if a.rep_ms == "1" and a.m == "2":
    time.sleep(60)
rows = [{"peer": "quack", "M": int(m)} for m in a.m.split(",")]
Path(a.out, "result.json").write_text(json.dumps({"rows": rows}))
"""


@pytest.fixture
def bench() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("tools_bench", str(TOOLS / "bench"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("tools_bench", loader))
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("peers", [(), ("--peers", "DIR")])
def test_the_record_holds_the_limit_of_the_same_run(
    peers: tuple[str, ...], bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    order: list[str] = []

    def done(what: str, value: Any) -> Any:
        return lambda *_, **__: order.append(what) or value

    monkeypatch.setattr(bench.run, "facts", lambda device, dtype: FACTS)
    monkeypatch.setattr(bench, "with_peers" if peers else "measure", done("kernels", rows()))
    monkeypatch.setattr(bench.timing, "reading", done("reading", {"4096x4096": 3.0}))
    command = ["bench", *peers, "--shapes", "4096x4096", "--m", "1,64,1024", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    bench.main()
    assert order == ["kernels", "reading"]
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["stream_us"] == {"4096x4096": 3.0}
    assert "3.0 us, 50 % of ours at M = 1" in capsys.readouterr().out

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench.timing, "reading", broken)
    bench.main()
    record = json.loads(path.read_text())
    assert "stream_us" not in record
    assert len(record["rows"]) == len(rows())
    assert "was not timed: RuntimeError: out of memory" in capsys.readouterr().out


def test_peers_are_compiled_beforehand(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Every shape and M is run once for the caches, in parts side by side; one that hangs costs its time alone."""
    (tmp_path / "peerbench.py").write_text(FAKE)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    a = argparse.Namespace(
        peers=str(tmp_path), kernels="quack", shapes="64x32,128x32", dtype="bf16", group=128, asym=True, cold_mb=150,
        rep_ms=30, budget=9, extra=str(tmp_path / "quack_peer.py"), warm=3, warm_seconds=6, wake=3, rest_ms=0,
    )  # fmt: skip
    rows = bench.with_peers(a, [1, 2, 4, 8])
    assert [row["M"] for row in rows] == [1, 2, 4, 8], "the point that wakes the device is left out"
    assert "compiled beforehand: 4 of 6 parts" in capsys.readouterr().out
    *before, last = map(json.loads, (tmp_path / "seen").read_text().splitlines())
    assert last == ["64x32,128x32", "3,1,2,4,8", "30", a.extra]
    assert {shape for shape, *_ in before} == {"64x32", "128x32"}
    for shape in ("64x32", "128x32"):
        assert sorted(m for s, part, *_ in before if s == shape for m in part.split(",")) == ["1", "2", "4", "8"]


PEERBENCH = """
import sys, time

def graph_time(run, states, x, a):
    return time.monotonic(), len(x)

def main():
    calls = []
    def run(state, x):
        calls.append((state, len(x)))
    class Rows(list):
        shape = property(lambda self: (len(self), 1))
    for rows in (127, 128):
        begun = time.monotonic()
        print(rows, graph_time(run, ["first", "second"], Rows([0] * rows), None)[0] - begun)
    print(sys.argv[1:], calls)
"""


def test_peers_rest_before_large_products(tmp_path: Path) -> None:
    """The one with 128 rows is timed its rest after a first call, the one with fewer at once, without one."""
    (tmp_path / "peerbench.py").write_text(PEERBENCH)
    command = [sys.executable, str(TOOLS / "peer_rest.py"), str(tmp_path / "peerbench.py"), "200", "--m", "127,128"]
    few, many, last = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert float(few.split()[1]) < 0.1
    assert 0.2 <= float(many.split()[1]) < 5
    assert last == "['--m', '127,128'] [('first', 128)]"
