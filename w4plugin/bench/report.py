"""Results of a bench: their JSON, their tables and their picture."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from w4plugin.bench import roofline

Result = dict[str, Any]
DENSE = ("cublas", "dense")
"""What the dense library is called on NVIDIA GPUs, and elsewhere."""
OURS = "w4plugin-"
HELD = ("w4plugin-fused", "w4plugin-dense")
"""One of the portable backend's two paths, forced: for the table, not for the picture."""


def result(
    facts: dict[str, Any],
    rows: list[dict[str, Any]],
    dtype: str,
    asym: bool,
    command: str,
    reading: dict[str, float] | None = None,
) -> Result:
    """What a run found, from peerbench's rows or from rows like them, and what timing.reading found if it was asked."""
    device = roofline.Device(facts["bandwidth_bytes_per_s"], facts["matrix_ops_per_s"])
    out = []
    for r in rows:
        if "failed" in r:
            continue
        four_bit = r["peer"] not in DENSE
        moved = roofline.total_bytes(r["M"], r["K"], r["N"], four_bit, r["G"], asym)
        out.append(
            {
                "kernel": r["peer"],
                "K": r["K"],
                "N": r["N"],
                "M": r["M"],
                "dtype": dtype,
                "symmetric": not asym,
                "group": r["G"],
                "us": round(r["us"], 3),
                "bytes": int(moved),
                "relative_error": r["rel_err"],
            }
        )
    made = {"date": datetime.date.today().isoformat(), "command": command, **facts}
    made["ridge_ops_per_byte"] = round(device.ridge, 1)
    made["critical_m"] = {
        "16 bit": round(roofline.critical_m(device, 2.0), 1),
        "4 bit": round(roofline.critical_m(device, 0.5), 1),
    }
    made["crossings"] = crossings(out)
    if reading:
        made["stream_us"] = {shape: round(us, 3) for shape, us in reading.items()}
    return {**made, "rows": out}


def crossings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each shape the M at which our best kernel stops being faster than the dense library; None: not in the run."""
    found = []
    for k, n in shapes(rows):
        points = speedups(rows, k, n)
        if points:
            m = roofline.crossing(points)
            found.append({"K": k, "N": n, "M": None if m is None else round(m, 1), "largest_M": points[-1][0]})
    return found


def shapes(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((r["K"], r["N"]) for r in rows))


def speedups(rows: list[dict[str, Any]], k: int, n: int, kernel: str = "") -> list[tuple[int, float]]:
    """(M, dense time over time) of a kernel, or of the best of ours, in rising M."""
    base = {r["M"]: r["us"] for r in rows if (r["K"], r["N"]) == (k, n) and r["kernel"] in DENSE}
    mine = times(rows, k, n, kernel)
    return [(m, base[m] / mine[m]) for m in sorted(mine) if m in base]


def times(rows: list[dict[str, Any]], k: int, n: int, kernel: str = "") -> dict[int, float]:
    """us at each M of a kernel, or of the best of ours."""
    found: dict[int, float] = {}
    for r in rows:
        mine = r["kernel"] == kernel if kernel else r["kernel"].startswith(OURS) and r["kernel"] not in HELD
        if mine and (r["K"], r["N"]) == (k, n):
            found[r["M"]] = min(r["us"], found.get(r["M"], float("inf")))
    return found


def write(result: Result, path: Path) -> Path:
    """One row a line, replaced as a whole."""
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)[:-2]
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n')
    os.replace(partial, path)
    return path


def lines(result: Result) -> Iterator[str]:
    """The result for people."""
    versions = [f"{key} {result[key]}" for key in ("driver", "torch", "triton") if result.get(key)]
    critical = ", ".join(f"{m:.3g} for {name} weights" for name, m in result["critical_m"].items())
    yield f"{result['device']}, {', '.join(versions)}, {result['date']}"
    yield (
        f"{result['bandwidth_bytes_per_s'] / 1e12:.3g} TB/s, {result['matrix_ops_per_s'] / 1e12:.3g} Tflop/s, ridge "
        f"{result['ridge_ops_per_byte']} operations a byte; memory-bound below M = {critical}"
    )
    for k, n in shapes(result["rows"]):
        yield from shape_lines([r for r in result["rows"] if (r["K"], r["N"]) == (k, n)])
    for c in result["crossings"]:
        where = f"at M = {c['M']}" if c["M"] is not None else f"not up to M = {c['largest_M']}"
        yield f"{c['K']} x {c['N']}: the dense library overtakes {where}"
    for shape, us in result.get("stream_us", {}).items():
        k, n = map(int, shape.split("x"))
        ours = times(result["rows"], k, n).get(1)
        share = "" if ours is None else f", {us / ours:.0%} of ours at M = 1".replace("%", " %")
        yield f"{k} x {n}: to read the packed words alone takes {us:.1f} us{share}"


def shape_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """us of each kernel against M, the fastest 4-bit one marked."""
    if not rows:
        return
    key = "kernel" if "kernel" in rows[0] else "peer"
    names = list(dict.fromkeys(r[key] for r in rows))
    cells = {(r[key], r["M"]): r["us"] for r in rows if "us" in r}
    yield ""
    yield f"K = {rows[0]['K']}, N = {rows[0]['N']}: microseconds a call"
    yield "M".rjust(6) + "".join(name.rjust(max(len(name) + 2, 9)) for name in names)
    for m in sorted({r["M"] for r in rows}):
        best = min((cells[name, m] for name in names if name not in DENSE and (name, m) in cells), default=0.0)
        line = str(m).rjust(6)
        for name in names:
            us = cells.get((name, m))
            text = "-" if us is None else f"{us:.1f}" + ("*" if us == best and name not in DENSE else " ")
            line += text.rjust(max(len(name) + 2, 9))
        yield line
    for r in rows:
        if "failed" in r:
            yield f"{r[key]}, M = {r['M']}: {r['failed']}"


def name(facts: dict[str, Any], dtype: str, kind: str) -> str:
    """Of a result's files, without an ending."""
    device = re.sub(r"[^A-Za-z0-9.]+", "-", facts["device"]).strip("-")
    return f"kernels-{device}-{dtype}-{kind}"


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def picture(results: list[Result], folder: Path) -> Path:
    """Measured speed-up against M over the roofline's, with the critical M of both widths and the crossing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = results[0]
    device = roofline.Device(first["bandwidth_bytes_per_s"], first["matrix_ops_per_s"])
    rows = [row for result in results for row in result["rows"]]
    figure, axes = pyplot.subplots(figsize=(9, 5.2))
    colours = pyplot.get_cmap("tab10")
    for i, (k, n) in enumerate(shapes(rows)):
        points = speedups(rows, k, n)
        if not points:
            continue
        asym = not next(r["symmetric"] for r in rows if (r["K"], r["N"]) == (k, n))
        group = next(r["group"] for r in rows if (r["K"], r["N"]) == (k, n))
        ms, measured = zip(*points, strict=True)
        predicted = [roofline.speedup(device, m, k, n, group, asym) for m in ms]
        axes.plot(ms, measured, "o-", color=colours(i % 10), markersize=3.5, label=f"{k} x {n}")
        axes.plot(ms, predicted, ":", color=colours(i % 10), linewidth=1)
        crossing = roofline.crossing(points)
        if crossing is not None:
            axes.plot([crossing], [1.0], "x", color=colours(i % 10))
    axes.plot([], [], ":", color="black", linewidth=1, label="roofline")
    axes.plot([], [], "x", color="black", linestyle="none", label="measured crossing")
    for width, m in first["critical_m"].items():
        axes.axvline(m, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(
            f"critical M, {width}: {m:.0f}", (m, axes.get_ylim()[1]), rotation=90, va="top", ha="right", fontsize=8
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("M, rows of activations")
    dense = "cuBLAS" if any(r["kernel"] == "cublas" for r in rows) else "plain weights"
    axes.set_ylabel(f"speed-up over {rows[0]['dtype']} {dense}")
    axes.set_title(
        f"{first['device']}: {first['bandwidth_bytes_per_s'] / 1e12:.3g} TB/s, "
        f"{first['matrix_ops_per_s'] / 1e12:.3g} Tflop/s measured, ridge {first['ridge_ops_per_byte']:.0f}"
    )
    axes.legend(fontsize=8, ncols=2)
    axes.grid(alpha=0.3)
    kind = "sym" if rows[0]["symmetric"] else "asym"
    path = folder / f"{name(first, rows[0]['dtype'], kind)}.png"
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return path
