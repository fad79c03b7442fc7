"""Legacy ``.bin`` and ``.pt`` files: tensors only, memory-mapped, through torch's weights-only unpickler.

A pickle is a program. This module runs none of it: anything that is not a tensor in a plain container is refused by
torch before it is called, and the refusal is passed on with the file's name.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4plugin.errors import CorruptError, StorageError, UnsafeError, UnsupportedError

WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts put the tensors."""

SAFETENSORS_DTYPE = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip

TORCH_DTYPE = {name: dtype for dtype, name in SAFETENSORS_DTYPE.items()}


def load(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of one file, on the CPU, and the names of entries that are not tensors.

    Files of torch 1.6 and later are memory-mapped; older ones are read whole.

    Raises:
        UnsafeError: the file wants something called that is not needed for tensors.
        UnsupportedError: the search result of AWQ, which holds no weights.
        CorruptError: not a torch file, or a damaged one.
    """
    # torch reports a refusal and a damaged file with the same exception classes; the text tells them apart
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _torch_load(path)
    except pickle.UnpicklingError as fault:
        raise _refusal(path, fault) from fault
    except OSError as fault:
        raise StorageError(str(path), got=fault.strerror or str(fault), wanted="a readable file") from fault
    except Exception as fault:
        text = _first_line(fault)
        if "TorchScript" in text or "weights_only" in text:
            raise _refusal(path, fault) from fault
        raise CorruptError(path.name, got=f"a file torch cannot read ({text})", wanted="a torch checkpoint") from fault
    return _tensors(path, found)


def _torch_load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as fault:
        if "mmap can only be used" not in str(fault):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)


def _refusal(path: Path, fault: Exception) -> UnsafeError:
    return UnsafeError(
        path.name,
        got=f"a pickle that is more than tensors ({_first_line(fault)})",
        wanted="tensors in plain containers; nothing of it was run",
        todo="Convert it to safetensors where its origin is trusted.",
    )


def _first_line(fault: Exception) -> str:
    """What torch says, without its advice to turn the protection off."""
    text = str(fault)
    marker = "WeightsUnpickler error:"
    if marker in text:
        text = text.split(marker, 1)[1]
    lines = text.strip().splitlines()
    return lines[0].strip()[:160] if lines else type(fault).__name__


def _tensors(path: Path, found: Any) -> tuple[dict[str, Tensor], list[str]]:
    while isinstance(found, Mapping):
        inner = next((found[key] for key in WRAPPERS if isinstance(found.get(key), Mapping)), None)
        if inner is None:
            break
        found = inner
    if isinstance(found, Mapping) and {"scale", "clip"} <= set(found):
        raise UnsupportedError(
            path.name,
            got="the result of AWQ's scale search (keys 'scale' and 'clip')",
            wanted="quantised weights",
            todo="It holds what to do with a model, not a model: run AWQ with it, then repack what that writes.",
        )
    if not isinstance(found, Mapping) or not any(isinstance(v, Tensor) for v in found.values()):
        raise CorruptError(path.name, got=f"a {type(found).__name__} without tensors", wanted="tensors by name")
    tensors = {k: v for k, v in found.items() if isinstance(k, str) and isinstance(v, Tensor)}
    other = [str(k) for k in found if k not in tensors]
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in SAFETENSORS_DTYPE:
            raise UnsupportedError(
                f"{path.name}: {name}", got=f"{tensor.layout} {tensor.dtype}", wanted="a plain dense tensor"
            )
    return tensors, other
