"""Whole models that other projects' tools quantised, where they are at hand: greedy tokens and perplexity.

They are looked for in W4PLUGIN_CHECKPOINTS (by default ../shared/checkpoints beside the project); the tiny one that
ships with the tests goes through the same in test_loading.py and test_use.py.
"""

from __future__ import annotations

import os
import pydoc_data.topics
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import w4plugin
import w4plugin.runtime.transformers as w4
from tests.runtime.transformers.test_use import perplexity

FOLDER = Path(os.environ.get("W4PLUGIN_CHECKPOINTS") or Path(__file__).parents[4] / "shared" / "checkpoints")
FOUND = sorted(p for p in FOLDER.glob("smol/*") if p.is_dir())
PROMPT = "The capital of France is Paris. The capital of Italy is"


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOUND, ids=lambda p: p.name)
def test_it_says_what_its_plain_form_says(folder: Path, tmp_path: Path) -> None:
    """Sixteen greedy tokens, and the perplexity of a text that ships with Python to 1e-3."""
    w4plugin.dequantize(folder, tmp_path / "plain", dtype="float32")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    packed = w4.from_pretrained(folder, dtype=torch.float32)
    assert any(isinstance(m, w4.W4Linear) for m in packed.modules())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    said = packed.generate(**inputs, **options)
    assert torch.equal(said, plain.generate(**inputs, **options))
    assert "Rome" in tokenizer.decode(said[0])
    text = pydoc_data.topics.topics["exceptions"] + pydoc_data.topics.topics["execmodel"]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :512]
    assert ids.shape[1] == 512
    assert abs(perplexity(packed, ids) / perplexity(plain, ids) - 1) < 1e-3
