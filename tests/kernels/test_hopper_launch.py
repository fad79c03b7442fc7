"""The direct launch of a Hopper kernel hands Triton's launcher the very arguments that Triton itself would.

On the device every test of the Hopper backend goes through it from the second call on.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from w4plugin.kernels import device, hopper, hopper_launch, portable
from w4plugin.kernels.hopper_launch import View
from w4plugin.kernels.hopper_tiles import Tile
from w4plugin.kernels.tiles import Problem
from w4plugin.tensor import W4Tensor

from .cases import check
from .test_cross_compile import ROOT

GRID = (7, 1, 1)


class Encoder:
    """Stands for the driver: a tensor map is the tuple of what it was made of."""

    def fill_tma_descriptor(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments

    fill_tma_descriptor_tiled = fill_tma_descriptor


class Compiled:
    """What :func:`hopper_launch.of` reads of a compiled kernel, around a launcher that keeps what it is given."""

    function, packed_metadata = 99, (4, 1, 1000)

    def __init__(self, plan: hopper.Plan) -> None:
        from triton.backends.nvidia import driver

        self.sent: list[Any] = []
        kinds = [f"tensordesc<{i}>" for i in range(len(plan.layouts))] + ["i32"] * (
            4 + len(plan.sizes) + len(plan.constants)
        )
        meta = [
            {"swizzle": i, "elem_size": 2, "elem_type": 6, "block_size": plan.layouts[i][0], "fp4_padded": False}
            for i in map(plan.layouts.index, plan.layouts)
        ]
        launch = driver.wrap_handle_tensordesc(lambda *all_: self.sent.append(all_), dict(enumerate(kinds)), meta)
        self.run = SimpleNamespace(
            launch=launch, launch_cooperative_grid=False, launch_pdl=True, global_scratch_size=0, profile_scratch_size=0
        )

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        head = (self.function, False, True, None, None, self.packed_metadata, None, None, None)
        if device.triton_release() == hopper_launch.KNOWN:
            return lambda *arguments: self.run.launch(*grid, 5, *head, *arguments)
        return lambda *arguments: self.run.launch(*grid, 5, *head, arguments)


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Encoder:
    from triton.backends.nvidia import driver
    from triton.runtime import driver as runtime

    made = Encoder()
    active = SimpleNamespace(utils=made)
    monkeypatch.setattr(runtime, "_active", active, raising=False)
    monkeypatch.setattr(runtime, "_default", active, raising=False)
    assert driver.triton.runtime.driver.active.utils is made
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5 + index, raising=False)
    return made


KINDS = ["narrow", "wide", "staged"]


def tile_of(kind: str) -> Tile:
    if kind == "narrow":
        return Tile("narrow", 8, 64, 4, 3, 4, 128, 2, True, 16)
    return Tile("wide", 128, 64, 4, 4, 4, 168, 1, False, 12, staged=kind == "staged")


@pytest.mark.cpu_only
@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_direct_sends_what_triton_sends(encoder: Encoder, asym: bool, kind: str) -> None:
    p = Problem(100, 4096, 4096, 128, True, "sm_90", 132)
    plan = hopper.make_plan(tile_of(kind), p, torch.float16, asym, True)
    compiled = Compiled(plan)
    x = View(1 << 20, (64, 100, 64), (64, 4096, 1))
    scales, zeros = torch.ones(32, 4096, dtype=torch.float16), torch.ones(32, 4096, dtype=torch.uint8) if asym else None
    views = hopper._weight_views(torch.zeros(64, 256, 128, dtype=torch.int32), scales, zeros)
    out = View(1 << 21, (100, 4096), (4096, 1))
    after = {"narrow": (), "wide": (x,), "staged": (out,)}[kind]
    for view, (box, _) in zip((x, *views, *after), plan.layouts, strict=True):
        assert len(view.shape) == len(view.strides) == len(box)
    rest = (11, 12, None, 13, *plan.sizes, *plan.constants)
    bound = hopper_launch.Bound(compiled[GRID])
    bound(0, x, bound.weight(views), after, rest)
    shortest = hopper_launch.of(compiled, GRID)
    assert isinstance(shortest, hopper_launch.Direct) == (device.triton_release() == hopper_launch.KNOWN)
    shortest(0, x, shortest.weight(views), after, rest)
    by_triton, sent = compiled.sent
    assert sent == by_triton
    arguments = sent[13:] if device.triton_release() == hopper_launch.KNOWN else sent[-1]
    assert (1 << 20) in arguments[0], "the map of x is made of its address"


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_call_describes_what_a_kernel_reads_and_writes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's own descriptors: x, words, scales, zeros, and the output where it is stored by TMA."""
    w = W4Tensor(
        torch.randint(-(2**31), 2**31, (512, 64)).to(torch.int32), torch.ones(32, 64).half(), None, None, 128
    )  # fmt: skip
    x = torch.randn(100, 4096).half()
    q = portable.prepare(w)
    plan = hopper.make_plan(tile_of(kind), Problem(100, 64, 4096, 128, True, "sm_90", 132), torch.float16, False, False)
    seen: list[Any] = []
    kernel = {plan.grid: lambda *arguments, **_: seen.extend(arguments)}
    monkeypatch.setattr(device, "current", lambda where: nullcontext())
    monkeypatch.setattr(hopper_launch, "of", lambda compiled, grid: None)
    plan = dataclasses.replace(plan, kernel=kernel)
    counters = torch.zeros(1, dtype=torch.int32)
    out = hopper.multiply(plan, x, q.qweight, q.scales, None, None, counters, None, 64, 128)
    count = len(plan.layouts)
    last = {"narrow": [], "wide": [x], "staged": [out]}[kind]
    assert [d.base.data_ptr() for d in seen[:count]] == [
        t.data_ptr() for t in (x, q.qweight, q.scales, q.scales, *last)
    ]
    assert [d.block_shape for d in seen[:count]] == [box for box, _ in plan.layouts]
    assert seen[count + 1] is out


def test_a_view_describes_a_weight_without_holding_it() -> None:
    """A plan outlives weights, so what it keeps of them must not keep them."""
    words, scales = torch.zeros(2, 3, 128, dtype=torch.int32), torch.ones(1, 48)
    views = hopper._weight_views(words, scales, None)
    assert [view.shape for view in views] == [(2, 3, 128), (1, 48), (1, 48)]
    assert [view.address for view in views] == [words.data_ptr(), scales.data_ptr(), scales.data_ptr()]
    assert not any(isinstance(part, torch.Tensor) for view in views for part in view)


@pytest.mark.cpu_only
def test_the_newest_triton_launches_as_well() -> None:
    """The same test with the newest Triton, whose launcher is not called directly, but reads the same views."""
    found = sorted(ROOT.glob(".venv-triton/lib/python*/site-packages"))
    assert found, ".venv-triton is missing: run ./tools/test once, which installs it"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "direct_sends"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(found[-1])}, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.cpu_only
def test_who_watches_launches_is_seen() -> None:
    from triton import knobs

    def hook(metadata: object) -> None: ...

    assert not hopper_launch.watched()
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert hopper_launch.watched()
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)


@pytest.mark.gpu
def test_calls_after_the_first_are_direct(device: torch.device) -> None:
    """And give the same bits as the first, which Triton launches."""
    from w4plugin import kernels

    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the kernels are sm_90's")
    g = torch.Generator(device).manual_seed(5)
    words = torch.randint(-(2**31), 2**31, (64, 1024), generator=g, device=device, dtype=torch.int64).to(torch.int32)
    scales = torch.rand(4, 1024, generator=g, device=device).half()
    zeros = torch.randint(0, 16, (4, 1024), generator=g, device=device, dtype=torch.uint8)
    prepared = [
        kernels.prepare(W4Tensor(w, scales, zeros, None, 128), dtype=torch.float16, backend="hopper")
        for w in (words, words + 1)
    ]
    x = torch.randn(48, 512, generator=g, device=device).half()
    hopper._plans.clear()
    first = kernels.linear(x, prepared[0])
    (plan,) = hopper._plans.values()
    assert isinstance(plan.launch[0], hopper_launch.Direct)
    assert not plan.weights
    assert torch.equal(kernels.linear(x, prepared[0]), first)
    other = kernels.linear(x, prepared[1])
    assert len(plan.weights) == 2
    assert torch.equal(kernels.linear(x, prepared[0]), first)
    exact = W4Tensor(words + 1, scales, zeros, None, 128).dequantize(torch.float64)
    check(other, x, exact, where="another weight by the same plan")
