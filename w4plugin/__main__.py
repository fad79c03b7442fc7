"""``python -m w4plugin``."""

from w4plugin.cli import main

main(prog_name="w4plugin")
