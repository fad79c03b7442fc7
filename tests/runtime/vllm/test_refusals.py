"""Checkpoints that must not be served: refused while the engine starts, with the module's name and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.vllm.checkpoints import Recipe, Shape, edit_config, write
from tests.runtime.vllm.engines import engine

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.mlp.down_proj"


def _edit(change: Callable[[Tensors], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return apply


def _bias(tensors: Tensors) -> None:
    tensors[f"{LAYER}.bias"] = torch.full((256,), 0.5, dtype=torch.float16)


def _no_scales(tensors: Tensors) -> None:
    del tensors[f"{LAYER}.scales"]


def _nan(tensors: Tensors) -> None:
    tensors[f"{LAYER}.scales"][0, 0] = float("nan")


def _group_beyond(tensors: Tensors) -> None:
    tensors[f"{LAYER}.g_idx"][0] = 99


def _no_layer(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.startswith(LAYER)]:
        del tensors[name]


def _two_bits(tensors: Tensors) -> None:
    """In a layout whose other widths nobody here can make plain."""
    tensors[f"{LAYER}.qweight"] = tensors[f"{LAYER}.qweight"][:, ::2].contiguous()
    tensors[f"{LAYER}.qzeros"] = tensors[f"{LAYER}.qzeros"][:, ::2].contiguous()


def _experts(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.startswith(LAYER)]:
        tensors[name.replace("mlp.", "mlp.experts.0.")] = tensors[name].clone()


def _missing_shard(folder: Path) -> None:
    index = {
        "metadata": {},
        "weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model-1.safetensors"),
    }
    index["weight_map"][f"{LAYER}.qweight"] = "model-2.safetensors"
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bias without a place": (_edit(_bias), rf"{LAYER}\.bias.*bias that is not zero"),
    "missing scales": (_edit(_no_scales), rf"{LAYER}.*scales"),
    "NaN scales": (_edit(_nan), rf"{LAYER}.*scales.*NaN"),
    "g_idx out of range": (_edit(_group_beyond), rf"{LAYER}.*g_idx"),
    "a layer that the file lacks": (_edit(_no_layer), rf"{LAYER}"),
    "an expert without its gate": (_edit(_experts), r"mlp\.experts\.0: got no gate projection"),
    "a missing shard": (_missing_shard, r"model-2\.safetensors"),
    "a truncated file": (_truncated, r"model\.safetensors"),
    "more layers than the config": (lambda f: edit_config(f, num_hidden_layers=1), r"layers\.1\..*config\.json"),
    "fewer layers than the config": (lambda f: edit_config(f, num_hidden_layers=3), r"layers\.2\..*config\.json"),
    "another width": (lambda f: edit_config(f, intermediate_size=768), r"(gate_proj|down_proj).*config\.json"),
    "other heads": (lambda f: edit_config(f, num_attention_heads=8), r"self_attn\..*config\.json"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    change, message = CASES[name]
    packed, _ = write(tmp_path, Recipe("gptq_v2", act_order="each"), Shape())
    change(packed)
    with pytest.raises(Exception, match=f"(?s){message}"), engine(packed, dtype="float32", quantization="w4plugin"):
        pass


AT = "model.layers.1.block_sparse_moe.experts"


def _missing_expert(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.startswith(f"{AT}.3.")]:
        del tensors[name]


def _narrow_expert(tensors: Tensors) -> None:
    """One whose up projection lacks its last eight columns."""
    for suffix, last in (("qweight", -8), ("scales", -8), ("qzeros", -1)):
        tensors[f"{AT}.2.w3.{suffix}"] = tensors[f"{AT}.2.w3.{suffix}"][:, :last].contiguous()


def _halved_groups(tensors: Tensors) -> None:
    for suffix in ("scales", "qzeros"):
        name = f"{AT}.2.w3.{suffix}"
        tensors[name] = tensors[name].repeat_interleave(2, 0)


def _another_order(tensors: Tensors) -> None:
    tensors[f"{AT}.2.w3.g_idx"] = tensors[f"{AT}.2.w3.g_idx"].flip(0)


def _nan_expert(tensors: Tensors) -> None:
    tensors[f"{AT}.2.w3.scales"][0, 0] = float("nan")


def _packed_router(tensors: Tensors) -> None:
    """For which vLLM's model has no place."""
    del tensors["model.layers.1.block_sparse_moe.gate.weight"]
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        tensors[f"model.layers.1.block_sparse_moe.gate.{suffix}"] = tensors[f"{AT}.0.w1.{suffix}"].clone()


MIXTURES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing expert": (_edit(_missing_expert), r"experts\.3: got no tensors for this expert"),
    "an expert of another size": (_edit(_narrow_expert), r"experts\.2\.w3: got N = 248.*size of the others"),
    "an expert of another group": (_edit(_halved_groups), r"experts\.2\.w3: got groups of 32; wanted groups of 64"),
    "up with another act-order than gate": (_edit(_another_order), r"experts\.2\.w3: got a g_idx.*experts\.2\.w1"),
    "NaN scales in an expert": (_edit(_nan_expert), r"experts\.2\.w3.*scales.*NaN"),
    "a packed router": (_edit(_packed_router), r"layers\.1\.block_sparse_moe\.gate\."),
    "more experts than the config": (
        lambda f: edit_config(f, num_local_experts=3),
        r"experts.*3 experts of config\.js",
    ),
    "fewer experts than the config": (lambda f: edit_config(f, num_local_experts=5), r"experts\.4: got no tensors"),
    "another inner width": (lambda f: edit_config(f, intermediate_size=512), r"256 inner ones; wanted 256 and 512"),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixture_refused_by_name(name: str, tmp_path: Path) -> None:
    change, message = MIXTURES[name]
    order = "" if "group" in name else "each"
    packed, _ = write(tmp_path, Recipe("gptq_v2", act_order=order), Shape(mixture="mixtral", inner=256))
    change(packed)
    with pytest.raises(Exception, match=f"(?s){message}"), engine(packed, dtype="float32", quantization="w4plugin"):
        pass


def test_eight_bit_awq_is_refused_by_name(tmp_path: Path) -> None:
    packed, _ = write(tmp_path, Recipe("awq"), Shape())
    _edit(_two_bits)(packed)
    with pytest.raises(Exception, match=LAYER), engine(packed, dtype="float32", quantization="w4plugin"):
        pass


def test_checkpoint_of_eight_bits_throughout_is_refused(tmp_path: Path) -> None:
    packed, _ = write(tmp_path, Recipe("gptq_v2", head=8), Shape())
    tensors = load_file(packed / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if ".layers." not in n}
    save_file(kept, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match="no module packed in 4 bits"), engine(packed, quantization="w4plugin"):
        pass
