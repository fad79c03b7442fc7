"""Layers packed by the producers' own code: python tests/data/upstream/make.py CLONES [STEP ...]

CLONES holds git clones named OWNER+NAME/repo (bare or not). The packing modules are read from the commits below and
run as they are, with stand-ins for CUDA extensions and packages that packing does not use. Each output file holds the
packed tensors, ``want.q`` [K, N], ``want.z`` [G, N] and ``want.s`` [G, N] (and ``want.g`` [K] with act-order), which
were chosen before, and the config that such a checkpoint carries, as metadata.

Old versions of compressed-tensors come from the package index instead. For each of 0.9.1 and 0.18.0:

    pip install --no-deps --target /tmp/ct compressed-tensors==0.9.1
    PYTHONPATH=/tmp/ct:$(echo .venv-truth/lib/python3*/site-packages) \
        .venv/bin/python tests/data/upstream/make.py . compressed_tensors

Weights are ``(q - z) * s`` with scales that are powers of two, so the packers' own rounding changes nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

COMMITS = {
    "IST-DASLab+marlin": "2f6d7c1",
    "AutoGPTQ+AutoGPTQ": "9f7d370",
    "casper-hansen+AutoAWQ": "88e4c76",
    "mit-han-lab+llm-awq": "d6e797a",
    "qwopqwop200+GPTQ-for-LLaMa": "e000bdb",
    "intel+auto-round": "b9f3d0079",
    "ModelCloud+GPTQModel": "f4c327a17",
}

CLONES = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
HERE = Path(__file__).parent


def source(repo: str, path: str) -> str:
    command = ["git", "-C", str(CLONES / repo / "repo"), "show", f"{COMMITS[repo]}:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def module(repo: str, path: str, keep: Callable[[str], str] = lambda text: text) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "upstream"}
    exec(compile(keep(source(repo, path)), path, "exec"), scope)
    return scope


def stand_in(name: str, **values: Any) -> None:
    made = types.ModuleType(name)
    made.__dict__.update(values)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            stand_in(parent)
        setattr(sys.modules[parent], child, made)


def weight(K: int, N: int, size: int, *, sym: bool, seed: int, bits: int = 4, lowest: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    G = -(-K // size)
    top = 1 << bits
    q = torch.randint(0, top, (K, N), generator=g)
    z = torch.full((G, N), top // 2) if sym else torch.randint(lowest, top, (G, N), generator=g)
    s = 2.0 ** torch.randint(-9, -4, (G, N), generator=g)
    rows = torch.arange(K) // size
    return {"q": q, "z": z, "s": s, "w": (q - z[rows]) * s[rows]}


def linear(t: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> nn.Linear:
    K, N = t["w"].shape
    layer = nn.Linear(K, N, bias=False)
    layer.weight.data = t["w"].T.contiguous().to(dtype)
    return layer


def save(name: str, tensors: dict[str, Tensor], t: dict[str, Tensor], config: dict[str, Any]) -> None:
    want = {"want.q": t["q"].to(torch.uint8), "want.z": t["z"].to(torch.uint8), "want.s": t["s"]}
    want |= {"want.g": t["g"]} if "g" in t else {}
    packed = {k: v.detach().contiguous() for k, v in tensors.items() if v is not None}
    save_file({**packed, **want}, HERE / f"{name}.safetensors", {"config": json.dumps(config)})


def buffers(layer: nn.Module) -> dict[str, Tensor]:
    return dict(layer.named_buffers())


def marlin() -> None:
    stand_in("marlin_cuda")
    layer = module("IST-DASLab+marlin", "marlin/__init__.py")["Layer"]
    for name, K, size in (("marlin_g128", 256, 128), ("marlin_channel", 128, 128)):
        t = weight(K, 256, size, sym=True, seed=1)
        made = layer(K, 256, 128 if size < K else -1)
        made.pack(linear(t, torch.half), t["s"].T.contiguous().half())
        config = {"quant_method": "gptq", "bits": 4, "group_size": made.groupsize if size < K else -1, "sym": True}
        save(name, buffers(made), t, {**config, "is_marlin_format": True, "desc_act": False})


def autoawq() -> None:
    stand_in("awq.utils.module", try_import=lambda name: (None, ""))
    scheme = {"quant_method": "awq", "bits": 4, "zero_point": True}

    def make(name: str, file: str, cls: str, version: str, K: int, N: int, size: int) -> None:
        sym = version == "marlin"
        t = weight(K, N, size, sym=sym, seed=K + size, lowest=0)
        found = module("casper-hansen+AutoAWQ", f"awq/modules/linear/{file}.py")[cls]
        z = None if sym else t["z"].T.float()
        layer = found.from_linear(linear(t, torch.half), 4, size, scales=t["s"].T.contiguous().half(), zeros=z)
        save(name, buffers(layer), t, {**scheme, "version": version, "group_size": size, "zero_point": not sym})

    make("autoawq_marlin_g128", "marlin", "WQLinear_Marlin", "marlin", 256, 256, 128)
    for K, N, size in ((1152, 32, 128), (256, 32, 32), (320, 16, 64)):
        make(f"autoawq_gemv_g{size}", "gemv", "WQLinear_GEMV", "gemv", K, N, size)
    for K, N, size in ((1152, 32, 128), (256, 32, 32), (320, 16, 64)):
        make(f"autoawq_gemv_fast_g{size}", "gemv_fast", "WQLinear_GEMVFast", "gemv_fast", K, N, size)


def llm_awq() -> None:
    stand_in("awq_inference_engine")
    layer = module("mit-han-lab+llm-awq", "awq/quantize/qmodule.py")["WQLinear"]
    t = weight(1152, 32, 128, sym=False, seed=5, lowest=0)
    # scales with all eight significant bits, so that bfloat16 really rounds their products
    t["s"] = torch.empty(9, 32).uniform_(0.002, 0.05, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    rows = torch.arange(1152) // 128
    t["w"] = (t["q"] - t["z"][rows]) * t["s"][rows].double()
    made = linear(t, torch.float64)
    scales = t["s"].T.contiguous()
    packed = layer.from_linear(made, 4, 128, scales=scales.double(), zeros=t["z"].T.double())
    # the packer keeps the dtype of the scales it is given: the stored ones are bfloat16
    halves = layer.from_linear(linear(t, torch.bfloat16), 4, 128, scales=scales, zeros=t["z"].T.bfloat16())
    tensors = {**buffers(halves), "qweight": packed.qweight}
    save(
        "llm_awq_v2_bf16_g128", tensors, t, {"quant_method": "awq", "backend": "llm-awq", "bits": 4, "group_size": 128}
    )


def gptq_for_llama() -> None:
    stand_in("quant_cuda")
    layer = module("qwopqwop200+GPTQ-for-LLaMa", "quant.py")["QuantLinear"]
    t = weight(256, 32, 256, sym=False, seed=9)
    made = layer(4, 256, 32)
    packed = linear(t)
    packed.bias = nn.Parameter(torch.arange(32.0))
    made.pack(packed, t["s"].T.contiguous(), t["z"].T.float())
    save("gptq_v0", buffers(made), t, {})


def autogptq() -> None:
    stand_in("transformers.pytorch_utils", Conv1D=type("Conv1D", (), {}))
    layer = module("AutoGPTQ+AutoGPTQ", "auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py")["QuantLinear"]

    def make(name: str, t: dict[str, Tensor], bits: int, size: int, sym: bool) -> None:
        K, N = t["q"].shape
        made = layer(bits, size, K, N, False)
        zeros = t["z"].T.float().clone()
        made.pack(linear(t), t["s"].T.contiguous(), zeros, None)
        config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "desc_act": False}
        save(name, buffers(made), t, config)

    lost = weight(64, 64, 32, sym=False, seed=11)
    for row, column in ((0, 2), (1, 17), (1, 15), (0, 60)):
        lost["z"][row, column] = 0
    rows = torch.arange(64) // 32
    lost["w"] = (lost["q"] - lost["z"][rows]) * lost["s"][rows]
    make("autogptq_underflow", lost, 4, 32, False)
    for bits in (2, 3, 8):
        make(f"autogptq_{bits}bit", weight(64, 32, 32, sym=False, seed=bits, bits=bits), bits, 32, False)
    make("autogptq_n48_sym", weight(64, 48, 32, sym=True, seed=13), 4, 32, True)
    make("autogptq_n48_asym", weight(64, 48, 32, sym=False, seed=14), 4, 32, False)
    make("autogptq_k80", weight(80, 32, 16, sym=True, seed=15), 4, 16, True)


def auto_round() -> None:
    stand_in("transformers.pytorch_utils", Conv1D=type("Conv1D", (), {}))
    stand_in("auto_round.utils", get_packing_device=lambda device: "cpu")
    folder = "auto_round_extension/torch/"
    torch_scope = module("intel+auto-round", folder + "qlinear_torch.py")
    stand_in("auto_round_extension.torch.qlinear_torch", get_wf_3bits_tensor=torch_scope["get_wf_3bits_tensor"])
    zp_scope = module("intel+auto-round", folder + "qlinear_torch_zp.py")
    for scope, packing in ((torch_scope, "auto_round"), (zp_scope, "auto_round:auto_gptq")):
        t = weight(64, 32, 32, sym=False, seed=17, lowest=0)
        assert int((t["z"] == 0).sum())
        made = scope["QuantLinear"](4, 32, 64, 32, False)
        made.device = "cpu"  # set by the exporter before it packs
        made.pack(linear(t), t["s"].T.contiguous(), t["z"].T.int().contiguous(), None)
        config = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "sym": False}
        save(packing.replace(":", "_") + "_asym", buffers(made), t, {**config, "data_type": "int"})


def compressed_tensors() -> None:
    """0.9.1 left zero points unpacked; 0.18.0 was the last to know act-order."""
    from compressed_tensors import __version__
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    old, order = __version__ == "0.9.1", "group"
    t = weight(128, 24, 32, sym=False, seed=23, lowest=0)
    t["g"] = torch.randperm(128, generator=torch.Generator().manual_seed(24)) // 32
    if old:
        t["g"], order = torch.arange(128) // 32, None
    t["w"] = (t["q"] - t["z"][t["g"]]) * t["s"][t["g"]]
    settings = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    args = QuantizationArgs(**settings, actorder=order)
    state = {"weight_scale": t["s"].T.contiguous().half(), "weight_zero_point": (t["z"].T - 8).to(torch.int8)}
    if old:
        from compressed_tensors.compressors.quantized_compressors import pack_quantized

        packer = pack_quantized.PackedQuantizationCompressor()
        made = packer.compress_weight(t["w"].T, state["weight_scale"], args, state["weight_zero_point"])
        made = {**made, **state}  # which its caller does
    else:
        from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

        state |= {"weight": t["w"].T.contiguous(), "weight_g_idx": t["g"].int()}
        made = PackedQuantizationCompressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))
    group = {"targets": ["Linear"], "weights": {**settings, "actorder": order}, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    save(f"compressed_tensors_{__version__.replace('.', '_')}", made, t, config)


def gptqmodel() -> None:
    import ast
    import math
    import textwrap

    planar = module("ModelCloud+GPTQModel", "gptqmodel/utils/planar_packing.py")
    text = source("ModelCloud+GPTQModel", "gptqmodel/nn_modules/qlinear/__init__.py")
    (found,) = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == "pack_original"]
    scope: dict[str, Any] = {
        **planar,
        "nn": nn,
        "t": torch,
        "np": np,
        "math": math,
        "transformers": sys.modules["transformers"],
        "_ConvNd": nn.modules.conv._ConvNd,
        "THREADPOOLCTL": types.SimpleNamespace(threadpool_limits=lambda n: nullcontext()),
    }
    exec(textwrap.dedent(ast.get_source_segment(text, found) or ""), scope)

    def make(name: str, bits: int, word: str, *, sym: bool, version: str, is_planar: bool = False) -> None:
        t = weight(64, 32, 32, sym=sym, seed=19 + bits, bits=bits)
        width = int(word.removeprefix("int"))
        made = nn.Module()
        made.__dict__.update(bits=bits, maxq=2**bits - 1, planar=is_planar, pack_dtype=getattr(torch, word))
        made.__dict__.update(pack_dtype_bits=width, pack_factor=width // bits, pack_np_dtype=getattr(np, word))
        made.pack_np_math_dtype = getattr(np, f"uint{width}")
        scope["pack_original"](made, linear(t), t["s"].T.contiguous(), t["z"].T.contiguous(), torch.arange(64) // 32)
        config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": sym, "pack_dtype": word}
        config |= {"checkpoint_format": version, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
        save(name, {k: v for k, v in buffers(made).items() if k != "bias"}, t, config)

    for word in ("int8", "int16", "int64"):
        make(f"gptqmodel_{word}", 4, word, sym=False, version="gptq_v2")
    for bits in (3, 5, 6, 7):
        make(f"gptqmodel_planar_{bits}bit", bits, "int32", sym=False, version="gptq_p", is_planar=True)


FROM_CLONES = (marlin, autoawq, llm_awq, gptq_for_llama, autogptq, auto_round, gptqmodel)

if __name__ == "__main__":
    chosen = sys.argv[2:]
    for step in [s for s in (*FROM_CLONES, compressed_tensors) if s.__name__ in chosen] if chosen else FROM_CLONES:
        step()
