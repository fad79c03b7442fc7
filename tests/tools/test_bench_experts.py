"""tools/bench_experts without a GPU: a run on the CPU, its file, its table, and the layout it gives to a peer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import bench_experts  # noqa: E402
import bench_experts_limits  # noqa: E402
import bench_experts_peers  # noqa: E402


def test_dry_run_and_render(tmp_path: Path) -> None:
    tool = [sys.executable, str(ROOT / "tools" / "bench_experts.py")]
    done = subprocess.run([*tool, "--dry", "--out", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("experts-cpu-fp16.json")
    result = json.loads(path.read_text())
    assert [r["tokens"] for r in result["rows"] if r["kernel"] == "w4plugin"] == [1, 4, 16]
    assert all(r["relative_error"] < 2e-3 and r["us"] > 0 for r in result["rows"])
    assert result["versions"]["torch"] == torch.__version__
    missing = [name for name in bench_experts_peers.PEERS if not any(r["kernel"] == name for r in result["rows"])]
    assert all(any(f"tiny {name}" in key for key in result["reasons"]) for name in missing), "every gap has its reason"
    again = subprocess.run([*tool, "--render", str(path)], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[0] in done.stdout
    for name in missing:
        assert f"not measured: tiny {name}" in again.stdout


def test_pairs_of_rows() -> None:
    """Byte i of a column holds row 2i in its low nibble and row 2i + 1 in its high one."""
    w = bench_experts.stack(2, 16, 3, 8, torch.float16, "cpu", 5)
    got = bench_experts_peers.pairs_of_rows(w)
    assert got.shape == (2, 3, 8)
    for e in range(2):
        for n in range(3):
            for k in range(16):
                code = int(w.qweight[e, k // 8, n]) >> (4 * (k % 8)) & 15
                assert int(got[e, n, k // 2]) >> (4 * (k % 2)) & 15 == code


def test_bytes_read_grow_to_the_whole_layer() -> None:
    layer = bench_experts_peers.LAYERS["qwen3-30b-a3b"]
    assert bench_experts.bytes_read(layer, 1) == pytest.approx(layer.nbytes() * 8 / 128)
    assert bench_experts.bytes_read(layer, 4096) == pytest.approx(layer.nbytes())


def test_rows_of_a_profile() -> None:
    """ncu's table: units differ from column to column, and the sum is a point's last kernel."""
    figures, stalls = bench_experts_limits.FIGURES, bench_experts_limits.STALLS
    stall = bench_experts_limits.STALL.format
    units = dict.fromkeys(figures.values(), "%") | {figures["us"]: "ns", figures["read_mb"]: "Gbyte"}
    line = dict.fromkeys(figures.values(), "61.5") | {figures["us"]: "12,345", figures["read_mb"]: "0.25"}
    line |= {stall(s): str(i) for i, s in enumerate(stalls)}
    del line[stall("barrier")], line[figures["tensor"]]  # not counted on every GPU
    names = ("place_kernel", "product_kernel", "product_kernel", "sum_kernel", "product_kernel")
    table = [line | {"Kernel Name": name} for name in names]
    rows = bench_experts_limits.rows_of(units, table, [("mixtral-8x7b", 4), ("qwen3-30b-a3b", 16)])
    assert [r["kernel"] for r in rows] == list(names)
    assert [r["tokens"] for r in rows] == [4, 4, 4, 4, 16]
    assert (rows[0]["us"], rows[0]["read_mb"], rows[0]["dram"]) == (12.35, 250.0, 61.5)
    assert list(rows[0]["waits"]) == list(stalls[:-4:-1])
    assert "tensor" not in rows[0]
