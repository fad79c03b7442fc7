"""The command line: one verb a command, results on stdout, progress on stderr, and an exit code that tells the class.

    0 done   1 two things differ that must be equal   2 usage   3 unsupported   4 corrupt or unsafe   5 disk or network

Nothing heavy is imported before a verb needs it, so that ``--help`` and completion answer at once.
"""

from __future__ import annotations

import click

from w4plugin import __version__
from w4plugin.cli import about, reading, writing
from w4plugin.cli.bench import bench
from w4plugin.cli.faults import Faults


@click.group(cls=Faults, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="w4plugin %(version)s")
def main() -> None:
    """Read, repack, verify and serve GPTQ and AWQ INT4 checkpoints.

    MODEL is a folder, or a hub id such as org/name.

    Exit codes: 0 done, 1 mismatch, 2 usage, 3 unsupported, 4 corrupt or unsafe input, 5 disk or network.
    """


for command in (
    reading.inspect,
    writing.repack,
    reading.verify,
    writing.dequantize,
    writing.quantize,
    about.formats,
    about.env,
    bench,
    about.completion,
):
    main.add_command(command)
