"""What tools/readme does: README.md's sections between ``<!-- NAME: made by tools/readme -->`` and ``<!-- /NAME -->``.

Each is one function in SECTIONS that returns its Markdown, or nothing while the results it shows are not there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
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
    machine, paused = found["machine"], found["after a pause"]
    share, seconds = paused["speed_as_share_of_copy"], paused["repack_seconds"]
    lines = [
        f"{gigabytes(found['bytes'])} of AWQ GEMM to GPTQ v2 on {machine['cores']} cores ({machine['cpu']}): "
        f"{seconds['median']:.1f} s, {share['median']:.2f} times the speed of `cp` and `sync` of the same files "
        f"({share['worst']:.2f} to {share['best']:.2f} in {found['rounds']} rounds)."
    ]
    if "peer" in found:
        peer, ours = found["peer"], found["to_compressed_tensors_seconds"]["median"]
        lines.append(
            f"To compressed-tensors it takes {ours:.1f} s; compressed-tensors {peer['compressed-tensors']}'s own AWQ "
            f"conversion takes {peer['seconds']:.1f} s."
        )
    peaks = sorted((int(size), mib) for size, mib in found["peak_mib_above_interpreter_by_bytes"].items())
    told = " and ".join(f"{mib} MiB for {gigabytes(size)}" for size, mib in peaks)
    lines.append(f"Peak memory above an interpreter with torch: {told}.")
    seen = found["inspect"]
    lines.append(f"`inspect` of {seen['shards']} shards: {seen['seconds_after_import']:.2f} s after imports.")
    lines.append("How to repeat it: `./tools/bench_repack`; all numbers: [repack.json](benchmarks/repack.json).")
    return "\n".join(lines) + "\n"


def gigabytes(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 1e9:.1f} GB"


SECTIONS: dict[str, Callable[[], str]] = {"formats": formats, "repack": repack}


def made(text: str) -> str:
    """The README with every section as it should be; sections without a function stay as they are."""

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
    text = README.read_text()
    names = stale(text)
    if options.check:
        for name in names:
            print(f"README.md: the section {name} is stale; run ./tools/readme", file=sys.stderr)
        return 1 if names else 0
    README.write_text(made(text))
    print(f"rewritten: {', '.join(names) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
