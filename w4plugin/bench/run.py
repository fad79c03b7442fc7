"""Measures every backend that takes this device, and the dense library, on layers of well-known models."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4plugin.bench import timing
from w4plugin.errors import UnsupportedError
from w4plugin.kernels import device as hardware
from w4plugin.kernels import prepare, registry
from w4plugin.tensor import W4Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

MODELS = {
    "llama-3-8b": [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)],
    "llama-3-70b": [(8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)],
    "qwen2.5-7b": [(3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)],
    "qwen2.5-32b": [(5120, 7168), (5120, 5120), (5120, 55296), (27648, 5120)],
    "smollm2-135m": [(576, 960), (576, 576), (576, 3072), (1536, 576)],
}
"""(K, N) of the fused q/k/v, output, fused gate/up and down projections."""

MS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Rows of x."""

Row = dict[str, Any]
State = dict[str, Any]
Run = Callable[[State, Tensor], Tensor]
Factory = Callable[[W4Tensor, torch.dtype], tuple[State, Run]]
"""A weight and the activations' dtype to the tensors a kernel reads, and the call."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        shapes: (K, N) of each weight.
        ms: rows of x.
        dtype: key of DTYPES.
        group_size: rows in a group; a weight whose K it does not divide takes the next smaller of 128, 64, 32, 16.
        asym: with zero points.
        device: "cuda" or "cpu".
        cold_mb: rotate copies of a weight through so many MiB, so that it comes from memory.
        rep_ms: repeat a point at least so long.
    """

    shapes: tuple[tuple[int, int], ...]
    ms: tuple[int, ...] = MS
    dtype: str = "fp16"
    group_size: int = 128
    asym: bool = False
    device: str = "cuda"
    cold_mb: float = 150
    rep_ms: float = 30


def dense_name(device: str) -> str:
    """What rows call the dense library."""
    return "dense" if device == "cpu" or torch.version.hip else "cublas"


def kernels_here(plan: Plan) -> dict[str, Factory]:
    """The dense library, and each backend that gives no reason against this device."""
    where = hardware.target(plan.device, DTYPES[plan.dtype])
    left_out = () if plan.device == "cpu" else ("plain",)  # on a GPU it serves only what no kernel takes
    names = [name for name, against in registry.reasons(where).items() if against is None and name not in left_out]
    return {dense_name(plan.device): dense, **{f"w4plugin-{name}": backend(name) for name in names}}


def dense(weight: W4Tensor, dtype: torch.dtype) -> tuple[State, Run]:
    """A plain product with the dequantised weight."""
    return {"w": weight.dequantize(dtype).t().contiguous()}, lambda state, x: torch.nn.functional.linear(x, state["w"])


def backend(name: str) -> Factory:
    """A backend as a user gets it, through the operator."""

    def make(weight: W4Tensor, dtype: torch.dtype) -> tuple[State, Run]:
        p = prepare(weight, dtype=dtype, backend=name)
        op: Callable[..., Tensor] = torch.ops.w4plugin.w4a16_linear

        def run(s: State, x: Tensor) -> Tensor:
            return op(x, s["qweight"], s["scales"], s["zeros"], None, s["counters"], None, p.N, p.group_size, name)

        return {field: getattr(p, field) for field in ("qweight", "scales", "zeros", "counters")}, run

    return make


def measure(plan: Plan, factories: Mapping[str, Factory], tell: Callable[[list[Row]], None]) -> list[Row]:
    """Time and error of every kernel at every point; ``tell`` gets the rows of each shape when they are done.

    A kernel that fails at a point is left out there, with a row that says why under "failed".
    """
    dtype, rows = DTYPES[plan.dtype], []
    for k, n in plan.shapes:
        group = next((g for g in (plan.group_size, 128, 64, 32, 16) if g <= plan.group_size and k % g == 0), k)
        weight = random_weight(k, n, group, plan.asym, dtype, plan.device)
        exact = weight.dequantize(torch.float32)
        here: list[Row] = []
        for name, factory in factories.items():
            here += _one_kernel(plan, name, factory, weight, exact, group)
        tell(here)
        rows += here
    return rows


def _one_kernel(plan: Plan, name: str, factory: Factory, weight: W4Tensor, exact: Tensor, group: int) -> list[Row]:
    dtype, rows = DTYPES[plan.dtype], []
    at: Row = {"peer": name, "K": weight.K, "N": weight.N, "G": group}
    try:
        state, run = factory(weight, dtype)
    except UnsupportedError as failure:
        return [{**at, "M": m, "failed": str(failure)} for m in plan.ms]
    held = [t for t in state.values() if isinstance(t, Tensor)]
    size = sum(t.numel() * t.element_size() for t in held)
    copies = timing.cold_copies(size, plan.cold_mb)
    states = [state] + [
        {key: t.clone() if isinstance(t, Tensor) else t for key, t in state.items()} for _ in range(copies - 1)
    ]
    for m in plan.ms:
        row: Row = {**at, "M": m}
        generator = torch.Generator(plan.device).manual_seed(m)
        x = (torch.randn(m, weight.K, device=plan.device, generator=generator) * 0.5).to(dtype)
        want = x[:64].float() @ exact
        try:
            error = float((run(states[0], x)[:64].float() - want).abs().max() / want.abs().max())
            us = timing.microseconds(lambda i, x=x: run(states[i], x), copies, plan.rep_ms, plan.device)  # type: ignore[misc]
        except Exception as failure:  # of a peer's kernel, or out of memory: a bench goes on without the point
            if "CUDA error" in str(failure):
                raise
            rows.append({**row, "failed": f"{type(failure).__name__}: {str(failure)[:200]}"})
            continue
        rows.append({**row, "us": us, "rel_err": error})
    return rows


def random_weight(k: int, n: int, group: int, asym: bool, dtype: torch.dtype, device: str) -> W4Tensor:
    """Random codes and scales of a trained weight's size."""
    g = torch.Generator(device).manual_seed(7 * k + n)
    words = torch.randint(-(2**31), 2**31, (k // 8, n), generator=g, device=device, dtype=torch.int64).to(torch.int32)
    scales = ((torch.rand(k // group, n, generator=g, device=device) + 0.5) * 0.01).to(dtype)
    zeros = torch.randint(0, 16, (k // group, n), generator=g, device=device, dtype=torch.uint8) if asym else None
    return W4Tensor(words, scales, zeros, None, group)


def facts(device: str, dtype: str) -> dict[str, Any]:
    """What a result says about the machine: names, versions, and the two rates that make its roofline."""
    if device == "cpu":
        described: dict[str, Any] = {"device": cpu_name(), "arch": "cpu", "cores": torch.get_num_threads()}
    else:
        properties = torch.cuda.get_device_properties(0)
        described = {
            "device": properties.name,
            "arch": hardware.arch(torch.device("cuda", 0)),
            "sms": properties.multi_processor_count,
            "driver": driver(),
            "cuda": torch.version.cuda,
        }
    return {
        **described,
        "torch": torch.__version__,
        "triton": hardware.triton_version(),
        "bandwidth_bytes_per_s": timing.bandwidth(device),
        "matrix_ops_per_s": timing.matrix_rate(DTYPES[dtype], device),
    }


def cpu_name() -> str:
    """As the kernel tells it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def driver() -> str | None:
    """Release of the GPU's driver, None where nobody says."""
    kernel_module = Path("/proc/driver/nvidia/version")
    if kernel_module.exists():
        found = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", kernel_module.read_text())
        if found is not None:
            return found.group(1)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
