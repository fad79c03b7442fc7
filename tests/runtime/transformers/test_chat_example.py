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
        input="the cat\nthe dog\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    answers = done.stdout.split("> ")
    assert len(answers) == 4
    assert all(answer.strip() for answer in answers[1:3])


def test_usage() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "MODEL is a folder" in done.stderr
