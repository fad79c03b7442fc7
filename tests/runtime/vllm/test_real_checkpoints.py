"""Whole models that other projects' tools quantised, where they are at hand.

Those of a few layers are drawn in the other tests; here two mixtures of experts of tests/data and the real ones in
W4PLUGIN_CHECKPOINTS (by default in ../shared/checkpoints beside the project) generate what the weights mean by
:mod:`w4plugin.reference`, in float32.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.vllm.engines import compare, engine, greedy, method, prompts
from w4plugin import reference
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.formats.format import Module

FOLDER = Path(os.environ.get("W4PLUGIN_CHECKPOINTS") or Path(__file__).parents[4] / "shared" / "checkpoints")
MIXTURES = Path(__file__).parents[2] / "data" / "models"
HELD = {p.name: p for p in MIXTURES.iterdir() if p.name.startswith(("mixtral", "qwen2moe"))}
FAMILIES = ("llama", "qwen2_", "smol_", "mixtral", "qwen2moe")
FOUND = {p.name: p for p in FOLDER.glob("*/*") if p.is_dir() and p.name.startswith(FAMILIES)}
FOUND = {name: p for name, p in FOUND.items() if p.parent.name in ("tiny", "smol")} | HELD

SERVED = 5e-3
"""Of log-probabilities: thirty layers of float32 roundings."""


def plain_copy(folder: Path, out: Path) -> Path:
    """The same model with float32 weights, by the formulas of the format census."""
    checkpoint = Checkpoint.open(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    modules = [*checkpoint.census.modules, *checkpoint.census.other_width]
    owned = {name for module in modules for name in module.tensors.values()}
    plain = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items() if n not in owned}
    for module in modules:
        found = {suffix: tensors[name] for suffix, name in module.tensors.items()}
        bias = found.pop("bias", None)
        plain[f"{module.name}.weight"] = torch.from_numpy(weight(module, found).T.copy()).float()
        if bias is not None and bool(bias.any()):
            plain[f"{module.name}.bias"] = bias.float()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    if config["model_type"] == "mixtral":
        plain = {as_vllm_reads_it(name): tensor for name, tensor in plain.items()}
    out.mkdir()
    save_file(plain, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float32", "torch_dtype": "float32"}))
    return out


def weight(module: Module, found: dict[str, torch.Tensor]) -> np.ndarray:
    """``[K, N]``."""
    arrays = {suffix: t.float().numpy() if t.dtype == torch.bfloat16 else t.numpy() for suffix, t in found.items()}
    if module.bits == 8:
        words = arrays["qweight"].view(np.uint8).reshape(*arrays["qweight"].shape, 4)
        q = words.transpose(0, 2, 1).reshape(-1, words.shape[1]).astype(np.float64)
        assert set(arrays["qzeros"].view(np.uint8).ravel()) <= {127, 128}  # symmetric, in either convention
        return (q - 128) * arrays["scales"].astype(np.float64)[arrays["g_idx"]]
    symmetric = "qzeros" in arrays and module.format in ("gptq", "auto-round")
    symmetric = symmetric and set(arrays["qzeros"].view(np.uint32).ravel()) == {0x77777777}
    exact = reference.dequantize(module.format, arrays, module.group_size, zeros="minus-one" if symmetric else None)
    return (exact.q - exact.z[exact.g]) * exact.s.astype(np.float64)[exact.g]


def as_vllm_reads_it(name: str) -> str:
    """vLLM's Mixtral knows its experts by their first names, not by those of Transformers 5."""
    first = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    parts = name.replace(".mlp.", ".block_sparse_moe.").split(".")
    return ".".join(first.get(part, part) for part in parts)


@pytest.mark.parametrize("folder", sorted(FOUND.values(), key=lambda p: p.name), ids=lambda p: p.name)
def test_real_checkpoint(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4PLUGIN_CLAIM", "all")
    plain = plain_copy(folder, tmp_path / "plain")
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    asked = prompts(vocab, count=2)
    with engine(folder, dtype="float32") as llm:
        assert method(llm) == "w4plugin"
        ours = greedy(llm, asked=asked)
    with engine(plain, dtype="float32") as llm:
        compare(ours, greedy(llm, asked=asked), SERVED)
