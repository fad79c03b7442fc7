"""The command line inside the test's own process: fast, and with its output apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
from click.testing import CliRunner

import w4plugin
from w4plugin.cli import main

SCHEMA = json.loads((Path(w4plugin.__file__).parent / "report.schema.json").read_text())


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as the schema allows it."""
        content = json.loads(self.out)
        jsonschema.validate(content, SCHEMA)
        return content


@pytest.fixture
def w4() -> Callable[..., Done]:
    """``w4("inspect", path)`` runs a verb."""

    def run(*arguments: object) -> Done:
        result = CliRunner().invoke(main, [str(a) for a in arguments], prog_name="w4plugin")
        assert "Traceback" not in result.stderr, result.stderr
        return Done(result.exit_code, result.stdout, result.stderr)

    return run
