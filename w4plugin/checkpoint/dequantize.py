"""A packed checkpoint as plain float16, bfloat16 or float32 tensors, streamed.

    W[k, n] = (q[k, n] - zero[g, n]) * scale[g, n]       rounded once, stored as ``weight`` [N, K]

By default each weight has the dtype of its scales, in which fp16 and bf16 tools compute it, and everything else stays
as it is. A dtype that is asked for applies to every floating tensor, since loaders expect one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from w4plugin.checkpoint import other_widths, output
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.output import Request, Work
from w4plugin.checkpoint.pickled import SAFETENSORS_DTYPE
from w4plugin.checkpoint.repack import plain_job, require_finite, require_modules
from w4plugin.checkpoint.stream import Job, Product, copy_job
from w4plugin.errors import UsageError

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def dequantize(
    model: str | Path | Checkpoint, out: str | Path | Request, *, dtype: str | torch.dtype | None = None
) -> dict[str, Any]:
    """Write the plain form of a checkpoint, layers of 2, 3 and 8 bits included.

    Args:
        model: a folder, a hub id, or an opened checkpoint.
        out: the folder to create, or a :class:`Request` that says more about how.
        dtype: "float16", "bfloat16", "float32" or a torch dtype for every floating tensor; None keeps dtypes.

    Returns:
        The report; see ``report.schema.json``.

    Raises:
        UnsupportedError: a value that ``dtype`` cannot hold.
        W4Error: of reading or writing.
    """
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
    request = out if isinstance(out, Request) else Request(Path(out))
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and chosen not in DTYPES.values():
        raise UsageError("--dtype", got=repr(dtype), wanted=" | ".join(DTYPES))
    require_modules(checkpoint)
    census = checkpoint.census
    jobs = [plain_job(checkpoint, module, chosen, request.device) for module in census.modules]
    jobs += other_widths.plain_jobs(checkpoint, chosen)
    jobs += [_carried(checkpoint, name, chosen) for name in census.plain]
    work = Work(
        command="dequantize",
        options={"dtype": None if chosen is None else str(chosen).removeprefix("torch.")},
        jobs=jobs,
        config=lambda facts: None,
        dropped={},
        notes=other_widths.notes(checkpoint, "dequantize"),
        extra={"dtype": None if chosen is None else str(chosen).removeprefix("torch.")},
    )
    return output.write(checkpoint, work, request)


def _carried(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None) -> Job:
    """A tensor that was plain already: as it is, or cast."""
    header = checkpoint.headers[name]
    if dtype is None or header.dtype not in ("F16", "BF16", "F32", "F64") or header.dtype == SAFETENSORS_DTYPE[dtype]:
        return copy_job(checkpoint, name)

    def make() -> Product:
        stored = checkpoint.tensor(name)
        cast = stored.to(dtype)
        if bool(torch.isfinite(stored).all()):
            require_finite(name, cast)
        return Product({name: cast}, {"from": header.dtype})

    size = checkpoint.nbytes(name)
    return Job(name, {name: (SAFETENSORS_DTYPE[dtype], header.shape)}, make, 3 * size, size)
