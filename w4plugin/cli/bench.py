"""The verb bench: how fast this device multiplies, and where its roofline says the limit is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from w4plugin.cli import options
from w4plugin.errors import UnsupportedError, UsageError

MODELS = ("llama-3-8b", "llama-3-70b", "qwen2.5-7b", "qwen2.5-32b", "smollm2-135m")


def _shapes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[tuple[int, int], ...]:
    try:
        found = tuple((int(k), int(n)) for k, n in (shape.split("x") for shape in (value or "").split(",") if shape))
    except ValueError as fault:
        raise click.BadParameter("wanted KxN,KxN such as 4096x4096,4096x28672") from fault
    if any(k < 16 or k % 16 or n < 1 for k, n in found):
        raise click.BadParameter("K must be a multiple of 16 and N at least 1")
    return found


def _rows(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        found = tuple(int(m) for m in (value or "").split(",") if m)
    except ValueError as fault:
        raise click.BadParameter("wanted numbers such as 1,16,256") from fault
    if any(m < 1 for m in found):
        raise click.BadParameter("rows start at 1")
    return found


@click.command()
@click.option("--model", type=click.Choice(MODELS), help="Layers of this model.  [default: llama-3-8b; on a CPU smol]")
@click.option("--shapes", callback=_shapes, metavar="KxN,...", help="Layers of these sizes instead.")
@click.option("--m", "rows", callback=_rows, metavar="M,...", help="Rows of activations.  [default: 1 to 4096]")
@click.option("--dtype", type=click.Choice(["fp16", "bf16", "fp32"]), help="Of activations.  [default: fp16, CPU bf16]")
@click.option("--group-size", type=click.IntRange(16), default=128, show_default=True, help="Rows that share a scale.")
@click.option("--asym", is_flag=True, help="With zero points.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Where.  [default: cuda where there is one]")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the JSON and the picture.")
@options.output
def bench(
    model: str | None,
    shapes: tuple[tuple[int, int], ...],
    rows: tuple[int, ...],
    dtype: str | None,
    group_size: int,
    asym: bool,
    device: str | None,
    out: Path | None,
    mode: str,
    quiet: bool,
    verbose: bool,
) -> None:
    """Measure every backend of this device against plain weights, over the roofline.

    Times are medians with weights that come from memory. With --out the result is written there as JSON, and as a
    picture where matplotlib is installed.
    """
    import torch

    from w4plugin.bench import report, run

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("bench: --device cuda", got="no CUDA device", wanted="one, or --device cpu")
    if model and shapes:
        raise UsageError("bench", got="--model and --shapes", wanted="one of them")
    small = device == "cpu"
    dtype = dtype or ("bf16" if small else "fp16")
    if dtype == "fp32" and not small:
        raise UsageError("bench: --dtype", got="fp32 on a GPU", wanted="fp16 | bf16")
    plan = run.Plan(
        shapes or tuple(run.MODELS[model or ("smollm2-135m" if small else "llama-3-8b")]),
        rows or ((1, 4, 16, 64, 256) if small else tuple(m for m in run.MS if m <= 4096)),
        dtype,
        group_size,
        asym,
        device,
    )

    def tell(done: list[run.Row]) -> None:
        if mode != "quiet" and not quiet:
            click.echo(f"measured {done[0]['K']} x {done[0]['N']}", err=True)

    facts = run.facts(device, dtype)
    measured = run.measure(plan, run.kernels_here(plan), tell)
    failed = [row for row in measured if "failed" in row]
    made = report.result(facts, measured, dtype, asym, "w4plugin " + " ".join(sys.argv[1:]))
    files: list[str] = []
    if out is not None:
        path = out / f"{report.name(facts, dtype, 'asym' if asym else 'sym')}.json"
        files.append(str(report.write(made, path)))
        if report.can_draw():
            files.append(str(report.picture([made], out)))
        elif mode != "quiet" and not quiet:
            click.echo("no picture: matplotlib is not installed", err=True)
    result: dict[str, Any] = {
        "command": "bench", "result": made, "failed": [_told(row) for row in failed], "files": files,
    }  # fmt: skip
    options.show(result, mode, quiet=quiet, verbose=verbose)


def _told(row: dict[str, Any]) -> str:
    return f"{row['peer']}, {row['K']} x {row['N']}, M = {row['M']}: {row['failed']}"
