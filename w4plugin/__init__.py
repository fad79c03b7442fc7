"""w4plugin: read, repack, verify and serve GPTQ and AWQ INT4 checkpoints.

``import w4plugin`` loads neither triton nor any host; kernels and runtimes are imported where they are used.
"""

from w4plugin.errors import (
    CorruptError,
    MismatchError,
    StorageError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    W4Error,
)
from w4plugin.quantize import quantize
from w4plugin.tensor import W4Tensor

__version__ = "0.1.0"

__all__ = [
    "CorruptError",
    "MismatchError",
    "StorageError",
    "UnsafeError",
    "UnsupportedError",
    "UsageError",
    "W4Error",
    "W4Tensor",
    "__version__",
    "quantize",
]
