"""Model folders for tests: packed layers, plain tensors and the files that people's folders hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.formats import samples
from tests.formats.samples import Truth, truth

DATA = Path(__file__).parent.parent / "data"
REAL = sorted(p for p in (DATA / "checkpoints").iterdir() if p.is_dir())
MIXED = ("llama__gm_gptq_sym_g128_dynamic", "qwen2__gm_gptq_sym_g128_lmhead")
"""Real checkpoints that hold 8-bit layers."""

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "torch_dtype": "float16"}

SIDE_FILES = {
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": '{"chat_template": "x"}',
    "special_tokens_map.json": "{}",
    "generation_config.json": '{"eos_token_id": 2}',
    "chat_template.jinja": "{{ messages }}",
    "LICENSE": "free",
}


def name(layer: int, leaf: str = "mlp.down_proj") -> str:
    return f"model.layers.{layer}.{leaf}"


def plain(seed: int = 0) -> dict[str, Tensor]:
    """What every model has besides packed layers."""
    g = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(32, 64, generator=g).half(),
        "model.norm.weight": torch.randn(64, generator=g).bfloat16(),
        "model.layers.0.input_layernorm.weight": torch.randn(64, generator=g),
        "lm_head.weight": torch.randn(32, 64, generator=g).half(),
    }


def folder(
    path: Path,
    tensors: Mapping[str, Tensor],
    quantization: Mapping[str, Any] | None,
    *,
    shards: int = 1,
    files: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a model folder, in ``shards`` files with an index when there are several."""
    path.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"} if metadata is None else dict(metadata)
    tensors = {n: t.clone() for n, t in tensors.items()}  # the safetensors library refuses shared memory
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata)
    else:
        names = sorted(tensors)
        weight_map = {n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(names)}
        for file in sorted(set(weight_map.values())):
            save_file({n: tensors[n] for n in names if weight_map[n] == file}, path / file, metadata)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = dict(CONFIG) if quantization is None else {**CONFIG, "quantization_config": dict(quantization)}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    for file, content in (SIDE_FILES if files is None else files).items():
        (path / file).write_text(content)
    return path


def layers(packed: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by full name of layers by suffix."""
    return {f"{layer}.{suffix}": t for layer, tensors in packed.items() for suffix, t in tensors.items()}


def gptq(path: Path, count: int = 3, *, version: str = "gptq", order: str = "act", **more: Any) -> Path:
    """An asymmetric GPTQ model of ``count`` layers."""
    truths = [truth(i, order=order, lowest=1) for i in range(count)]
    offset = 1 if version == "gptq" else 0
    packed = {name(i): samples.pack_gptq(t, offset=offset) for i, t in enumerate(truths)}
    config = samples.gptq_config(truths[0], version)
    return folder(path, {**layers(packed), **plain()}, config, **more)


def awq(path: Path, count: int = 3, **more: Any) -> Path:
    """An AWQ GEMM model of ``count`` layers."""
    truths = [truth(i) for i in range(count)]
    packed = {name(i): samples.pack_awq(t) for i, t in enumerate(truths)}
    return folder(path, {**layers(packed), **plain()}, samples.awq_config(truths[0]), **more)


def of_format(path: Path, kind: str, **more: Any) -> Path:
    """Two layers in one of the formats that are read."""
    small, spans, large = truth(1), truth(K=128, size=64), truth(K=128, N=256, size=128, sym=True)
    made: dict[str, tuple[Mapping[str, Tensor], Mapping[str, Any]]] = {
        "gptq": (samples.pack_gptq(small, offset=0), samples.gptq_config(small, "gptq_v2")),
        "awq": (samples.pack_awq(small), samples.awq_config(small)),
        "awq-gemv": (samples.pack_gemv(spans), samples.awq_config(spans, "gemv")),
        "awq-gemv-fast": (samples.pack_fast(spans), samples.awq_config(spans, "gemv_fast")),
        "compressed-tensors": (samples.pack_ct(small), samples.ct_config(small)),
        "gptq-marlin": (samples.pack_marlin(large), samples.gptq_config(large, "marlin")),
        "gptq-v0": (
            samples.pack_v0(truth(size=-1)),
            {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False},
        ),
    }
    tensors, config = made[kind]
    return folder(path, {**layers({name(0): tensors, name(1): tensors}), **plain()}, config, **more)


FORMATS = ("gptq", "awq", "awq-gemv", "awq-gemv-fast", "compressed-tensors", "gptq-marlin", "gptq-v0")


def copy(source: Path, target: Path) -> Path:
    """A folder that a test may damage."""
    shutil.copytree(source, target)
    return target


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def exact(t: Truth) -> Tensor:
    """float64 ``[K, N]``: what a weight is."""
    g = torch.from_numpy(t.g).long()
    q, z = torch.from_numpy(t.q).double(), torch.from_numpy(t.z).double()
    return (q - z[g]) * t.s.double()[g]
