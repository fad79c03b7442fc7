"""What tools/bench_repack measures: repack against a plain copy, peak memory at two sizes, inspect of a hundred shards.

The copy and the repack alternate. Each begins right after the files of its last round were deleted and a sync, reads
the same files from the page cache, and ends with its bytes on the disk. Times are the work itself; the start of Python
and torch, a second, is in the wall time beside it.

A virtual machine may give freed memory back to its host (free page reporting, after two seconds) and then pays up to a
second for every gigabyte that it touches again. So each pair is measured twice: at once after the deletion, and
``--pause`` seconds later. One round goes uncounted before the others.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HIDDEN, INNER, GROUP, VOCABULARY = 4096, 11008, 128, 32000
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, HIDDEN), "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (HIDDEN, INNER), "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}  # fmt: skip
"""The layers of a 7B Llama."""

PEER = """
import json, resource, sys, time
import torch
from compressed_tensors.entrypoints.convert import convert_checkpoint
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
source, out = sys.argv[1:3]
config = json.load(open(source + "/config.json"))["quantization_config"]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.monotonic()
converter = AutoAWQConverter.from_autoawq_config(config)
convert_checkpoint(source, out, converter, max_workers=int(sys.argv[3]), device="cpu")
import os; os.sync()
seconds = time.monotonic() - started
print(json.dumps({"seconds": seconds, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before}))
"""

INSPECT = """
import sys, time
import torch
from w4plugin.checkpoint import summary
started = time.monotonic()
result = summary.inspect(sys.argv[1])
print(time.monotonic() - started, len(result["source"]["files"]), result["tensors"], len(result["modules"]))
"""


def awq(folder: Path, layers: int, shard_bytes: int = 10**9) -> None:
    """Write an AWQ GEMM checkpoint of random words."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if not pending:
            return
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(pending, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(pending, file))
        pending.clear()

    def add(name: str, tensor: torch.Tensor) -> None:
        pending[name] = tensor
        if sum(t.nbytes for t in pending.values()) > shard_bytes:
            flush()

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)

    add("model.embed_tokens.weight", torch.randn(VOCABULARY, HIDDEN, generator=generator).half())
    for layer in range(layers):
        for leaf, (K, N) in LINEARS.items():
            name = f"model.layers.{layer}.{leaf}"
            add(f"{name}.qweight", words(K, N // 8))
            add(f"{name}.qzeros", words(K // GROUP, N // 8))
            add(f"{name}.scales", (torch.rand(K // GROUP, N, generator=generator) * 0.01 + 0.001).half())
        add(f"model.layers.{layer}.input_layernorm.weight", torch.ones(HIDDEN).half())
    add("lm_head.weight", torch.randn(VOCABULARY, HIDDEN, generator=generator).half())
    flush()
    quantization = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def many_shards(folder: Path, count: int) -> None:
    """A checkpoint of ``count`` small shards of 120 tensors each."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for shard in range(count):
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        tensors = {}
        for leaf in range(40):
            name = f"model.layers.{shard}.mlp.experts.{leaf}.down_proj"
            tensors |= {
                f"{name}.qweight": torch.zeros(8, 64, dtype=torch.int32),
                f"{name}.scales": torch.ones(2, 64).half(),
                f"{name}.qzeros": torch.zeros(2, 8, dtype=torch.int32),
            }
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def run(command: list[str]) -> tuple[str, float, int]:
    """stdout, wall seconds and peak memory (KiB) of a command that must succeed."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
        out.seek(0)
        return out.read(), time.monotonic() - started, usage.ru_maxrss


def made(kind: str, folder: Path, count: int) -> int:
    """Make a checkpoint in a process of its own and return its bytes: a child's peak memory begins at its parent's."""
    run([sys.executable, __file__, "--make", kind, str(folder), str(count)])
    return sum(p.stat().st_size for p in folder.iterdir())


def copied(source: Path, target: Path, pause: float) -> float:
    """Seconds of ``cp -r`` followed by ``sync``."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    time.sleep(pause)
    started = time.monotonic()
    subprocess.run(["cp", "-r", source, target], check=True)
    os.sync()
    return time.monotonic() - started


WORKER = """
import sys
import torch
from pathlib import Path
from w4plugin.cli.allocator import keep_freed_pages
from w4plugin.checkpoint.output import Request
from w4plugin.checkpoint.repack import repack
from huggingface_hub import ModelCard, split_state_dict_into_shards_factory
keep_freed_pages()
print("ready", flush=True)
sys.stdin.readline()
print(repack(sys.argv[1], Request(Path(sys.argv[2])))["seconds"])
"""


def repacked(source: Path, target: Path, pause: float) -> float:
    """Seconds of one repack, in a process that has started already, as ``cp`` nearly has."""
    command = [sys.executable, "-c", WORKER, str(source), str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        worker.stdout.readline()
        shutil.rmtree(target, ignore_errors=True)
        os.sync()
        time.sleep(pause)
        worker.stdin.write("go\n")
        worker.stdin.flush()
        return float(worker.stdout.readline())


def commanded(source: Path, target: Path, *flags: str) -> dict[str, float]:
    """One repack through the command line, from nothing."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    command = [sys.executable, "-m", "w4plugin", "repack", str(source), str(target), "--format", "json", *flags]
    text, wall, rss = run(command)
    return {"seconds": json.loads(text)["seconds"], "wall": wall, "rss": rss}


def baseline() -> int:
    """Peak memory (KiB) of an interpreter that has loaded torch."""
    return run([sys.executable, "-c", "import torch, numpy"])[2]


def peer(python: str, source: Path, target: Path) -> dict[str, Any]:
    """compressed-tensors' own conversion of the same checkpoint."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    workers = str(len(os.sched_getaffinity(0)))
    text, wall, _ = run([python, "-c", PEER, str(source), str(target), workers])
    version = run([python, "-c", "from importlib import metadata; print(metadata.version('compressed-tensors'))"])[0]
    found = json.loads(text.strip().splitlines()[-1])
    shutil.rmtree(target)
    return {"compressed-tensors": version.strip(), "seconds": found["seconds"], "wall": wall,
            "peak_mib_above_start": found["rss"] / 1024}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/repack.json"))
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "w4plugin-bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=5.0)
    parser.add_argument("--layers", type=int, nargs=2, default=[15, 45], help="of the two synthetic models")
    parser.add_argument("--peer", help="python of an environment with compressed-tensors")
    parser.add_argument("--alone", action="store_true", help="no peer")
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        kind, folder, count = options.make
        {"awq": awq, "shards": many_shards}[kind](Path(folder), int(count))
        return
    scratch = options.scratch
    shutil.rmtree(scratch, ignore_errors=True)
    load = os.getloadavg()[0]
    size = made("awq", scratch / "small", options.layers[0])
    pairs: dict[str, list[tuple[float, float]]] = {"at once": [], "after a pause": []}
    for counted in range(options.rounds + 1):
        for kind, pause in (("at once", 0.0), ("after a pause", options.pause)):
            copy = copied(scratch / "small", scratch / "copy", pause)
            seconds = repacked(scratch / "small", scratch / "out", pause)
            pairs[kind] += [(copy, seconds)] if counted else []
            print(f"{kind}: copy {copy:.2f} s, repack {seconds:.2f} s", file=sys.stderr, flush=True)
    whole = [commanded(scratch / "small", scratch / "out") for _ in range(3)]
    to_ct = [commanded(scratch / "small", scratch / "out", "--to", "compressed-tensors") for _ in range(3)]
    result: dict[str, Any] = {
        "what": "repack of a synthetic AWQ GEMM checkpoint to gptq_v2, against cp -r and sync of the same files",
        "date": datetime.date.today().isoformat(),
        "command": "./tools/bench_repack",
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "cpu": _cpu(),
            "memory_gb": _memory(),
            "load_before": round(load, 2),
            "load_after": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "python": platform.python_version(),
            **{p: metadata.version(p) for p in ("w4plugin", "torch", "safetensors", "numpy")},
        },
        "bytes": size,
        "rounds": options.rounds,
    }
    for kind, found in pairs.items():
        result[kind] = {
            "copy_and_sync_seconds": _spread([copy for copy, _ in found]),
            "repack_seconds": _spread([seconds for _, seconds in found]),
            "repack_mb_per_second": round(size / statistics.median(seconds for _, seconds in found) / 1e6),
            "speed_as_share_of_copy": _spread([copy / seconds for copy, seconds in found]),
        }
    result["command_wall_seconds"] = _spread([r["wall"] for r in whole])
    result["to_compressed_tensors_seconds"] = _spread([r["seconds"] for r in to_ct])
    if options.peer:
        result["peer"] = peer(options.peer, scratch / "small", scratch / "out")
        result["times_faster_than_peer"] = round(
            result["peer"]["seconds"] / result["to_compressed_tensors_seconds"]["median"], 1
        )
    shutil.rmtree(scratch / "copy")
    bare = baseline()
    large = made("awq", scratch / "large", options.layers[1])
    peaks = {}
    for name, total in (("small", size), ("large", large)):
        peak = commanded(scratch / name, scratch / "out")["rss"]
        peaks[str(total)] = round((peak - bare) / 1024)
        shutil.rmtree(scratch / "out")
    result["interpreter_with_torch_mib"] = round(bare / 1024)
    result["peak_mib_above_interpreter_by_bytes"] = peaks
    made("shards", scratch / "shards", 100)
    seconds, shards, tensors, modules = min(
        (run([sys.executable, "-c", INSPECT, str(scratch / "shards")])[0].split() for _ in range(3)),
        key=lambda found: float(found[0]),
    )
    result["inspect"] = {"shards": int(shards), "tensors": int(tensors), "modules": int(modules),
                         "seconds_after_import": round(float(seconds), 3)}  # fmt: skip
    shutil.rmtree(scratch)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def _spread(values: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "best": min(values), "worst": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
