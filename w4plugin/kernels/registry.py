"""Backends in order of preference, and the choice among them."""

from __future__ import annotations

import functools

from w4plugin.errors import UnsupportedError, UsageError
from w4plugin.kernels import cpu, hopper, plain, portable
from w4plugin.kernels.backend import Backend, Target
from w4plugin.tensor import W4Tensor

BACKENDS: tuple[Backend, ...] = (cpu.BACKEND, hopper.BACKEND, portable.BACKEND, plain.BACKEND)
"""The first that gives no reason against itself is taken."""


@functools.cache
def get(name: str) -> Backend:
    """The backend of that name."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise UsageError("backend", got=repr(name), wanted=" | ".join(b.name for b in BACKENDS))


def reasons(target: Target, weight: W4Tensor | None = None) -> dict[str, str | None]:
    """Each backend's own word on why it cannot run here; None where it can."""
    return {b.name: b.why_not(target, weight) for b in BACKENDS}


def choose(target: Target, weight: W4Tensor, name: str | None = None) -> Backend:
    """The named backend, or the first that fits.

    Raises:
        UnsupportedError: with the reason of every backend asked.
    """
    asked = BACKENDS if name is None else (get(name),)
    against = {b.name: b.why_not(target, weight) for b in asked}
    for backend in asked:
        if against[backend.name] is None:
            return backend
    where = f"{target.arch}, {str(target.dtype).removeprefix('torch.')}, K = {weight.K}, N = {weight.N}"
    raise UnsupportedError(where, got="; ".join(f"{k}: {v}" for k, v in against.items()), wanted="a backend that fits")
