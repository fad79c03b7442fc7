"""w4plugin: read, repack, verify and serve GPTQ and AWQ INT4 checkpoints.

``import w4plugin`` loads neither torch, triton nor any host: every name below is imported when it is first used.

    import w4plugin

    print(w4plugin.inspect("TheBloke/Llama-2-7B-AWQ")["vllm"])
    w4plugin.repack("model-awq", "model-gptq")
    assert w4plugin.verify("model-awq", "model-gptq")["ok"]

    checkpoint = w4plugin.open("model-awq")
    weight = checkpoint.weight(checkpoint.modules[0].name)  # a W4Tensor
    weight.qweight, weight.scales, weight.zeros, weight.dequantize()

docs/python.md describes each name. Errors are :class:`W4Error` with where, got, wanted and todo.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from w4plugin.errors import (
    CorruptError,
    MismatchError,
    StorageError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    W4Error,
)

if TYPE_CHECKING:
    from w4plugin.checkpoint.checkpoint import Checkpoint
    from w4plugin.checkpoint.dequantize import dequantize
    from w4plugin.checkpoint.output import Request
    from w4plugin.checkpoint.quantize import quantize as quantize_checkpoint
    from w4plugin.checkpoint.repack import repack
    from w4plugin.checkpoint.summary import inspect
    from w4plugin.checkpoint.verify import verify
    from w4plugin.tensor import W4Tensor

    open = Checkpoint.open

__version__ = "0.1.0"

_LAZY = {
    "Checkpoint": ("w4plugin.checkpoint.checkpoint", "Checkpoint"),
    "Request": ("w4plugin.checkpoint.output", "Request"),
    "W4Tensor": ("w4plugin.tensor", "W4Tensor"),
    "dequantize": ("w4plugin.checkpoint.dequantize", "dequantize"),
    "inspect": ("w4plugin.checkpoint.summary", "inspect"),
    "open": ("w4plugin.checkpoint.checkpoint", "Checkpoint.open"),
    "quantize_checkpoint": ("w4plugin.checkpoint.quantize", "quantize"),
    "repack": ("w4plugin.checkpoint.repack", "repack"),
    "verify": ("w4plugin.checkpoint.verify", "verify"),
}

__all__ = [
    "Checkpoint",
    "CorruptError",
    "MismatchError",
    "Request",
    "StorageError",
    "UnsafeError",
    "UnsupportedError",
    "UsageError",
    "W4Error",
    "W4Tensor",
    "__version__",
    "dequantize",
    "inspect",
    "open",
    "quantize_checkpoint",
    "repack",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'w4plugin' has no attribute {name!r}")
    module, path = _LAZY[name]
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
