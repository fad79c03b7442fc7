"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_repack_and_verify(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "repack_and_verify.py", EXAMPLES / "llama-gptq-actorder", tmp_path / "out"],
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
        check=True,
    )
    assert "verified: True (14 modules, 7 other tensors)" in done.stdout
    assert "7 weights are bit for bit what AutoGPTQ computes" in done.stdout
    assert (tmp_path / "out" / "packed" / "README.source.md").read_text().startswith("---\nlicense: apache-2.0")
