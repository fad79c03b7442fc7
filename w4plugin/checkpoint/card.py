"""The model card of an output: where it comes from, what was done to it, and how to check that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TAGS = ("4-bit", "int4", "w4plugin")

_DONE = {
    "repack": "repacked from {name} without changing a weight",
    "dequantize": "dequantised from {name}: plain weights, exactly what the 4-bit codes stand for",
    "quantize": "quantised from {name} to 4 bits, round to nearest",
}


def text(report: Mapping[str, Any], source_card: Path | None) -> str:
    """The README.md of an output.

    Args:
        report: what ``w4plugin_report.json`` holds.
        source_card: the source's own card, whose license, language and other data are kept.
    """
    source, options = report["source"], report["options"]
    lines = [_front(report, source_card), f"# {source['name']}, {_title(report)}", ""]
    done = _DONE[report["command"]].format(name=f"`{source['name']}`")
    lines += [f"This checkpoint was {done} by w4plugin {report['w4plugin']}.", ""]
    if source["repo"]:
        lines += [
            f"Source: [{source['repo']}](https://huggingface.co/{source['repo']}), commit `{source['commit']}`.",
            "",
        ]
    lines += ["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in _rows(report).items()), ""]
    if report["command"] == "repack":
        lines += [
            "Compare it with its source:",
            "",
            "```",
            f"w4plugin verify {source['repo'] or 'SOURCE'} .",
            "```",
            "",
        ]
    shown = ", ".join(f"`--{k.replace('_', '-')} {v}`" for k, v in options.items() if v not in ([], None, "refuse"))
    if shown:
        lines += [f"Options: {shown}.", ""]
    lines += ["Every tensor's SHA-256, and which rule decided for each module, are in `w4plugin_report.json`."]
    if source_card is not None:
        lines += ["The source's own card is `README.source.md`."]
    return "\n".join(lines) + "\n"


def _title(report: Mapping[str, Any]) -> str:
    to = report["options"].get("to")
    return f"INT4 as {to}" if to else "dequantised"


def _rows(report: Mapping[str, Any]) -> dict[str, str]:
    layers = [m for m in report["modules"] if "layer" in m]
    sizes = Counter("one group" if m["layer"]["groups"] == 1 else str(m["layer"]["group_size"]) for m in layers)
    return {
        "packed modules": str(len(layers)),
        "group size": ", ".join(f"{size} ({count})" for size, count in sorted(sizes.items())),
        "symmetric": str(sum(m["layer"]["sym"] for m in layers)),
        "act-order": str(sum(m["layer"]["desc_act"] for m in layers)),
        "read from": ", ".join(sorted({str(m["from"]) for m in layers})),
    }


def _front(report: Mapping[str, Any], source_card: Path | None) -> str:
    """The YAML head: what the source's card says about license and language, and what this checkpoint is."""
    from huggingface_hub import ModelCard, ModelCardData  # imported here: it takes a third of a second

    kept: dict[str, Any] = {}
    if source_card is not None:
        try:
            content = source_card.read_text(encoding="utf-8", errors="replace")
            kept = dict(vars(ModelCard(content, ignore_metadata_errors=True).data))
        except Exception:  # a card that no parser accepts is carried as a file and not trusted for its data
            kept = {}
    kept.pop("model-index", None)  # results that were measured on the source's own bytes stay with the source
    repo = report["source"]["repo"]
    tags = [*dict.fromkeys([*(t for t in kept.get("tags") or () if isinstance(t, str)), *TAGS])]
    data = {**kept, "tags": tags}
    if repo:
        data["base_model"], data["base_model_relation"] = repo, "quantized"
    return f"---\n{ModelCardData(**data).to_yaml()}\n---\n"
