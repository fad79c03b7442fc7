"""What a failing verb prints, and its exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import click

from w4plugin.errors import StorageError, W4Error

INTERRUPTED = 130
"""What shells give a program that Ctrl-C ended."""

BUG = 70
"""EX_SOFTWARE: not one of the promised codes, so that a bug of ours cannot pass for a mismatch."""


class Faults(click.Group):
    """A group whose commands end in one line and the exit code of the error's class, never in a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except W4Error as fault:
            _tell(ctx, fault)
        except BrokenPipeError:
            # the reader of our output has gone; Python would complain once more when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(StorageError.exit_code)
        except OSError as fault:
            name = str(fault.filename or "the operating system")
            _tell(ctx, StorageError(name, got=fault.strerror or str(fault), wanted="it to work"))
        except MemoryError:
            _tell(ctx, StorageError("memory", got="none left", wanted="a few of the largest layers' size"))
        except KeyboardInterrupt:
            click.echo("\ninterrupted; a verb that writes resumes when the same command is run again", err=True)
            ctx.exit(INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception:
            traceback.print_exc()
            click.echo("This is a bug of w4plugin: please report the lines above.", err=True)
            ctx.exit(BUG)
        return None


def _tell(ctx: click.Context, fault: W4Error) -> None:
    """One line on stderr; on stdout an object too, where the caller reads JSON."""
    from w4plugin.report import printable

    if ctx.meta.get("w4plugin.format") == "json":
        error = {
            "kind": fault.kind,
            "where": fault.where,
            "got": fault.got,
            "wanted": fault.wanted,
            "todo": fault.todo,
            "exit_code": fault.exit_code,
        }
        click.echo(json.dumps({"command": ctx.invoked_subcommand, "error": error}, indent=2))
    click.echo(printable(f"w4plugin: {fault.kind}: {fault}"), err=True)
    ctx.exit(fault.exit_code)
