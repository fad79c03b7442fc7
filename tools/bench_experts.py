"""Layers of experts on this GPU, ours beside vLLM's kernels, in one run; a table and a JSON file.

    tools/bench_experts                                     # three models' layers, 1 to 4096 tokens, every kernel
    tools/bench_experts --layers qwen3-30b-a3b --tokens 1,4 # some of it
    tools/bench_experts --dry                               # a tiny layer on the CPU: all but the GPU's kernels
    tools/bench_experts --render benchmarks/experts-*.json  # the tables again, without a GPU

A point is the median over replays of a CUDA graph of at least 20 calls, each with a routing of its own (every token's
experts drawn evenly) and with weights rotated through copies, so that they come from memory as in a model. Activations
stay warm. Kernels are compiled beforehand, in parallel processes. A kernel that cannot run is listed with the reason.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import json
import multiprocessing
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_experts_peers as peers
import torch
from bench_experts_peers import LAYERS, TINY, Layer
from torch import Tensor

from w4plugin.bench import report, timing
from w4plugin.tensor import W4Tensor

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
CALLS = 24
"""Routings a point rotates through."""
OURS = "w4plugin"


def stack(experts: int, k: int, n: int, group: int, dtype: torch.dtype, device: str, seed: int | None) -> W4Tensor:
    """Random experts (zeros for None), symmetric, scales such that activations keep their size."""
    if seed is None:
        words = torch.zeros(experts, k // 8, n, dtype=torch.int32, device=device)
        return W4Tensor(words, torch.zeros(experts, k // group, n, dtype=dtype, device=device), None, None, group)
    g = torch.Generator(device).manual_seed(seed)
    words = torch.empty(experts, k // 8, n, dtype=torch.int32, device=device)
    words.random_(-(2**31), 2**31, generator=g)
    scales = (torch.rand(experts, k // group, n, generator=g, device=device) + 0.5) * (0.22 * k**-0.5)
    return W4Tensor(words, scales.to(dtype), None, None, group)


def weights_of(layer: Layer, dtype: torch.dtype, device: str, seed: int | None) -> tuple[W4Tensor, W4Tensor]:
    """(gate_up, down) of a layer."""
    e, h, i, g = layer.experts, layer.hidden, layer.inner, layer.group
    first = stack(e, h, 2 * i, g, dtype, device, seed)
    return first, stack(e, i, h, g, dtype, device, None if seed is None else seed + 1)


def routing(layer: Layer, tokens: int, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """(topk_weights, topk_ids), every token's experts drawn evenly."""
    g = torch.Generator(device).manual_seed(seed)
    weights, ids = torch.rand(tokens, layer.experts, generator=g, device=device).topk(layer.topk, -1)
    return weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)


def reference(layer: Layer, first: W4Tensor, second: W4Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The layer in float32 from plain weights, ``[rows of x, H]``."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in torch.unique(ids).tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        h = x[token].float() @ first.expert(e).dequantize(torch.float32)
        gate, up = h.chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ second.expert(e).dequantize(torch.float32)
        out.index_add_(0, token, y * weights[token, slot, None])
    return out


# ------------------------------------------------------------------------------------------------------- compiling


def compile_point(job: tuple[Layer, int, str, list[str]]) -> tuple[str, float]:
    """Run every kernel once on weights of zeros, in a process of its own: what it compiles stays in the caches."""
    layer, tokens, dtype, names = job
    begin = time.perf_counter()
    first, second = weights_of(layer, DTYPES[dtype], "cuda", None)
    x = torch.zeros(tokens, layer.hidden, dtype=DTYPES[dtype], device="cuda")
    weights, ids = routing(layer, tokens, "cuda", 0)
    with quiet(), peers.context():
        for name in names:
            # a kernel that cannot run says so again, and is listed, when it is measured
            with contextlib.suppress(Exception):
                peers.FACTORIES[name](layer, first, second, DTYPES[dtype], [tokens])(x, weights, ids)
                torch.cuda.synchronize()
    return f"{layer.name} T={tokens}", time.perf_counter() - begin


def compile_all(layers: list[Layer], tokens: list[int], a: argparse.Namespace, names: list[str]) -> None:
    """Every point's kernels, in parallel; with few tokens last, since they are many kinds of kernels."""
    jobs = [(layer, t, a.dtype, names) for t in tokens for layer in layers]
    begin = time.perf_counter()
    pool = concurrent.futures.ProcessPoolExecutor(a.workers, mp_context=multiprocessing.get_context("spawn"))
    pending = {pool.submit(compile_point, job): job for job in jobs}
    done, late = concurrent.futures.wait(pending, timeout=a.compile_seconds)
    for future in done:
        if future.exception() is not None:
            print(f"compiling {pending[future][:2]}: {future.exception()}", flush=True)
    for process in list((pool._processes or {}).values()) if late else []:
        process.terminate()
    pool.shutdown(wait=not late, cancel_futures=True)
    print(f"compiled {len(done)} of {len(jobs)} points in {time.perf_counter() - begin:.0f} s", flush=True)


@contextlib.contextmanager
def quiet() -> Any:
    """Libraries' words about themselves go nowhere."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


# ------------------------------------------------------------------------------------------------------- measuring


def measure_layer(
    layer: Layer, tokens: list[int], a: argparse.Namespace, names: list[str], device: str, deadline: float
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(rows, reasons of kernels that could not run)."""
    dtype, rows, reasons = DTYPES[a.dtype], [], {}
    copies = timing.cold_copies(layer.nbytes(), a.cold_mb)
    weights = [weights_of(layer, dtype, device, 10 * i) for i in range(copies)]
    wanted: dict[int, Tensor] = {}
    for name in names:
        try:
            with peers.context():
                runs = [peers.FACTORIES[name](layer, *w, dtype, tokens) for w in weights]
        except Exception as failure:
            reasons[name] = why(failure)
            print(f"{layer.name} {name}: {reasons[name]}", flush=True)
            continue
        for t in tokens:
            if time.perf_counter() > deadline:
                reasons[f"{name} T={t}"] = "out of time"
                continue
            x = torch.randn(t, layer.hidden, generator=torch.Generator(device).manual_seed(t), device=device).to(dtype)
            routes = [routing(layer, t, device, 1000 * t + i) for i in range(CALLS)]
            if t not in wanted:
                w, ids = (r[:64] for r in routes[0])
                wanted[t] = reference(layer, *weights[0], x[:64], w, ids)
            try:
                with peers.context():
                    got = runs[0](x, *routes[0])[:64].float()
                    error = float((got - wanted[t]).abs().max() / wanted[t].abs().max())
                    us = timing.microseconds(
                        lambda i, x=x, r=routes, runs=runs: runs[i % copies](x, *r[i % CALLS]), CALLS, a.rep_ms, device
                    )
            except Exception as failure:
                reasons[f"{name} T={t}"] = why(failure)
                print(f"{layer.name} {name} T={t}: {why(failure)}", flush=True)
                if "CUDA error" in str(failure):
                    raise
                continue
            rows.append({"layer": layer.name, "kernel": name, "tokens": t, "us": us, "relative_error": error})
        del runs
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows, reasons


def why(failure: BaseException) -> str:
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text[:240]}"


# ------------------------------------------------------------------------------------------------------- results


def facts(device: str) -> dict[str, Any]:
    versions = {}
    for package in ("torch", "triton", "vllm", "humming-kernels"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    made: dict[str, Any] = {"versions": versions}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        made |= {
            "device": properties.name,
            "arch": f"sm_{properties.major}{properties.minor}",
            "sms": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "bandwidth_bytes_per_s": timing.bandwidth(),
        }
    else:
        made["device"] = "cpu"
    return made


def bytes_read(layer: Layer, tokens: int) -> float:
    """Bytes of weights that an even routing reads, on average."""
    missed = (1 - layer.topk / layer.experts) ** tokens
    return layer.nbytes() * (1 - missed)


def right(cell: dict[str, Any]) -> bool:
    """Whether a kernel computed the layer, up to the rounding of 16-bit floats: faster than wrong is nothing."""
    return bool(cell["relative_error"] < 2e-2)


def print_result(result: dict[str, Any]) -> None:
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    print(f"{result['device']}, {versions}, {result['date']}, {result['dtype']}, group {result['group']}, symmetric")
    rate = result.get("bandwidth_bytes_per_s")
    for described in result["layers"]:
        layer = Layer(**described)
        here = [r for r in result["rows"] if r["layer"] == layer.name]
        names = list(dict.fromkeys(r["kernel"] for r in here))
        cells = {(r["kernel"], r["tokens"]): r for r in here}
        print(
            f"\n{layer.name} (E = {layer.experts}, topk = {layer.topk}, H = {layer.hidden}, I = {layer.inner}):"
            " microseconds a call"
        )
        widths = [max(len(name) + 2, 10) for name in names]
        head = "tokens" + "".join(n.rjust(w) for n, w in zip(names, widths, strict=True))
        print(head + "   best peer / ours" + ("   read at / limit" if rate else ""))
        for t in sorted({r["tokens"] for r in here}):
            line = str(t).rjust(6)
            for name, width in zip(names, widths, strict=True):
                cell = cells.get((name, t))
                wrong = "!" if cell is not None and not right(cell) else ""
                line += ("-" if cell is None else f"{cell['us']:.1f}{wrong}").rjust(width)
            mine = cells.get((OURS, t))
            others = [c["us"] for n in names if n != OURS and (c := cells.get((n, t))) and right(c)]
            line += (f"{min(others) / mine['us']:.2f}" if mine is not None and others else "-").rjust(19)
            if rate and mine is not None:
                line += f"{bytes_read(layer, t) / (mine['us'] * 1e-6) / rate:.2f}".rjust(18)
            print(line)
    for name, reason in result["reasons"].items():
        print(f"not measured: {name}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(LAYERS), help="default %(default)s")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="default %(default)s")
    parser.add_argument("--kernels", default=",".join(peers.FACTORIES), help="default %(default)s")
    parser.add_argument("--dtype", default="fp16", choices=sorted(DTYPES))
    parser.add_argument("--cold-mb", type=float, default=400, help="rotate copies of a layer through so many MiB")
    parser.add_argument("--rep-ms", type=float, default=20, help="replay a point at least so long")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16))
    parser.add_argument("--compile-seconds", type=float, default=70, help="most time for compiling beforehand")
    parser.add_argument("--seconds", type=float, default=150, help="start no point after so long")
    parser.add_argument("--out", default=os.environ.get("OUT") or str(ROOT / "benchmarks"))
    parser.add_argument("--tag", default="", help="part of the file's name")
    parser.add_argument("--dry", action="store_true", help="a tiny layer with the plain backend, on the CPU")
    parser.add_argument("--render", nargs="+", default=[], metavar="JSON", help="only print these")
    a = parser.parse_args()
    if a.render:
        for path in a.render:
            print_result(json.loads(Path(path).read_text()))
        return
    begin = time.perf_counter()
    device = "cpu" if a.dry else "cuda"
    layers = [TINY] if a.dry else [LAYERS[name] for name in a.layers.split(",")]
    tokens = [1, 4, 16] if a.dry else [int(t) for t in a.tokens.split(",")]
    names = a.kernels.split(",")
    if a.dry:
        peers.FACTORIES[OURS] = peers.ours("plain")
    else:
        compile_all(layers, tokens, a, names)
    rows: list[dict[str, Any]] = []
    reasons: dict[str, str] = {}
    found = facts(device)
    for layer in layers:
        more, against = measure_layer(layer, tokens, a, names, device, begin + a.seconds)
        rows += more
        reasons |= {f"{layer.name} {name}": reason for name, reason in against.items()}
        result = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["tools/bench_experts", *sys.argv[1:]]),
            **found,
            "dtype": a.dtype,
            "group": layer.group,
            "layers": [vars(one) for one in layers[: layers.index(layer) + 1]],
            "reasons": reasons,
            "rows": rows,
        }
        name = f"experts-{found['device'].replace(' ', '-')}-{a.dtype}{a.tag}.json"
        path = report.write(result, Path(a.out) / name)
    print_result(result)
    print(f"wrote {path} after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
