"""What is not INT4 group quantisation, by name, with what to do instead.

Refused are methods whose config names them, layouts of the known methods that hold something else, and checkpoints
whose tensors give the method away while the config is silent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from w4plugin.errors import UnsupportedError
from w4plugin.formats.format import TensorHeader
from w4plugin.quant_config import QuantConfig

WANTED = "GPTQ, AWQ, AutoRound or compressed-tensors with 4-bit integer weights"

_TOOL = "load it with {}, save plain weights, and quantise those"
_OWN = _TOOL.format("the tool that made it")

METHODS: Mapping[str, tuple[str, str]] = {
    "bitsandbytes": ("bitsandbytes (NF4, FP4 or LLM.int8)", _TOOL.format("transformers and bitsandbytes")),
    "bitsandbytes_4bit": ("bitsandbytes (NF4 or FP4)", _TOOL.format("transformers and bitsandbytes")),
    "bitsandbytes_8bit": ("bitsandbytes (LLM.int8)", _TOOL.format("transformers and bitsandbytes")),
    "hqq": ("HQQ", _TOOL.format("hqq")),
    "exl2": (
        "EXL2, which has a width for each row",
        "it runs in exllamav2 only; take the model's GPTQ or plain weights",
    ),
    "exl3": ("EXL3, a trellis code", "it runs in exllamav3 only; take the model's GPTQ or plain weights"),
    "aqlm": ("AQLM, an additive codebook", _OWN),
    "vptq": ("VPTQ, a vector codebook", _OWN),
    "quip": ("QuIP#, a lattice codebook", _OWN),
    "quip#": ("QuIP#, a lattice codebook", _OWN),
    "spqr": ("SpQR, with a sparse part", _OWN),
    "higgs": ("HIGGS, a vector codebook", _OWN),
    "eetq": ("EETQ (INT8)", _OWN),
    "quanto": ("quanto", _TOOL.format("optimum-quanto")),
    "torchao": ("torchao", _TOOL.format("torchao")),
    "bitnet": ("BitNet (ternary)", _OWN),
    "qqq": ("QQQ (W4A8)", _OWN),
    "bitblas": ("BitBLAS, a compiled layout", "repack it to GPTQ with the tool that made it"),
    "paroquant": ("ParoQuant, with rotations beside the weights", _OWN),
    "gguf": ("GGUF", "llama.cpp runs it; take the model's safetensors for anything else"),
    "quark": ("AMD Quark", _OWN),
    "fp8": ("FP8", "vLLM runs it as it is"),
    "fbgemm_fp8": ("FBGEMM FP8", "vLLM runs it as it is"),
    "fp_quant": ("FP-Quant", _OWN),
    "mxfp4": ("MXFP4", "vLLM runs it as it is"),
    "nvfp4": ("NVFP4", "vLLM runs it as it is"),
    "modelopt": ("NVIDIA ModelOpt", "vLLM runs it as it is"),
    "modelopt_fp4": ("NVIDIA ModelOpt (NVFP4)", "vLLM runs it as it is"),
    "sinq": ("SINQ, with two scales", _OWN),
    "vqllm": ("a vector codebook", _OWN),
}

LAYOUTS: Mapping[str, tuple[str, str]] = {
    "marlin_24": ("GPTQ in Marlin's 2:4 sparse order", _OWN),
    "marlin-24": ("compressed-tensors in Marlin's 2:4 sparse order", _OWN),
    "sparse-24-bitmask": ("compressed-tensors 2:4 sparsity", _OWN),
    "sparse-bitmask": ("compressed-tensors sparsity", _OWN),
    "nvfp4-pack-quantized": METHODS["nvfp4"],
    "mxfp4-pack-quantized": METHODS["mxfp4"],
    "mxfp8-quantized": ("MXFP8", "vLLM runs it as it is"),
    "int-quantized": ("compressed-tensors INT8, or INT4 that is not packed", "compress it as pack-quantized"),
    "float-quantized": METHODS["fp8"],
    "naive-quantized": ("compressed-tensors weights that are not packed", "compress them as pack-quantized"),
    "mixed-precision": ("compressed-tensors with several kinds of compression", _OWN),
    "dense": ("compressed-tensors without compression", "these are plain weights; there is nothing to read"),
    "bitblas": METHODS["bitblas"],
    "qqq": METHODS["qqq"],
}

SIGNS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"absmax", "quant_map"}), "bitsandbytes"),
    (frozenset({"SCB"}), "bitsandbytes_8bit"),
    (frozenset({"W_q"}), "hqq"),
    (frozenset({"q_weight", "q_scale"}), "exl2"),
    (frozenset({"trellis", "suh"}), "exl3"),
    (frozenset({"codes", "codebooks"}), "aqlm"),
    (frozenset({"centroids", "indices"}), "vptq"),
    (frozenset({"Qidxs"}), "quip"),
    (frozenset({"row_offsets", "col_vals"}), "spqr"),
    (frozenset({"_data", "_scale"}), "quanto"),
    (frozenset({"B", "s_channel"}), "qqq"),
    (frozenset({"B_24"}), "marlin_24"),
    (frozenset({"weight_scale_inv"}), "fp8"),
    (frozenset({"weight_scale_2"}), "nvfp4"),
    (frozenset({"weight_global_scale"}), "nvfp4"),
    (frozenset({"pre_quant_scale"}), "modelopt"),
)
"""Suffixes in one module that only one method writes."""


def refuse(config: QuantConfig, modules: Mapping[str, Mapping[str, TensorHeader]]) -> None:
    """Raise if config or tensors name something this project does not read.

    Args:
        config: the checkpoint's config.
        modules: headers by module name, then by suffix.

    Raises:
        UnsupportedError: what it is, and what to do.
    """
    if config.method is not None and config.method in METHODS:
        raise _error("quant_method", *METHODS[config.method])
    if "quant_algo" in config.raw or isinstance(config.raw.get("quantization"), Mapping):
        raise _error("hf_quant_config.json", *METHODS["modelopt"])
    layout = config.layout
    if layout is not None and layout in LAYOUTS:
        raise _error("format", *LAYOUTS[layout])
    if layout is not None and re.match(r"(mx|nv)?fp[48]|mx_fp|nv_fp", layout):
        raise _error("packing_format", f"AutoRound's {layout}", "vLLM runs it as it is")
    for where, got, todo in _inside(config):
        raise _error(where, got, todo)
    for name, headers in modules.items():
        told = _told(headers)
        if told is not None:
            raise _error(name, *told)


def _error(where: str, got: str, todo: str) -> UnsupportedError:
    return UnsupportedError(where, got=got, wanted=WANTED, todo=todo)


def _inside(config: QuantConfig) -> Iterable[tuple[str, str, str]]:
    """Values inside a known method's config that make it something else."""
    raw = config.raw
    kind = raw.get("data_type")
    if isinstance(kind, str) and not kind.startswith("int"):
        yield "data_type", f"AutoRound weights of type {kind}", "vLLM runs it as it is"
    for key in ("rotation_config", "rotation", "transform_config"):
        if raw.get(key):
            yield key, f"weights behind a rotation ({key})", _OWN
    sparsity = raw.get("sparsity_config")
    if isinstance(sparsity, Mapping) and str(sparsity.get("format", "dense")) != "dense":
        yield "sparsity_config", f"compressed-tensors sparsity ({sparsity['format']})", _OWN
    groups: Any = raw.get("config_groups")
    for name, scheme in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(scheme, Mapping):
            yield from _scheme(f"config_groups: {name}", scheme)


def _scheme(where: str, scheme: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    """One config group of compressed-tensors."""
    layout = scheme.get("format")
    if isinstance(layout, str) and layout in LAYOUTS:
        yield (f"{where}.format", *LAYOUTS[layout])
    if scheme.get("input_activations"):
        yield f"{where}.input_activations", "quantised activations (W4A8 or W4A4)", _OWN
    weights = scheme.get("weights")
    if not isinstance(weights, Mapping):
        return
    if weights.get("type") not in (None, "int"):
        yield f"{where}.weights.type", f"{weights['type']} weights", _OWN
    if weights.get("strategy") not in (None, "group", "channel"):
        yield f"{where}.weights.strategy", f"the strategy {weights['strategy']}", _OWN


def _told(headers: Mapping[str, TensorHeader]) -> tuple[str, str] | None:
    """What the tensors directly under one name give away: (what it is, what to do)."""
    for signs, method in SIGNS:
        if signs <= headers.keys():
            return METHODS.get(method) or LAYOUTS[method]
    weight = headers.get("weight")
    if weight is not None and weight.dtype.startswith("F8"):
        return METHODS["fp8"]
    if weight is not None and weight.dtype in ("I8", "U8") and headers.keys() & {"weight_scale", "weight_scales"}:
        return LAYOUTS["int-quantized"]
    if any(s.endswith("_blocks") and h.dtype == "U8" for s, h in headers.items()):
        return METHODS["mxfp4"]
    return None
