"""The same tests on the CPU, where Triton interprets small sizes, and on a GPU, where ``-m gpu`` selects them all."""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE == "cuda":
        for item in items:
            if item.path.parent.name == "kernels" and "cpu_only" not in item.keywords:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    return torch.device(DEVICE)
