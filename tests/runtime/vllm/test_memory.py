"""Loading holds the packed checkpoint and one layer, never a second copy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.vllm.layers import save

ROOT = Path(__file__).parents[3]
K, N, GROUP = 2048, 2048, 128

LOAD = """
import json, sys
from pathlib import Path
import torch
from w4plugin.checkpoint.checkpoint import Checkpoint
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from tests.runtime.vllm.layers import opened, rank_of

LAYERS, K, N = map(int, sys.argv[2:])

def status(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) * 1024

folder = Path(sys.argv[1])
file = Checkpoint.open(folder)  # reads into memory of its own: what vLLM maps would count as held
with rank_of(0, 1):
    config = opened(folder, {"gate_up_proj": ["gate_proj", "up_proj"]})
    layers = [
        MergedColumnParallelLinear(K, [N, N], bias=False, quant_config=config, prefix=f"model.layers.{i}.gate_up_proj",
                                   params_dtype=torch.float32)
        for i in range(LAYERS)
    ]
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again here
    before = status("VmRSS")
    for i, layer in enumerate(layers):
        for shard, name in enumerate(("gate_proj", "up_proj")):
            for suffix in ("qweight", "qzeros", "scales"):
                tensor = file.tensor(f"model.layers.{i}.{name}.{suffix}")
                param = dict(layer.named_parameters())[suffix]
                param.weight_loader(param, tensor, shard)
                del tensor
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    print(json.dumps({"processed": status("VmHWM") - before, "held": status("VmRSS") - before}))
"""


def peak(folder: Path, layers: int, sym: bool) -> tuple[float, float]:
    """Highest and final growth while so many layers are loaded, each in layers' worth of packed bytes."""
    words = torch.randint(-(2**31), 2**31 - 1, (K // 8, N), dtype=torch.int32)
    zeros = torch.full((K // GROUP, N // 8), 0x77777777 if sym else 0x44444444, dtype=torch.int32)
    scales = torch.full((K // GROUP, N), 1e-2, dtype=torch.float16)
    names = [f"model.layers.{i}.{name}" for i in range(layers) for name in ("gate_proj", "up_proj")]
    modules = {n: {"qweight": words.clone(), "qzeros": zeros.clone(), "scales": scales.clone()} for n in names}
    quant = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": sym, "desc_act": False}
    save(folder, modules, quant)
    layer = sum(t.numel() * t.element_size() for t in modules[names[0]].values()) * 2
    return measured(LOAD, folder, (layers, K, N), layer)


def measured(program: str, folder: Path, sizes: tuple[int, ...], layer: float) -> tuple[float, float]:
    """What a program of its own says, in layers of so many bytes."""
    ran = subprocess.run(
        [sys.executable, "-c", program, folder, *map(str, sizes)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        # freed memory goes back at once, so that what is counted is what is held
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    return found["processed"] / layer, found["held"] / layer


LOAD_EXPERTS = """
import json, sys
from pathlib import Path
import torch
from w4plugin.checkpoint.checkpoint import Checkpoint
from tests.runtime.vllm.experts import Sizes, finish, make, rank
from tests.runtime.vllm.layers import opened

LAYERS, H, I, E = map(int, sys.argv[2:])

def status(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) * 1024

folder = Path(sys.argv[1])
file = Checkpoint.open(folder)
with rank(0, 1):
    config = opened(folder)
    words = ("gate_proj", "up_proj", "down_proj")
    runners = [make(config, Sizes(E, H, I), 1, words, at=f"model.layers.{i}.mlp.experts") for i in range(LAYERS)]
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    for i, runner in enumerate(runners):
        suffixes = ("qweight", "qzeros", "scales")
        names = [f"{e}.{word}.{suffix}" for e in range(E) for word in words for suffix in suffixes]
        list(runner.load_weights((name, file.tensor(f"model.layers.{i}.mlp.experts.{name}")) for name in names))
    for runner in runners:
        finish(runner)
    print(json.dumps({"processed": status("VmHWM") - before, "held": status("VmRSS") - before}))
"""

H, I, E = 1024, 512, 4


def peak_of_experts(folder: Path, layers: int) -> tuple[float, float]:
    """As :func:`peak`, of layers of experts."""
    modules = {}
    for i, e in [(i, e) for i in range(layers) for e in range(E)]:
        for word, (k, n) in {"gate_proj": (H, I), "up_proj": (H, I), "down_proj": (I, H)}.items():
            modules[f"model.layers.{i}.mlp.experts.{e}.{word}"] = {
                "qweight": torch.randint(-(2**31), 2**31 - 1, (k // 8, n), dtype=torch.int32),
                "qzeros": torch.full((k // GROUP, n // 8), 0x44444444, dtype=torch.int32),
                "scales": torch.full((k // GROUP, n), 1e-2, dtype=torch.float16),
            }
    quant = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
    layer = sum(t.numel() * t.element_size() for m in modules.values() for t in m.values()) / layers
    return measured(LOAD_EXPERTS, save(folder, modules, quant), (layers, H, I, E), layer)


def test_peak_of_experts_grows_by_what_is_held(tmp_path: Path) -> None:
    """A layer's sources go as it is stacked; with zero points unpacked to bytes."""
    few, few_held = peak_of_experts(tmp_path / "few", 4)
    many, many_held = peak_of_experts(tmp_path / "many", 20)
    assert many_held - few_held <= 16 * 1.2
    assert many - few <= 16 * 1.2


@pytest.mark.parametrize("sym", [True, False])
def test_peak_grows_by_what_is_held(sym: bool, tmp_path: Path) -> None:
    """Sixteen more layers cost sixteen more, and a fifth of that for scales that the CPU's kernel widens."""
    few, few_held = peak(tmp_path / "few", 4, sym)
    many, many_held = peak(tmp_path / "many", 20, sym)
    assert many_held - few_held <= 16 * 1.2
    assert many - few <= 16 * 1.2
