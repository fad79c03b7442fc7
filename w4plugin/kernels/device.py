"""The one file that asks about hardware."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch

from w4plugin.kernels.backend import Target


def target(device: torch.device | str, dtype: torch.dtype) -> Target:
    """The target for activations of ``dtype`` on ``device``."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return Target(device, dtype, arch(device))


@functools.cache
def arch(device: torch.device) -> str:
    """ "cpu", "sm_90", "gfx942" or the device type's own name for what this project has not met."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a GPU; 1 on the CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one, as launches want; free where it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


_NOTHING: AbstractContextManager[object] = nullcontext()


@functools.cache
def triton_version() -> str | None:
    """Version of the Triton that imports here, None without one."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def triton_release() -> tuple[int, ...]:
    """(major, minor) of that version, (0, 0) without one."""
    return tuple(int(part) for part in (triton_version() or "0.0").split(".")[:2])
