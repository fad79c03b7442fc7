"""Options that several verbs share, spelled as peers spell them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from w4plugin.checkpoint.checkpoint import Checkpoint

Command = TypeVar("Command", bound=Callable[..., Any])


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _remember_format(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    ctx.meta["w4plugin.format"] = value  # an error is told in it too
    return value


source = _together(
    click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub repository."),
    click.option("--cache-dir", type=click.Path(path_type=Path), help="The hub's cache, if not in its usual place."),
    click.option("--token", help="For private and gated repositories.  [default: the one logged in]"),
    click.option("--allow-pickle", is_flag=True, help="Read tensors out of .bin and .pt files; runs no code."),
)

output = _together(
    click.option(
        "--format",
        "mode",
        type=click.Choice(["human", "json", "quiet"]),
        default="human",
        is_eager=True,
        callback=_remember_format,
        help="How to print the result.",
    ),
    click.option("-q", "--quiet", is_flag=True, help="No progress, and no result for people."),
    click.option("-v", "--verbose", is_flag=True, help="Every module and every note."),
)

workers = click.option(
    "--workers", type=click.IntRange(1, 64), help="Modules at the same time.  [default: one a core, at most 4]"
)

writing = _together(
    click.option("--max-shard-size", default="5GB", show_default=True, help="Largest file of weights."),
    workers,
    click.option("--device", default="cpu", show_default=True, help="Where to convert; the bytes are the same."),
    click.option("--dry-run", is_flag=True, help="Say what would be done; write nothing."),
    click.option("--force", is_flag=True, help="Replace OUT if w4plugin wrote it."),
    click.option("--push-to-hub", metavar="REPO", help="Upload the result to this hub repository."),
    click.option("--private", is_flag=True, help="Make that repository private."),
)


def complete_formats(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of formats that can be written."""
    from w4plugin.formats import registry

    return [n for n, f in registry.formats().items() if f.write is not None and n.startswith(incomplete)]


target = click.option(
    "--to",
    metavar="FORMAT",
    default="gptq_v2",
    show_default=True,
    shell_complete=complete_formats,
    help="Format to write; `w4plugin formats` lists them.",
)

patterns = _together(
    click.option("--include", multiple=True, metavar="PATTERN", help="Only modules of such names; repeatable."),
    click.option("--exclude", multiple=True, metavar="PATTERN", help="No modules of such names; repeatable."),
)


def open_model(
    model: str, options: dict[str, Any], revision: str | None = None, *, headers_only: bool = False
) -> Checkpoint:
    """The checkpoint that a command line names."""
    from w4plugin.checkpoint.checkpoint import Checkpoint

    return Checkpoint.open(
        model,
        revision=revision or options["revision"],
        cache_dir=options["cache_dir"],
        token=options["token"],
        allow_pickle=options["allow_pickle"],
        headers_only=headers_only,
    )


def show(result: dict[str, Any], mode: str, *, quiet: bool, verbose: bool) -> None:
    """Print a result on stdout."""
    from w4plugin import report

    if mode == "json":
        click.echo(report.as_json(result))
    elif mode == "human" and not quiet:
        click.echo(report.as_text(result, verbose=verbose))
