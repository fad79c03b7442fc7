"""The blocks of README and docs that need Transformers run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.blocks import ROOT, of_runner


@pytest.mark.parametrize("block", of_runner("transformers"), ids=lambda b: b.strip().splitlines()[-1][:40])
def test_it_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tensor([[" in done.stdout
