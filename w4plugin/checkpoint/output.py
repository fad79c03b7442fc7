"""From jobs to a whole model folder: shards, configs, side files, the report and the model card.

Everything in the folder follows from the input and the options: no date, no path and no name of a machine, so that the
same command gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from w4plugin import __version__
from w4plugin.checkpoint import card, disk, side_files, stream
from w4plugin.checkpoint.checkpoint import CONFIG, Checkpoint
from w4plugin.checkpoint.header import nbytes
from w4plugin.checkpoint.staging import REPORT, Staging, require_apart, require_free
from w4plugin.errors import CorruptError, UsageError
from w4plugin.note import Note

BARE_CONFIG = "quantize_config.json"
"""Where the quantisation config goes when the source has no config.json: where AutoGPTQ and GPTQModel look for it."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Request:
    """How to write, apart from what.

    Attributes:
        out: folder to create.
        force: replace ``out`` when it is an output of this project.
        dry_run: plan and report, write nothing.
        max_shard_size: bytes, or a text like "5GB".
        workers: jobs at the same time; None means one a core.
        device: where to convert; the bytes are the same on every one.
        begin: called once with the bytes to read.
        progress: called with the bytes that have been read since the last call.
    """

    out: Path
    force: bool = False
    dry_run: bool = False
    max_shard_size: int | str = "5GB"
    workers: int | None = None
    device: str = "cpu"
    begin: Progress = lambda total: None
    progress: Progress = lambda count: None


@dataclass(frozen=True)
class Work:
    """What a verb wants written.

    Attributes:
        command: its name.
        options: those that change the output.
        jobs: modules and tensors.
        config: facts of the finished jobs -> the new ``quantization_config``, None for none.
        dropped: tensors that are left out, with the reason.
        notes: for the report, beside those of the modules.
        extra: more entries of the report.
    """

    command: str
    options: Mapping[str, Any]
    jobs: Sequence[stream.Job]
    config: Callable[[Mapping[str, Mapping[str, Any]]], Mapping[str, Any] | None]
    dropped: Mapping[str, str]
    notes: Sequence[Note]
    extra: Mapping[str, Any]


def write(checkpoint: Checkpoint, work: Work, request: Request) -> dict[str, Any]:
    """Do the work and return its report, which also lies in the output as ``w4plugin_report.json``.

    Raises:
        W4Error: nothing of the output exists then, apart from ``OUT.partial`` after a failure of the disk.
    """
    started = time.monotonic()
    _require_distinct(work.jobs)
    _require_device(request.device)
    require_apart(checkpoint.source.folder, request.out)
    require_free(request.out, force=request.force)
    files = side_files.plan(checkpoint)
    report = _begin_report(checkpoint, work, files)
    predicted = sum(nbytes(d, tuple(s)) for job in work.jobs for d, s in job.predicted.values())
    reads = sum(job.reads for job in work.jobs)
    if request.dry_run:
        return {**report, "dry_run": True, "bytes_read": reads, "bytes_written": predicted}
    asked = {
        "w4plugin": version(),
        "report": report,
        "max_shard_size": str(request.max_shard_size),
        "stamps": [(file.name, file.size, *file.stamp) for file in checkpoint.files],
        "configs": _digest(checkpoint.configs),
        "side_files": [(name, *_stamp(path)) for name, path in files.copied.items()],
    }
    request.begin(reads)
    with Staging(request.out, asked, force=request.force) as staging:
        if not staging.resumed:
            disk.require_space(staging.folder, predicted)
        streamed = stream.run(
            work.jobs,
            checkpoint,
            staging,
            max_shard_size=request.max_shard_size,
            workers=request.workers,
            progress=request.progress,
        )
        side_files.copy(files, staging.folder)
        quantization = work.config(streamed.facts)
        for name, content in _configs(checkpoint, quantization).items():
            disk.write_file(staging.folder / name, _json(content))
        report = _end_report(report, streamed, staging.folder)
        text = card.text(report, files.copied.get(side_files.SOURCE_CARD))
        disk.write_file(staging.folder / side_files.CARD, text.encode())
        disk.write_file(staging.folder / REPORT, _json(report))
        staging.commit()
    return {
        **report,
        "out": str(request.out),
        "dry_run": False,
        "resumed": staging.resumed,
        "bytes_read": reads,
        "bytes_written": streamed.total,
        "seconds": round(time.monotonic() - started, 3),
    }


def version() -> str:
    """Version of this package."""
    return __version__


def note(entry: Note) -> dict[str, str]:
    """A note as the report has it."""
    return {"level": entry.level, "where": entry.where, "text": entry.text}


def source(checkpoint: Checkpoint) -> dict[str, Any]:
    """The source as the report has it."""
    return {
        "name": checkpoint.source.label(),
        "repo": checkpoint.source.repo,
        "commit": checkpoint.source.commit,
        "files": [{"name": f.name, "bytes": f.size, "header_sha256": f.header} for f in checkpoint.files],
    }


def _begin_report(checkpoint: Checkpoint, work: Work, files: side_files.SideFiles) -> dict[str, Any]:
    notes = [*checkpoint.notes, *checkpoint.quant_config.notes, *checkpoint.census.notes, *work.notes]
    return {
        "command": work.command,
        "w4plugin": version(),
        "source": source(checkpoint),
        "options": dict(work.options),
        **work.extra,
        "dropped": [{"tensor": name, "reason": reason} for name, reason in sorted(work.dropped.items())],
        "side_files": {
            "copied": list(files.copied),
            "replaced": list(files.replaced),
            "left": list(files.left),
        },
        "notes": [note(n) for n in dict.fromkeys(notes)],
    }


def _end_report(report: Mapping[str, Any], streamed: stream.Streamed, folder: Path) -> dict[str, Any]:
    """The report with what the work found out."""
    facts = sorted(streamed.facts.items(), key=lambda item: stream.natural(item[0]))
    modules = [{"name": name, **{k: v for k, v in fact.items() if k not in _APART}} for name, fact in facts]
    dropped = [*report["dropped"], *(entry for _, fact in facts for entry in fact.get("dropped", ()))]
    notes = [*report["notes"], *(entry for _, fact in facts for entry in fact.get("notes", ()))]
    return {
        **report,
        "modules": modules,
        "dropped": sorted(dropped, key=lambda entry: str(entry["tensor"])),
        "notes": list({json.dumps(n, sort_keys=True): n for n in notes}.values()),
        "files": [
            {"name": name, "bytes": (folder / name).stat().st_size, "tensors": len(inside)}
            for name, inside in streamed.shards.items()
        ],
        "tensors": dict(streamed.hashes),
    }


_APART = ("dropped", "notes")


def _configs(checkpoint: Checkpoint, quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config files of the output: every old quantisation config is gone, the new one stands in one place."""
    if CONFIG not in checkpoint.configs:
        return {} if quantization is None else {BARE_CONFIG: dict(quantization)}
    config = _stripped(checkpoint.config)
    config |= {
        key: _stripped(config[key]) for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)
    }
    return {CONFIG: config if quantization is None else {**config, "quantization_config": dict(quantization)}}


def _stripped(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in ("quantization_config", "compression_config")}


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _require_device(name: str) -> None:
    """Refuse a device that this torch does not have, before any work."""
    try:
        usable = torch.device(name).type != "meta" and torch.empty(1, device=name).numel() == 1
    except (RuntimeError, AssertionError, NotImplementedError):  # torch has no class of its own for this
        usable = False
    if not usable:
        raise UsageError("--device", got=repr(name), wanted="a device that this torch can use, such as cpu or cuda")


def _require_distinct(jobs: Sequence[stream.Job]) -> None:
    """Two jobs that make the same tensor name would overwrite each other."""
    seen: dict[str, str] = {}
    for job in jobs:
        for name in job.predicted:
            if name in seen:
                raise CorruptError(
                    name, got=f"a tensor that {seen[name]} and {job.name} both make", wanted="one of that name",
                    todo="The checkpoint holds a packed and a plain form of one layer; remove one.",
                )  # fmt: skip
            seen[name] = job.name
