"""Verbs that only read: inspect and verify."""

from __future__ import annotations

from typing import Any

import click

from w4plugin.cli import options
from w4plugin.cli.progress import bar
from w4plugin.errors import MismatchError


@click.command()
@click.argument("model")
@click.option("--values", is_flag=True, help="Read the data too: what zero points and g_idx really are.")
@options.workers
@options.source
@options.output
def inspect(model: str, values: bool, workers: int | None, mode: str, quiet: bool, verbose: bool, **where: Any) -> None:
    """Say what MODEL holds, from its headers: seconds for any size, and no download of weights."""
    from w4plugin.checkpoint import summary

    checkpoint = options.open_model(model, where, headers_only=not values)
    with bar("reading", quiet=quiet or mode == "quiet") as progress:
        result = summary.inspect(
            checkpoint, values=values, workers=workers, begin=progress.begin, progress=progress.advance
        )
    options.show(result, mode, quiet=quiet, verbose=verbose)


@click.command()
@click.argument("model")
@click.argument("other", required=False)
@click.option("--other-revision", metavar="REV", help="Branch, tag or commit of OTHER on the hub.")
@options.workers
@options.source
@options.output
def verify(
    model: str,
    other: str | None,
    other_revision: str | None,
    workers: int | None,
    mode: str,
    quiet: bool,
    verbose: bool,
    **where: Any,
) -> None:
    """Prove that OTHER holds the same weights as MODEL; without OTHER, that MODEL is consistent.

    Ends with exit code 1, naming each tensor, when something differs.
    """
    from w4plugin.checkpoint.verify import verify as compare

    one = options.open_model(model, where)
    two = None if other is None else options.open_model(other, {**where, "revision": None}, other_revision)
    with bar("verifying", quiet=quiet or mode == "quiet") as progress:
        result = compare(one, two, workers=workers, begin=progress.begin, progress=progress.advance)
    options.show(result, mode, quiet=quiet, verbose=verbose)
    if not result["ok"]:
        click.get_current_context().exit(MismatchError.exit_code)
