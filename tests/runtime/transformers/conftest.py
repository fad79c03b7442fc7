"""No network; every test starts and ends with a Transformers that has not been told of any claim."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from transformers import AutoModelForCausalLM

import w4plugin
from tests.runtime.transformers.models import TINY
from w4plugin.runtime.transformers import register


@pytest.fixture(autouse=True)
def _no_claim() -> Iterator[None]:
    register("never")
    yield
    register("never")


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, dequantised."""
    out = tmp_path_factory.mktemp("plain") / "model"
    w4plugin.dequantize(TINY, out, dtype="float32")
    return out


@pytest.fixture(scope="session")
def plain_model(plain_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(plain_folder, dtype=torch.float32)
