"""What limits our experts' kernels on this GPU, by Nsight Compute: one line a kernel, and a JSON file.

    tools/bench_experts_limits.py --points qwen3-30b-a3b:16,mixtral-8x7b:64    # needs ncu and leave to read counters

Each point is one call as tools/bench_experts makes it, profiled with the clock as it runs and the cache emptied before
every pass. Per kernel: time, share of the memory's peak rate, of the L2's and the L1's, of the tensor cores' time,
warps in residence, how often a scheduler issues, registers, programs, and the three reasons for which warps wait most.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROOT = Path(__file__).resolve().parents[1]
FIGURES = {
    "us": "gpu__time_duration.sum",
    "read_mb": "dram__bytes_read.sum",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "programs": "launch__grid_size",
}
SCALE = {"ns": 1e-3, "nsecond": 1e-3, "us": 1, "usecond": 1, "ms": 1e3, "msecond": 1e3,
         "byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1, "Gbyte": 1e3}  # fmt: skip
"""Of ncu's units, to microseconds and megabytes."""
STALLS = (
    "barrier", "branch_resolve", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected", "short_scoreboard", "sleeping",
    "tex_throttle", "wait",
)  # fmt: skip
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
SHOWN = ("gather_kernel", "count_kernel", "place_kernel", "product_kernel", "sum_kernel")


def child(points: list[tuple[str, int]]) -> None:
    """One call a point between the profiler's marks."""
    import torch
    from bench_experts import routing, weights_of
    from bench_experts_peers import LAYERS

    from w4plugin import kernels

    for name, tokens in points:
        layer = LAYERS[name]
        p = kernels.prepare_experts(*weights_of(layer, torch.float16, "cuda", 0), dtype=torch.float16)
        x = torch.randn(tokens, layer.hidden, device="cuda", dtype=torch.float16)
        weights, ids = routing(layer, tokens, "cuda", 0)
        kernels.experts(x, p, weights, ids)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        kernels.experts(x, p, weights, ids)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def profile(points: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """A row a kernel, in the order in which they ran."""
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        raise SystemExit("ncu is not on PATH: install Nsight Compute")
    known = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True).stdout.split()
    wanted = [*FIGURES.values(), *(STALL.format(s) for s in STALLS)]
    lacking = [m for m in wanted if not m.startswith("launch__") and m.split(".")[0] not in known]
    if lacking:
        print("not counted on this GPU:", ", ".join(lacking))
    command = [
        ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw",
        "--metrics", ",".join(m for m in wanted if m not in lacking), sys.executable, __file__, "--child",
        "--points", ",".join(f"{name}:{tokens}" for name, tokens in points),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    table = list(csv.DictReader(io.StringIO("\n".join(lines))))
    return rows_of(table[0], table[1:], points)


def rows_of(units: dict[str, str], table: list[dict[str, str]], points: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """ncu's table as rows; the last kernel of a point is the sum."""
    rows, at = [], 0
    for line in table:
        kernel = next((name for name in SHOWN if line["Kernel Name"].startswith(name)), line["Kernel Name"][:60])
        row: dict[str, Any] = {"layer": points[at][0], "tokens": points[at][1], "kernel": kernel}
        for figure, metric in FIGURES.items():
            if metric in line:
                row[figure] = round(number(line[metric]) * SCALE.get(units[metric], 1), 2)
        waits = {s: number(line[STALL.format(s)]) for s in STALLS if STALL.format(s) in line}
        row["waits"] = {s: round(waits[s], 2) for s in sorted(waits, key=lambda s: -waits[s])[:3]}
        rows.append(row)
        at += kernel == "sum_kernel"
    return rows


def number(text: str) -> float:
    return float(text.replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", required=True, help="LAYER:TOKENS,...")
    parser.add_argument("--out", default=os.environ.get("OUT") or str(ROOT / "benchmarks"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    points = [(name, int(tokens)) for name, tokens in (point.split(":") for point in a.points.split(","))]
    if a.child:
        child(points)
        return
    import torch

    rows = profile(points)
    for row in rows:
        print(json.dumps(row))
    device = torch.cuda.get_device_name(0)
    result = {
        "date": datetime.date.today().isoformat(), "device": device, "dtype": "fp16",
        "command": "tools/bench_experts_limits.py " + " ".join(sys.argv[1:]), "rows": rows,
    }  # fmt: skip
    path = Path(a.out) / f"experts-limits-{device.replace(' ', '-')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print("wrote", path)


if __name__ == "__main__":
    main()
