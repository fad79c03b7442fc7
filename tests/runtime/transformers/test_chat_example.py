"""examples/chat_cpu.py answers, and answers again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.runtime.transformers.models import TINY

EXAMPLE = Path(__file__).parents[3] / "examples" / "chat_cpu.py"


def test_two_turns() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(TINY)],
        input="the cat\n\n \nthe dog\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    _, first, *empty, second, end = done.stdout.split("> ")
    assert first.strip()
    assert second.strip()
    assert [line.strip() for line in (*empty, end)] == ["", "", ""], "a line of nothing is asked for again"


def test_no_such_model() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "/nowhere"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("/nowhere: got nothing there; wanted a folder")
    assert "Traceback" not in done.stderr


def test_usage() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "MODEL is a folder" in done.stderr
