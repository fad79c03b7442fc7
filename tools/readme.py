"""What tools/readme does: sections of README.md and docs/ between ``<!-- NAME: made by tools/readme -->`` and its end.

Each is one function in SECTIONS that returns its Markdown, or nothing while the results it shows are not there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
BENCHMARKS = ROOT / "benchmarks"

MARKED = re.compile(r"(<!-- (?P<name>[\w-]+): made by tools/readme -->\n)(?P<body>.*?)(<!-- /(?P=name) -->)", re.DOTALL)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


def results(name: str) -> Mapping[str, Any] | None:
    """benchmarks/NAME.json, None when nobody has measured."""
    path = BENCHMARKS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def formats() -> str:
    """Every built-in format: who wrote it, and what can be written."""
    from w4plugin.formats.registry import BUILT_IN

    rows = []
    for f in sorted(BUILT_IN, key=lambda f: (f.write is None, f.name != "gptq_v2")):  # the default, then the writable
        # limits begin with "written ..." or "read only: ..."
        kept, _, why = f.limits.partition(" ")
        if f.write is None:
            written = f"no: {f.limits.removeprefix('read only: ')}"
        else:
            assert kept in ("written", ""), f.limits
            written = f"yes, {why}" if why else "yes, everything"
        rows.append((f"`{f.name}`", f.title, f.producers, written))
    head = ("format", "what it is", "written by", "can `repack --to` it")
    return f"{table(head, rows)}\nAll of them are read. A writer refuses what it cannot hold exactly.\n"


def repack() -> str:
    """Speed and memory of repack, from tools/bench_repack."""
    found = results("repack")
    if found is None:
        return ""
    machine = found["machine"]

    def told(kind: str) -> str:
        share, seconds = found[kind]["speed_as_share_of_copy"], found[kind]["repack_seconds"]
        return f"{seconds['median']:.1f} s, {share['median']:.2f} times the speed of `cp` and `sync` of the same files"

    lines = [
        f"{gigabytes(found['bytes'])} of AWQ GEMM to GPTQ v2 on {machine['cores']} cores ({machine['cpu']}): "
        f"{told('at once')} (medians of {found['rounds']} rounds). On a virtual machine whose freed memory has gone "
        f"back to its host, seconds later: {told('after a pause')}."
    ]
    if "peer" in found:
        peer, ours = found["peer"], found["to_compressed_tensors_seconds"]["median"]
        lines.append(
            f"To compressed-tensors it takes {ours:.1f} s; compressed-tensors {peer['compressed-tensors']}'s own AWQ "
            f"conversion takes {peer['seconds']:.1f} s."
        )
    peaks = sorted((int(size), mib) for size, mib in found["peak_mib_above_interpreter_by_bytes"].items())
    sizes = " and ".join(f"{mib} MiB for {gigabytes(size)}" for size, mib in peaks)
    lines.append(f"Peak memory above an interpreter with torch: {sizes}.")
    seen = found["inspect"]
    lines.append(f"`inspect` of {seen['shards']} shards: {seen['seconds_after_import']:.2f} s after imports.")
    lines.append("How to repeat it: `./tools/bench_repack`; all numbers: [repack.json](benchmarks/repack.json).")
    return "\n".join(lines) + "\n"


def gigabytes(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 1e9:.1f} GB"


OURS = "w4plugin-hopper"
DENSE = "cublas"
PEERS = {
    "quack": "QuACK",
    "marlin": "Marlin",
    "machete": "Machete",
    "humming": "Humming",
    "exllamav2": "ExLlamaV2",
    "tinygemm": "tinygemm",
    "vllm_triton": "vLLM's Triton kernel",
}
BANDS = ((1, 32), (64, 512), (1024, 4096))
"""Rows of x for which a mean is given, first to last."""
RIGHT = 2e-2
"""Relative error below which a kernel's result counts."""

NINE = ("kernels-NVIDIA-H200-fp16-sym-nine", "kernels-NVIDIA-H200-bf16-asym-nine")
"""Records of one run over nine shapes."""
BETWEEN = "kernels-NVIDIA-H200-fp16-sym-between"
"""The record of numbers of rows that are no power of two."""
Point = tuple[int, int, int]
"""K, N, M."""


def kernel_records() -> dict[str, Mapping[str, Any]]:
    """The runs of tools/bench that the pages show, float16 first; none unless both are there."""
    found = {name: record for name in NINE if (record := results(name)) is not None}
    return found if len(found) == len(NINE) else {}


def times(record: Mapping[str, Any]) -> dict[str, dict[Point, float]]:
    """Microseconds of each kernel at each point where it ran and its result is right."""
    found: dict[str, dict[Point, float]] = {}
    for r in record["rows"]:
        if r["relative_error"] < RIGHT:
            found.setdefault(r["kernel"], {})[r["K"], r["N"], r["M"]] = r["us"]
    return found


def best_of_others(record: Mapping[str, Any]) -> dict[Point, tuple[float, float, str]]:
    """For each point our time, and the time and name of the fastest other kernel, cuBLAS included."""
    kernels = times(record)
    found = {}
    for point, ours in kernels[OURS].items():
        others = [(us[point], name) for name, us in kernels.items() if name != OURS and point in us]
        if others:
            found[point] = (ours, *min(others))
    return found


def means(ratios: Mapping[Point, float]) -> list[str]:
    """The geometric mean of each band."""
    bands = ([r for (_, _, m), r in ratios.items() if first <= m <= last] for first, last in BANDS)
    return [f"{geometric(band):.2f}" if band else "not run" for band in bands]


def weights_of(record: Mapping[str, Any]) -> str:
    """What was multiplied: dtype, symmetry, groups."""
    rows = record["rows"]
    dtype = {"fp16": "float16", "bf16": "bfloat16"}[rows[0]["dtype"]]
    sizes = Counter(r["group"] for r in rows)
    usual = sizes.most_common(1)[0][0]
    other = {f"{r['group']} on {r['K']} x {r['N']}": None for r in rows if r["group"] != usual}
    told = f"{dtype}, {'symmetric' if rows[0]['symmetric'] else 'asymmetric'}, groups of {usual}"
    return f"{told} ({', '.join(other)})" if other else told


def speed() -> str:
    """Kernels of one run of tools/bench: the means, the picture, the table, the share of the limit at M = 1."""
    found = kernel_records()
    if not found:
        return ""
    rows = []
    for name, record in found.items():
        ratios = {point: best / ours for point, (ours, best, _) in best_of_others(record).items()}
        k, n, m = min(ratios, key=lambda point: ratios[point])
        below = f"{sum(r < 0.95 for r in ratios.values())} of {len(ratios)}"
        lowest = f"{ratios[k, n, m]:.2f} ({k} x {n}, M = {m})"
        rows.append((weights_of(record), *means(ratios), below, lowest, f"[{name}.json](benchmarks/{name}.json)"))
    first = found[NINE[0]]
    head = ("", *(f"M = {low} to {high}" for low, high in BANDS), "points below 0.95", "lowest", "record")
    return f"""\
{first["device"]}, {first["date"]}, torch {first["torch"]}, triton {first["triton"]}. Time of the best of all others at
each point ([which](docs/comparison.md#speed)), cuBLAS with 16-bit weights among them, over w4plugin's; geometric means
(above 1: w4plugin is faster):

{table(head, rows)}
![speed-up over cuBLAS against M, over the roofline](benchmarks/kernels-NVIDIA-H200-fp16-sym.png)

<details><summary>microseconds a call</summary>

{grid(first, (1, 16, 64, 256, 1024, 4096))}
</details>

{between()}{of_the_limit(first)}{ridge(first)}{traffic()}\
Peers were compiled for Hopper ahead of time where their wheels hold only PTX.
"""


def between() -> str:
    """Ours and the best of the others where M is no power of two."""
    record = results(BETWEEN)
    if record is None:
        return ""
    ratios = {point: best / ours for point, (ours, best, _) in best_of_others(record).items()}
    ms = tuple(dict.fromkeys(m for _, _, m in ratios))
    others = ", ".join(PEERS.get(name, "cuBLAS") for name in times(record) if name != OURS)
    mean, lowest = geometric(ratios.values()), min(ratios.values())
    return f"""\
Between the powers of two ([record](benchmarks/{BETWEEN}.json)), beside {others}:
the best of them over w4plugin is {mean:.2f} as a geometric mean and {lowest:.2f} at its lowest. Microseconds,
{grid(record, ms)}
"""


def grid(record: Mapping[str, Any], ms: tuple[int, ...]) -> str:
    """Ours and the best of the others, a line a shape."""
    points = best_of_others(record)

    def cell(point: Point) -> str:
        if point not in points:
            return "-"
        ours, best, name = points[point]
        return f"{ours:.1f} / {best:.1f} {name}"

    shapes = dict.fromkeys(point[:2] for point in points)
    rows = [(f"{k} x {n}", *(cell((k, n, m)) for m in ms)) for k, n in shapes]
    return (
        f"{weights_of(record)}: w4plugin / the best of the others, by name.\n\n"
        f"{table(('K x N', *(f'M = {m}' for m in ms)), rows)}"
    )


def of_the_limit(record: Mapping[str, Any]) -> str:
    """At M = 1, how much of a call it takes to read the packed words."""
    ours, limit = times(record)[OURS], record.get("stream_us", {})
    rows = []
    for k, n in ((4096, 4096), (4096, 28672), (8192, 57344), (28672, 8192)):
        if f"{k}x{n}" in limit and (k, n, 1) in ours:
            us, alone = ours[k, n, 1], limit[f"{k}x{n}"]
            rows.append((f"{k} x {n}", f"{alone:.1f}", f"{us:.1f}", f"{alone / us * 100:.0f} %"))
    if not rows:
        return ""
    head = ("K x N", "reading alone", "w4plugin, M = 1", "share")
    return (
        "How much of a call at M = 1 it takes to read the packed words and do nothing else, timed in the same run;\n"
        f"microseconds, {weights_of(record)}:\n\n{table(head, rows)}\n"
    )


def ridge(found: Mapping[str, Any]) -> str:
    """A sentence on the measured roofline."""
    rates = f"{found['bandwidth_bytes_per_s'] / 1e12:.2f} TB/s and {found['matrix_ops_per_s'] / 1e12:.0f} Tflop/s"
    critical = found["critical_m"]
    return (
        f"Roofline: {rates} measured put the ridge at {found['ridge_ops_per_byte']:.0f} operations a byte: 16-bit "
        f"weights are\nmemory-bound below M = {critical['16 bit']:.0f}, 4-bit ones below {critical['4 bit']:.0f} "
        "(an A100: 156 and 39).\n"
    )


def traffic() -> str:
    """A sentence on the bytes that the profiler counted."""
    name = "traffic-NVIDIA-H200-4096x28672-m1"
    found = results(name)
    if found is None:
        return ""
    share, moved = found["fused_read_over_expected"], found["two_phase_moved_over_fused"]
    return (
        f"At M = 1 on {found['K']} x {found['N']} the fused kernel reads {share:.4f} times the bytes of packed\n"
        f"weights, scales and activations; dequantising first moves {moved:.1f} times as many\n"
        f"([by the profiler](benchmarks/{name}.json)).\n"
    )


def geometric(values: Iterable[float]) -> float:
    """Geometric mean."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def by_checkpoint(runs: Iterable[dict[str, Any]]) -> list[bool]:
    """Whether every run of a checkpoint was equal, one entry a checkpoint."""
    found: dict[str, bool] = {}
    for run in runs:
        found[run["checkpoint"]] = found.get(run["checkpoint"], True) and run["equal"]
    return list(found.values())


def vllm() -> str:
    """vLLM on the same checkpoint: ours against its own kernels."""
    found, equal = results("vllm-NVIDIA-H200"), results("vllm-equality-NVIDIA-H200")
    if found is None:
        return ""
    ours, theirs = ({r["side"]: r for r in found["runs"]}[side] for side in ("ours", "vllm"))
    rows = [
        (f"decode, batch {b}", f"{ours['decode_tokens_per_s'][b]:.0f} tokens/s", f"{t:.0f} tokens/s", f"{r:.2f}")
        for (b, t), r in zip(theirs["decode_tokens_per_s"].items(), found["ratios"]["decode"].values(), strict=True)
    ]
    rows += [
        (f"first token, {n} of prompt", f"{ours['first_token_ms'][n]:.1f} ms", f"{t:.1f} ms", f"{r:.2f}")
        for (n, t), r in zip(theirs["first_token_ms"].items(), found["ratios"]["first_token"].values(), strict=True)
    ]
    versions = ours["versions"]
    text = (
        f"A symmetric GPTQ checkpoint of Llama-3-8B's shape (random words) on an {found['device']}, vLLM "
        f"{versions['vllm']}, torch {versions['torch']}, {found['date']}; both sides in "
        "[one run](benchmarks/vllm-NVIDIA-H200.json), vLLM's own side on its Machete kernel:\n\n"
        + table(("", "w4plugin", "vLLM's own", "ours is faster by"), rows)
    )
    if equal is not None:
        one = by_checkpoint(r for r in equal["checkpoints"] if r["tp"] == 1)
        captured = by_checkpoint(r for r in equal["checkpoints"] if r["tp"] == 1 and r["graphs"])
        more = [r["equal"] for r in equal["checkpoints"] if r["tp"] > 1]
        text += (
            f"\n{sum(one)} of {len(one)} checkpoints of five tools, mixtures of experts among them, generate the "
            f"greedy tokens of their dequantised copies there, {sum(captured)} of them under torch.compile and CUDA "
            f"graphs, and {sum(more)} of {len(more)} on two GPUs "
            "([list](benchmarks/vllm-equality-NVIDIA-H200.json)); CI checks every format on vLLM's CPU engine.\n"
        )
    return text


def load() -> str:
    """How long vLLM loads a checkpoint: ours against its own."""
    name = "vllm-load-NVIDIA-H200"
    found = results(name)
    if found is None:
        return ""
    ours, theirs = ([r["load"]["seconds"] for r in found["runs"] if r["side"] == side] for side in ("ours", "vllm"))
    size, ratio = gigabytes(found["model"]["bytes"]), found["ratios"]["load_time_ours_over_vllm"]
    version = found["runs"][0]["versions"]["vllm"]
    return f"""\
vLLM's `load_model` for Llama-3-8B's shape ({size}, the file in the page cache) takes
{statistics.median(ours):.2f} s with w4plugin and {statistics.median(theirs):.2f} s with vLLM's own kernels,
{ratio:.2f} times as long: medians of {len(ours)} loads each, in turn, on an {found["device"]}, vLLM {version},
{found["date"]} ([numbers](../benchmarks/{name}.json)). Single loads scatter more than that, from {min(ours):.1f} to
{max(ours):.1f} s with w4plugin and from {min(theirs):.1f} to {max(theirs):.1f} s with vLLM's own.
"""


def experts() -> str:
    """Layers of experts: ours against vLLM's kernels."""
    name = "experts-NVIDIA-H200-fp16"
    found = results(name)
    if found is None:
        return ""
    layers, tokens = [d["name"] for d in found["layers"]], sorted({r["tokens"] for r in found["rows"]})
    right = {(r["layer"], r["tokens"], r["kernel"]): r["us"] for r in found["rows"] if r["relative_error"] < RIGHT}
    peers = {"marlin": "Marlin", "humming": "Humming", "vllm-triton": "its Triton kernel"}
    rows = []
    for layer in layers:
        for peer, title in peers.items():
            cells = [
                f"{right[layer, t, peer] / right[layer, t, 'w4plugin']:.2f}" if (layer, t, peer) in right else "-"
                for t in tokens
            ]
            rows.append((layer if peer == "marlin" else "", title, *cells))
    head = ("layer", "vLLM's kernel", *(f"{t} tokens" for t in tokens))
    return (
        f"Time of vLLM's kernels for a layer of experts over w4plugin's (above 1: w4plugin is faster); "
        f"{found['device']}, float16, symmetric, groups of 128, {found['date']}, "
        f"[one run](../benchmarks/{name}.json); - : not run, or wrong results:\n\n{table(head, rows)}"
    )


def hosts() -> str:
    """Which versions of the hosts are tested, by the constants that their adapters and environments state."""
    from w4plugin.runtime.sglang import host as sglang
    from w4plugin.runtime.vllm import versions as vllm_versions

    pins = (ROOT / "tests" / "requirements-transformers.txt").read_text()
    found = re.search(r"^transformers==([\d.]+)$", pins, re.MULTILINE)
    assert found is not None
    rows = [
        (
            "vLLM",
            ", ".join(vllm_versions.TESTED),
            "engine and server on a CPU, engine on an H200",
            "[vllm.md](docs/vllm.md)",
        ),
        (
            "Transformers",
            found[1],
            "whole, on a CPU; its GPU tests, [on an H200](benchmarks/tests-NVIDIA-H200.json)",
            "below",
        ),
        (
            "SGLang",
            ".".join(map(str, sglang.TESTED)),
            "its layers, loaders, config and Llama class, on a CPU; no engine, no GPU",
            "[sglang.md](docs/sglang.md)",
        ),
    ]
    return table(("host", "tested versions", "what was run", "more"), rows)


def gpus() -> str:
    """What runs on which device, by the backends' own conditions."""
    import torch

    from w4plugin.kernels import registry
    from w4plugin.kernels.backend import Target

    kinds = [
        ("sm_90", "H100, H200", "measured on an H200"),
        ("sm_80", "A100", "compiled in CI"),
        ("sm_89", "L4, L40S, RTX 4090", "compiled in CI"),
        ("sm_100", "B200", "compiled in CI"),
        ("gfx942", "MI300X", "compiled in CI"),
        ("gfx950", "MI350X", "compiled in CI"),
        ("cpu", "any CPU of PyTorch", "run in CI"),
    ]
    rows = []
    for arch, names, proof in kinds:
        device = torch.device("cpu" if arch == "cpu" else "cuda")
        against = registry.reasons(Target(device, torch.bfloat16, arch))
        rows.append((f"`{arch}`", names, ", ".join(name for name, why in against.items() if why is None), proof))
    return table(("architecture", "such as", "backends, the first that fits a weight is taken", "checked"), rows)


def peers() -> str:
    """Each kernel's time over ours, from the runs that timed them all."""
    found = kernel_records()
    return "\n".join(each_peer(name, record) for name, record in found.items())


def each_peer(name: str, record: Mapping[str, Any]) -> str:
    """The same from one record."""
    kernels = times(record)
    rows = []
    for kernel, title in {DENSE: "cuBLAS, 16-bit weights", **PEERS}.items():
        ratios = {p: us / kernels[OURS][p] for p, us in kernels.get(kernel, {}).items() if p in kernels[OURS]}
        if ratios:
            rows.append((title, str(len(ratios)), *means(ratios)))
    head = ("peer", "points", *(f"M = {first} to {last}" for first, last in BANDS))
    return (
        f"Time of each over w4plugin's, geometric means (above 1: w4plugin is faster); {record['device']}, "
        f"{weights_of(record)}, {record['date']}, [one run](../benchmarks/{name}.json):\n\n{table(head, rows)}"
    )


def roofline() -> str:
    """The measured roofline, and what it predicts for each width."""
    records = kernel_records()
    if not records:
        return ""
    from w4plugin.bench import roofline as predicted

    name, found = next(iter(records.items()))
    device = predicted.Device(found["bandwidth_bytes_per_s"], found["matrix_ops_per_s"])
    kernels = times(found)
    k, n = 4096, 28672
    rows = []
    for m in (1, 8, 32, 64, 128, 256, 1024, 4096):
        four = predicted.seconds(device, m, k, n, True) * 1e6
        sixteen = predicted.seconds(device, m, k, n, False) * 1e6
        cells = (four, kernels[OURS][k, n, m], sixteen, kernels[DENSE][k, n, m])
        rows.append((str(m), *(f"{value:.1f}" for value in cells)))
    wide, narrow = (f"{found['critical_m'][width]:.0f}" for width in ("16 bit", "4 bit"))
    return f"""\
{found["device"]}: {device.bandwidth / 1e12:.2f} TB/s and {device.rate / 1e12:.0f} Tflop/s measured, so the ridge is
{device.ridge:.0f} operations a byte, and the critical M {wide} for 16-bit weights and {narrow} for 4-bit ones.
A weight of {k} x {n}, microseconds ([one run](../benchmarks/{name}.json)):

{table(("M", "roofline, 4 bit", "w4plugin", "roofline, 16 bit", "cuBLAS"), rows)}"""


def gains() -> str:
    """What the measured gain comes to at one row, and where it ends."""
    records = kernel_records()
    if not records:
        return ""
    from w4plugin.bench import roofline as predicted

    _, found = next(iter(records.items()))
    device = predicted.Device(found["bandwidth_bytes_per_s"], found["matrix_ops_per_s"])
    kernels = times(found)
    large, small = (4096, 28672), (4096, 4096)
    gained = {s: kernels[DENSE][*s, 1] / kernels[OURS][*s, 1] for s in (large, small)}
    ends = {f"{c['K']} x {c['N']}": c["M"] for c in found["crossings"]}
    crossed = sorted((m, shape) for shape, m in ends.items() if m is not None)
    above = ", ".join(shape for shape, m in ends.items() if m is None)
    where = "; ".join(f"{m:.0f} ({shape})" for m, shape in crossed)
    wide = found["critical_m"]["16 bit"]
    return f"""\
* At M = 1 the measured gain is {gained[large]:.1f} of the {predicted.speedup(device, 1, *large):.1f} that the bytes
  allow on a large layer (4096 x 28672), and {gained[small]:.1f} on a small one (4096 x 4096), where a call of a few
  microseconds is not long enough to fill the GPU.
* Above the critical M of 16-bit weights, {wide:.0f}, cuBLAS is bound by its operations too. The gain falls to 1
  at M = {where or "none measured"}.
  Up to M = {found["crossings"][0]["largest_M"]} it stays above 1 on {above or "none of them"}.
"""


def groups() -> str:
    """Bits a weight by group size, and the error of round to nearest on normal weights."""
    import torch

    from w4plugin.quantize import quantize

    weight = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    rows = []
    for size in (16, 32, 64, 128, 256, -1):
        shown = "all rows (-1)" if size == -1 else str(size)
        each = 4096 if size == -1 else size
        cells = []
        for sym in (True, False):
            error = quantize(weight, size, sym=sym).dequantize(torch.float32) - weight
            cells.append(f"{float(error.square().mean().sqrt() / weight.square().mean().sqrt()) * 100:.1f} %")
        rows.append((shown, f"{4 + 16 / each:.3f}", f"{4 + 20 / each:.3f}", *cells))
    head = ("group size", "bits a weight, symmetric", "with zero points", "error, symmetric", "with zero points")
    return table(head, rows)


def newcomer() -> str:
    """From a fresh clone to text on a CPU, as timed by tools/newcomer."""
    found = results("newcomer")
    if found is None:
        return ""
    seconds = found["seconds"]
    threads = f"OMP_NUM_THREADS={found['OMP_NUM_THREADS']}" if found["OMP_NUM_THREADS"] else ""
    cached = "no package cached" if "--no-cache" in found["command"] else "packages cached"
    return (
        f"From `git clone` to generated text, installations included ({cached}): {seconds['all'] / 60:.1f} minutes\n"
        f"on {found['cores']} cores ({found['cpu']}) beside other work (load {found['load']}), by\n"
        f"`{' '.join(filter(None, [threads, './' + found['command']]))}`: "
        "[newcomer.json](benchmarks/newcomer.json).\n"
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "formats": formats,
    "repack": repack,
    "speed": speed,
    "vllm": vllm,
    "load": load,
    "experts": experts,
    "hosts": hosts,
    "gpus": gpus,
    "newcomer": newcomer,
    "peers": peers,
    "roofline": roofline,
    "gains": gains,
    "groups": groups,
}


def made(text: str) -> str:
    """A page with every section as it should be; sections without a function stay as they are."""

    def section(match: re.Match[str]) -> str:
        make = SECTIONS.get(match["name"])
        return match[0] if make is None else f"{match[1]}{make()}{match[4]}"

    return MARKED.sub(section, text)


def stale(text: str) -> list[str]:
    """Names of the sections that are not what they should be."""
    old = {m["name"]: m["body"] for m in MARKED.finditer(text)}
    new = {m["name"]: m["body"] for m in MARKED.finditer(made(text))}
    return [name for name in old if old[name] != new[name]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a section is stale")
    options = parser.parse_args()
    failed = False
    for page in PAGES:
        text = page.read_text()
        names = stale(text)
        if options.check:
            for name in names:
                failed = True
                print(f"{page.name}: the section {name} is stale; run ./tools/readme", file=sys.stderr)
        elif names:
            page.write_text(made(text))
            print(f"{page.name}: rewritten {', '.join(names)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
