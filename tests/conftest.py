"""What every test process needs before it imports anything of ours."""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    # Triton decides at import whether its own library functions can be interpreted; tests/kernels needs them to be. The
    # variable itself is set only there, since with it the portable backend offers to serve the CPU.
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.language")

    del os.environ["TRITON_INTERPRET"]


def pytest_addoption(parser: pytest.Parser) -> None:
    if importlib.util.find_spec("pytest_timeout") is None:  # a GPU machine's Python may hold pytest alone
        parser.addini("timeout", "seconds a test may take; without pytest-timeout nobody watches")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """W4PLUGIN_SHARD=i/n keeps the i-th of every n tests: kernels compile for seconds each, on one core a process."""
    shard = os.environ.get("W4PLUGIN_SHARD")
    if shard:
        index, count = map(int, shard.split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % count != index])
        items[:] = items[index::count]
