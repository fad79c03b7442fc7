"""Launches of a compiled Hopper kernel with little Python around them.

Triton encodes a tensor map for each descriptor at every launch and goes through all arguments in Python, which costs
more than the launch. The maps of a weight are the same at every call, and so is most of the rest. Outside of CUDA
graphs, at small M, that is time a caller waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from w4plugin.kernels import device

KNOWN = (3, 6)
"""The release of Triton whose launcher is called directly: others order its arguments otherwise."""


class View(NamedTuple):
    """A tensor as a descriptor needs it; holds no tensor, so it keeps no weight alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    @property
    def base(self) -> View:
        return self

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, eq=False)
class Bound:
    """A compiled kernel on its grid, as Triton launches it."""

    run: Callable[..., None]

    def weight(self, views: tuple[View, ...]) -> tuple[Any, ...]:
        """What a call takes for the descriptors after the first."""
        return views

    def __call__(
        self, index: int, x: View, weight: tuple[Any, ...], after: tuple[View, ...], rest: tuple[Any, ...]
    ) -> None:
        """Launch on the current stream of GPU ``index``, which is the current one."""
        self.run(x, *weight, *after, *rest)


@dataclass(frozen=True, eq=False)
class Direct:
    """The same by Triton's launcher in C.

    Attributes:
        send: the launcher.
        encode: makes a tensor map of an address, a layout, a shape and strides.
        layouts: of each descriptor: swizzle, element size, element type, box.
        grid, head: what stands before the arguments, without the stream between the two: function, launch attributes,
            scratch, metadata and hooks.
    """

    send: Callable[..., None]
    encode: Callable[..., Any]
    layouts: tuple[tuple[Any, ...], ...]
    grid: tuple[int, int, int]
    head: tuple[Any, ...]

    def descriptor(self, i: int, view: View) -> tuple[Any, ...]:
        """What the kernel takes for its ``i``-th descriptor."""
        made = self.encode(view.address, *self.layouts[i], view.shape, view.strides, 0)
        return (made, *view.shape, *view.strides)

    def weight(self, views: tuple[View, ...]) -> tuple[Any, ...]:
        return tuple(part for i, view in enumerate(views) for part in self.descriptor(i + 1, view))

    def __call__(
        self, index: int, x: View, weight: tuple[Any, ...], after: tuple[View, ...], rest: tuple[Any, ...]
    ) -> None:
        stream = torch._C._cuda_getCurrentRawStream(index)
        first = self.descriptor(0, x)
        last = (
            part for view in after for part in (first if view is x else self.descriptor(len(self.layouts) - 1, view))
        )
        self.send(*self.grid, stream, *self.head, *first, *weight, *last, *rest)


def of(compiled: Any, grid: tuple[int, int, int]) -> Bound | Direct:
    """The shortest way to launch a compiled kernel that this Triton is known to have."""
    bound = Bound(compiled[grid])
    if device.triton_release() != KNOWN:
        return bound
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    run = compiled.run
    cells = zip(run.launch.__code__.co_freevars, run.launch.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells}
    if run.global_scratch_size or run.profile_scratch_size or not {"launcher", "tensordesc_meta"} <= set(held):
        return bound
    layouts = tuple(
        (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"])
        for meta in held["tensordesc_meta"]
    )
    scratch, hooks = (None, None), (None, None)
    attributes = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    head = (*attributes, *scratch, compiled.packed_metadata, None, *hooks)
    return Direct(held["launcher"], driver.active.utils.fill_tma_descriptor, layouts, grid, head)


def watched() -> bool:
    """Whether somebody, a profiler say, asked Triton to be told of launches, which :class:`Direct` does not do."""
    runtime = _knobs()
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


@functools.cache
def _knobs() -> Any:
    from triton import knobs

    return knobs.runtime
