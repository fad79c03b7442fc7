"""Our backends as peers of a peerbench run: ``peerbench.py --extra tools/peer_ours.py``.

Each backend of the registry that takes the device is a peer ``w4plugin-<backend>``. ``w4plugin-fused`` and
``w4plugin-dense`` are the portable backend held to one of its two paths, to show where they cross. A file that
EXTRA_PEERS names, with its own ``PEERS``, joins the run.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from w4plugin import kernels
from w4plugin.errors import UnsupportedError
from w4plugin.kernels import device, plain, portable, tiles
from w4plugin.tensor import W4Tensor

State = dict[str, Any]
Factory = Callable[[Any, Any], tuple[State, Callable[[State, Tensor], Tensor]]]
HELD = ("qweight", "scales", "zeros", "counters")


def weight(q: Any) -> W4Tensor:
    """peerbench's random weight; its ``qw`` is already in sequential order."""
    return W4Tensor(q.qw, q.s, q.z if q.asym else None, None, q.G)


def whole(backend: str) -> Factory:
    """A backend as a user gets it, through the operator."""

    def make(q: Any, args: Any) -> tuple[State, Callable[[State, Tensor], Tensor]]:
        p = kernels.prepare(weight(q), dtype=q.dtype, backend=backend)
        op = torch.ops.w4plugin.w4a16_linear

        def run(state: State, x: Tensor) -> Tensor:
            return op(
                x, state["qweight"], state["scales"], state["zeros"], None, state["counters"], None,
                p.N, p.group_size, backend,
            )  # fmt: skip

        return {name: getattr(p, name) for name in HELD}, run

    return make


def path(dense: bool) -> Factory:
    """The portable backend held to the dense or to the fused path."""

    def make(q: Any, args: Any) -> tuple[State, Callable[[State, Tensor], Tensor]]:
        p = kernels.prepare(weight(q), dtype=q.dtype, backend="portable")
        plans: dict[int, portable.Plan] = {}

        def run(state: State, x: Tensor) -> Tensor:
            plan = plans.get(x.shape[0])
            if plan is None:
                problem = portable.problem(x, p.scales, None, p.N, p.group_size)
                tile = None if dense else tiles.choose(problem) or tiles.choose(replace(problem, m=1024))
                if tile is None and not dense:
                    raise UnsupportedError(f"M = {x.shape[0]}", got="no fused tile", wanted="a table that holds one")
                plan = plans[x.shape[0]] = portable.make_plan(
                    problem, tile, asym=p.zeros is not None, bias=False, counters=True
                )
            return portable.multiply(
                plan, x, state["qweight"], state["scales"], state["zeros"], None, state["counters"], None, p.group_size
            )

        return {name: getattr(p, name) for name in HELD}, run

    return make


def _fitting() -> dict[str, Factory]:
    where = device.target("cuda", torch.float16)
    names = [b.name for b in kernels.BACKENDS if b is not plain.BACKEND and b.why_not(where, None) is None]
    return {f"w4plugin-{name}": whole(name) for name in names}


def _extra() -> dict[str, Factory]:
    path = os.environ.get("EXTRA_PEERS")
    if not path:
        return {}
    sys.path.insert(0, str(Path(path).resolve().parent))
    peers: dict[str, Factory] = runpy.run_path(path)["PEERS"]
    return peers


PEERS: dict[str, Factory] = {
    **(_fitting() if torch.cuda.is_available() else {}),
    "w4plugin-fused": path(dense=False),
    "w4plugin-dense": path(dense=True),
    **_extra(),
}
