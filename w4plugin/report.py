"""A verb's result, for people (tables), for programs (JSON) or for nobody (quiet).

Results come from other people's files: a name may hold anything, so whatever a terminal would act upon is spelled out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from w4plugin.bench import report as bench_report
from w4plugin.checkpoint.summary import kinds

Result = Mapping[str, Any]

SHOWN = 20
"""Lines of one list before it is cut, unless everything is asked for."""


def as_json(result: Result) -> str:
    """The result for programs."""
    return json.dumps(result, indent=2, ensure_ascii=True)


def as_text(result: Result, *, verbose: bool = False) -> str:
    """The result for people."""
    lines = _WRITERS[result["command"]](result, verbose)
    return "\n".join(printable(line) for line in lines)


def printable(line: str) -> str:
    """Without control characters, which could move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Columns side by side; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not cells:
        return []
    widths = [max(len(head[i]), *(len(row[i]) for row in cells)) for i in range(len(head))]
    right = [all(row[i].replace(".", "", 1).lstrip("-").isdigit() for row in cells) for i in range(len(head))]
    lines = []
    for row in [list(head), *cells]:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        lines.append("  " + "  ".join(parts).rstrip())
    return lines


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"


def weights(count: int) -> str:
    """Numbers of weights as people say them."""
    if count < 1000:
        return str(count)
    for unit in ("k", "M", "G"):
        count_in = count / {"k": 1e3, "M": 1e6, "G": 1e9}[unit]
        if count_in < 1000:
            return f"{count_in:.3g} {unit}"
    return f"{count / 1e12:.3g} T"


def _group(row: Mapping[str, Any]) -> str:
    if row["group_size"] is None:
        return "?"
    return "all" if row["group_size"] == row["K"] else str(row["group_size"])


def _says(value: object, yes: str, no: str) -> str:
    return "?" if value is None else yes if value else no


def _inspect(result: Result, verbose: bool) -> list[str]:
    config, source = result["config"], result["source"]
    known = [
        config["method"] or "no quantisation config",
        *([config["layout"]] if config["layout"] and config["layout"] != config["method"] else []),
        *([f"{config['bits']} bits"] if config["bits"] else []),
        *([f"groups of {config['group_size']}"] if config["group_size"] else []),
        *([_says(config["sym"], "symmetric", "asymmetric")] if config["sym"] is not None else []),
        *(["act-order"] if config["desc_act"] else []),
        *([f"written by {config['producer']}"] if config["producer"] else []),
    ]
    lines = [f"{source['name']}  {' '.join(result['architectures'])}".rstrip(), f"  config: {', '.join(known)}"]
    files = source["files"]
    lines.append(f"  {len(files)} file{'s' if len(files) != 1 else ''}, {size(result['bytes'])}, "
                 f"{result['tensors']} tensors")  # fmt: skip
    if result["packed_weights"]:
        lines.append(
            f"  {len(result['modules'])} packed modules hold {weights(result['packed_weights'])} weights at "
            f"{result['bits_per_packed_weight']} bits each, zeros and scales included; with "
            f"{weights(result['plain_weights'])} plain ones {result['bits_per_weight']} bits a weight"
        )
    lines += ["", *_packed_table(result, verbose)] if result["modules"] else []
    lines += ["", *_plain_table(result, verbose)] if result["plain_layers"] else []
    lines += _notes(result, verbose)
    if not result["values"] and result["modules"]:
        lines += ["", "  zeros and act-order are the config's word; --values reads what is there"]
    return [*lines, "", *_vllm(result)]


def _packed_table(result: Result, verbose: bool) -> list[str]:
    keys = ("format", "bits", "K", "N", "experts", "group_size", "sym", "desc_act", "scales", "bias", "zero_rule")
    rows = result["modules"]
    merged = [(r["name"], 1, r) for r in rows] if verbose else kinds(rows, keys)
    return table(
        ("packed", "count", "format", "bits", "K", "N", "group", "zeros", "act-order", "scales", "bits/weight"),
        [
            (
                name, count, r["format"], r["bits"], r["K"], r["N"], _group(r), _says(r["sym"], "8", "stored"),
                _says(r["desc_act"], "yes", "no"), r["scales"] + (" + bias" if r["bias"] else ""), r["bits_per_weight"],
            )
            for name, count, r in merged
        ],
    )  # fmt: skip


def _plain_table(result: Result, verbose: bool) -> list[str]:
    rows = result["plain_layers"]
    merged = [(r["name"], 1, r) for r in rows] if verbose else kinds(rows, ("dtype", "shape"))
    shown = merged if verbose else merged[:SHOWN]
    lines = table(
        ("plain layers", "count", "dtype", "shape"),
        [(name, n, r["dtype"], " x ".join(map(str, r["shape"]))) for name, n, r in shown],
    )
    return lines + ([f"  and {len(merged) - len(shown)} more kinds (-v)"] if len(shown) < len(merged) else [])


def _vllm(result: Result) -> list[str]:
    vllm = result["vllm"]
    if not result["modules"]:
        return []
    if vllm["takes"]:
        return [f"  vLLM {vllm['version']}'s own loader: nothing known against it"]
    return [
        f"  vLLM {vllm['version']}'s own loader would not serve it rightly:",
        *(f"    {r}" for r in vllm["reasons"]),
    ]


def _notes(result: Result, verbose: bool) -> list[str]:
    notes = [n for n in result["notes"] if verbose or n["level"] != "info"]
    hidden = len(result["notes"]) - len(notes)
    shown = notes if verbose else notes[:SHOWN]
    lines = [f"  {n['level']}: {n['where']}: {n['text']}" for n in shown]
    if len(shown) < len(notes):
        lines.append(f"  and {len(notes) - len(shown)} more warnings (-v)")
    if hidden and not verbose:
        lines.append(f"  {hidden} more note{'s' if hidden != 1 else ''} on how things were read (-v)")
    return ["", *lines] if lines else []


def _written(result: Result, verbose: bool) -> list[str]:
    name = result["source"]["name"]
    verb = {"repack": "repacked", "dequantize": "dequantised", "quantize": "quantised"}[result["command"]]
    to = result["options"].get("to")
    if result["dry_run"]:
        return [
            f"{name} would be {verb}{f' as {to}' if to else ''}: {size(result['bytes_read'])} to read, "
            f"{size(result['bytes_written'])} to write",
            *_side_files(result),
            *_notes(result, verbose),
        ]
    packed = sum("layer" in m for m in result["modules"])
    speed = size(result["bytes_read"] / max(result["seconds"], 1e-9))
    lines = [
        f"{name} {verb}{f' as {to}' if to else ''}: {result['out']}",
        f"  {packed} modules, {len(result['tensors'])} tensors in {len(result['files'])} "
        f"file{'s' if len(result['files']) != 1 else ''}, {size(result['bytes_written'])}, "
        f"{result['seconds']:.1f} s ({speed}/s){', resumed' if result['resumed'] else ''}",
    ]
    rules = sorted({str(m["zero_rule"]) for m in result["modules"] if m.get("zero_rule")})
    if result["command"] != "quantize" and rules:
        lines.append(f"  zero points read as: {', '.join(rules)}")
    kept = [*result.get("kept", ()), *result.get("made_plain", ())]
    lines += [f"  not packed in 4 bits: {', '.join(kept[:6])}{' ...' if len(kept) > 6 else ''}"] if kept else []
    if result["dropped"]:
        reasons = sorted({d["reason"] for d in result["dropped"]})
        lines.append(f"  {len(result['dropped'])} tensors dropped: {', '.join(reasons)}")
    lines += [f"  uploaded: {result['uploaded']}"] if result.get("uploaded") else []
    empty = [m["name"] for m in result["modules"] if m.get("unfilled")]
    lines += [f"  never filled by its producer: {name}" for name in empty[:SHOWN]]
    return [*lines, *_side_files(result), *_notes(result, verbose)]


def _side_files(result: Result) -> list[str]:
    files = result["side_files"]
    lines = []
    if files["replaced"]:
        lines.append(f"  replaced by the config.json: {', '.join(files['replaced'])}")
    if files["left"]:
        lines.append(f"  left behind: {', '.join(files['left'])}")
    return lines


def _verify(result: Result, verbose: bool) -> list[str]:
    one, other = result["source"]["name"], result["other"]
    what = f"{one} and {other['name']}" if other else one
    lines = [f"{what}: {'verified' if result['ok'] else 'NOT the same' if other else 'NOT consistent'}"]
    if result["ok"] and other:
        lines.append(f"  {result['modules']} modules: codes, zero points, scales and groups equal; weights bit-equal")
    elif result["ok"]:
        lines.append(f"  {result['modules']} modules are read as the reference reads them")
    if result["ok"]:
        lines.append(
            f"  {result['plain_tensors']} other tensors {'byte-equal' if other else 'as recorded or readable'}"
        )
    if result["share_of_bound"] is not None:
        lines.append(
            f"  the source stores rounded products: at most {result['share_of_bound']:.3g} of half a unit in the last "
            "place from its own kernel's weights"
        )
    found = result["mismatches"]
    shown = found if verbose else found[:SHOWN]
    lines += [f"  {m['tensor']}: {m['what']}" for m in shown]
    lines += [f"  and {len(found) - len(shown)} more (-v)"] if len(shown) < len(found) else []
    return [*lines, *_notes(result, verbose)]


def _formats(result: Result, verbose: bool) -> list[str]:
    rows = [
        (f["name"], "read, write" if f["writes"] else "read", f["title"], f["producers"]) for f in result["formats"]
    ]
    lines = table(("format", "can", "what", "written by"), rows)
    limits = [f"  {f['name']}: {f['limits']}" for f in result["formats"] if f["limits"]]
    return [*lines, "", *limits] if verbose else lines


def _env(result: Result, verbose: bool) -> list[str]:
    lines = table(("package", "version"), [(k, v or "not installed") for k, v in result["packages"].items()])
    for device in result["devices"]:
        lines += ["", f"  {device['device']} ({device['arch']})"]
        for kind, head in (("backends", "backend"), ("experts", "of experts")):
            rows = [(name, "yes" if reason is None else f"no: {reason}") for name, reason in device[kind].items()]
            lines += table((head, "runs here"), rows)
    return lines


def _bench(result: Result, verbose: bool) -> list[str]:
    lines = list(bench_report.lines(result["result"]))
    lines += ["", *(f"failed: {text}" for text in result["failed"])] if result["failed"] else []
    return [*lines, *(f"wrote {file}" for file in result["files"])]


_WRITERS = {
    "inspect": _inspect,
    "repack": _written,
    "dequantize": _written,
    "quantize": _written,
    "verify": _verify,
    "formats": _formats,
    "env": _env,
    "bench": _bench,
}
