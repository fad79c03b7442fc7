"""Verbs that write a checkpoint: repack, dequantize and quantize."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from w4plugin.cli import allocator, options
from w4plugin.cli.progress import bar

if TYPE_CHECKING:
    from w4plugin.checkpoint.checkpoint import Checkpoint
    from w4plugin.checkpoint.other_widths import Choice
    from w4plugin.checkpoint.output import Request

OUT = click.argument("out", type=click.Path(path_type=Path))


@click.command()
@click.argument("model")
@OUT
@options.target
@click.option(
    "--other-widths",
    type=click.Choice(["refuse", "keep", "dequantize"]),
    default="refuse",
    show_default=True,
    help="Layers of 2, 3 or 8 bits: refuse MODEL, keep them untouched, or make them plain.",
)
@options.patterns
@options.writing
@options.source
@options.output
def repack(
    model: str, out: Path, to: str, other_widths: str, include: tuple[str, ...], exclude: tuple[str, ...], **rest: Any
) -> None:
    """Write MODEL in another layout to OUT without changing a weight.

    Modules that --exclude matches, or --include does not, become plain tensors. OUT must not exist; it appears whole or
    not at all, and an interrupted run resumes.
    """

    def work(checkpoint: Checkpoint, request: Request) -> dict[str, Any]:
        from w4plugin.checkpoint.repack import repack as run

        choice = cast("Choice", other_widths)
        return run(checkpoint, request, to=to, other_widths=choice, include=include, exclude=exclude)

    _run("repacking", model, out, rest, work)


@click.command()
@click.argument("model")
@OUT
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    help="Of every floating tensor.  [default: weights as their scales, the rest as it is]",
)
@options.writing
@options.source
@options.output
def dequantize(model: str, out: Path, dtype: str | None, **rest: Any) -> None:
    """Write MODEL as plain tensors to OUT: exactly what its codes stand for."""

    def work(checkpoint: Checkpoint, request: Request) -> dict[str, Any]:
        from w4plugin.checkpoint.dequantize import dequantize as run

        return run(checkpoint, request, dtype=dtype)

    _run("dequantising", model, out, rest, work)


@click.command()
@click.argument("model")
@OUT
@options.target
@click.option("--group-size", type=int, default=128, show_default=True, help="Rows that share a scale; -1 for all.")
@click.option("--sym/--asym", default=False, show_default=True, help="Fix every zero point at 8, or choose it.")
@options.patterns
@options.writing
@options.source
@options.output
def quantize(
    model: str,
    out: Path,
    to: str,
    group_size: int,
    sym: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    **rest: Any,
) -> None:
    """Quantise the plain checkpoint MODEL to 4 bits, round to nearest, into OUT.

    The Linear layers of the decoder; heads, embeddings, routers and vision towers stay plain unless --include names
    them. There is no calibration: GPTQModel or llm-compressor make better checkpoints.
    """

    def work(checkpoint: Checkpoint, request: Request) -> dict[str, Any]:
        from w4plugin.checkpoint.quantize import quantize as run

        return run(checkpoint, request, to=to, group_size=group_size, sym=sym, include=include, exclude=exclude)

    _run("quantising", model, out, rest, work)


def _run(
    doing: str, model: str, out: Path, rest: dict[str, Any], work: Callable[[Checkpoint, Request], dict[str, Any]]
) -> None:
    """Open, write, show, and upload where asked."""
    from w4plugin.checkpoint import upload
    from w4plugin.checkpoint.output import Request
    from w4plugin.checkpoint.staging import require_free

    allocator.keep_freed_pages()
    mode, quiet = rest["mode"], rest["quiet"]
    require_free(out, force=rest["force"])  # before a download of a hundred gigabytes
    repo = rest["push_to_hub"]
    if repo and not rest["dry_run"]:
        upload.require_repo(repo, private=rest["private"], token=rest["token"])
    checkpoint = options.open_model(model, rest)
    with bar(doing, quiet=quiet or mode == "quiet") as progress:
        request = Request(
            out=out,
            force=rest["force"],
            dry_run=rest["dry_run"],
            max_shard_size=rest["max_shard_size"],
            workers=rest["workers"],
            device=rest["device"],
            begin=progress.begin,
            progress=progress.advance,
        )
        result = work(checkpoint, request)
    if repo and not rest["dry_run"]:
        result["uploaded"] = upload.push(out, repo, token=rest["token"])
    options.show(result, mode, quiet=quiet, verbose=rest["verbose"])
