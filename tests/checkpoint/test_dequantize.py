"""Dequantise: the weights that the producing tools themselves compute, streamed and without a trace of packing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint import models
from tests.formats import samples
from tests.formats.samples import truth
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.dequantize import dequantize
from w4plugin.checkpoint.output import Request
from w4plugin.checkpoint.repack import repack
from w4plugin.checkpoint.verify import verify
from w4plugin.errors import UnsupportedError, UsageError


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each weight as float16 [out, in], with -0 as 0: what reference.json holds."""
    return {
        name.removesuffix(".weight"): hashlib.sha256((t.half() + 0.0).numpy().tobytes()).hexdigest()
        for name, t in load_file(folder / "model.safetensors").items()
        if name.endswith(".weight") and t.ndim == 2
    }


@pytest.mark.parametrize("source", models.REAL, ids=lambda p: p.name)
def test_real_checkpoints_give_their_tools_own_weights(source: Path, tmp_path: Path) -> None:
    want = json.loads((source / "reference.json").read_text())
    dequantize(source, tmp_path / "out")
    found = hashes(tmp_path / "out")
    assert {name: found[name] for name in want} == want
    if source.name not in models.MIXED:
        repack(source, tmp_path / "packed")
        dequantize(tmp_path / "packed", tmp_path / "again")
        again = hashes(tmp_path / "again")
        assert {name: again[name] for name in want} == want


def test_nothing_of_the_packing_stays(tmp_path: Path) -> None:
    source = models.awq(tmp_path / "in", count=6, shards=2)
    report = dequantize(source, Request(tmp_path / "out", max_shard_size="8KB"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == models.CONFIG
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert not checkpoint.census.modules
    assert checkpoint.quant_config.method is None
    assert len(report["files"]) > 1
    assert set(checkpoint.headers) == {*models.plain(), *(f"{models.name(i)}.weight" for i in range(6))}
    assert (tmp_path / "out" / "README.md").read_text().startswith("---\n")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", torch.float32])
def test_one_dtype_for_every_floating_tensor(tmp_path: Path, dtype: str | torch.dtype) -> None:
    t = truth(lowest=1)
    bias = torch.arange(32).half()
    tensors = {**models.layers({models.name(0): samples.pack_gptq(t)}), **models.plain(), "ids": torch.arange(3)}
    tensors[f"{models.name(0)}.bias"] = bias
    source = models.folder(tmp_path / "in", tensors, samples.gptq_config(t))
    dequantize(source, tmp_path / "out", dtype=dtype)
    want = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for n, t in after.items() if n != "ids"} == {want}
    assert after["ids"].dtype == torch.int64
    assert torch.equal(after[f"{models.name(0)}.weight"], models.exact(t).T.to(want))
    assert torch.equal(after[f"{models.name(0)}.bias"], bias.to(want))
    assert verify(source, tmp_path / "out")["ok"]


def test_a_zero_bias_stays(tmp_path: Path) -> None:
    t = truth(lowest=1)
    tensors = {
        **models.layers({models.name(0): samples.pack_gptq(t)}),
        f"{models.name(0)}.bias": torch.zeros(32).half(),
    }
    source = models.folder(tmp_path / "in", tensors, samples.gptq_config(t))
    dequantize(source, tmp_path / "out")
    assert f"{models.name(0)}.bias" in load_file(tmp_path / "out" / "model.safetensors")
    assert verify(source, tmp_path / "out")["ok"]


def test_a_value_beyond_the_dtype_is_refused(tmp_path: Path) -> None:
    t = truth(lowest=1, dtype=torch.float32)
    t.s[0, 0] = 1e30
    tensors = models.layers({models.name(0): samples.pack_gptq(t)})
    source = models.folder(tmp_path / "in", tensors, samples.gptq_config(t))
    with pytest.raises(UnsupportedError, match=r"mlp\.down_proj\.weight: got values beyond the range of F16.*--dtype"):
        dequantize(source, tmp_path / "out", dtype="float16")
    assert not list(tmp_path.glob("out*"))
    dequantize(source, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")[f"{models.name(0)}.weight"].dtype == torch.float32
    assert verify(source, tmp_path / "out")["ok"]


def test_a_plain_value_beyond_the_dtype_is_refused_and_infinity_is_not(tmp_path: Path) -> None:
    t = truth(lowest=1)
    for value, fails in ((1e30, True), (float("inf"), False)):
        tensors = {**models.layers({models.name(0): samples.pack_gptq(t)}), "mask": torch.tensor([value])}
        source = models.folder(tmp_path / f"in{fails}", tensors, samples.gptq_config(t))
        if fails:
            with pytest.raises(UnsupportedError, match="mask"):
                dequantize(source, tmp_path / "no", dtype="float16")
        else:
            dequantize(source, tmp_path / "yes", dtype="float16")


def test_plain_checkpoints_and_strange_dtypes(tmp_path: Path) -> None:
    source = models.folder(tmp_path / "in", models.plain(), None)
    with pytest.raises(UnsupportedError, match="no 4-bit module"):
        dequantize(source, tmp_path / "out")
    with pytest.raises(UsageError, match="--dtype"):
        dequantize(models.awq(tmp_path / "awq"), tmp_path / "out", dtype="int8")


def test_h11_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Peak memory of a repack of 4 and of 16 layers of 2 MB, in a process of its own each."""
    import subprocess
    import sys

    script = """
import resource, sys
import torch, numpy
from pathlib import Path
from huggingface_hub import ModelCard, split_state_dict_into_shards_factory
from w4plugin.checkpoint.output import Request
from w4plugin.checkpoint import bounded
from w4plugin.checkpoint.repack import repack
from w4plugin.checkpoint.dequantize import dequantize
bounded.BUDGET = 32 << 20
repack(sys.argv[1], Request(Path(sys.argv[3] + ".warm")))
dequantize(sys.argv[1], Request(Path(sys.argv[3] + ".warm2")))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
repack(sys.argv[2], Request(Path(sys.argv[3])))
dequantize(sys.argv[2], Request(Path(sys.argv[3] + ".plain")))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    g = torch.Generator().manual_seed(0)
    grown = {}
    for count in (2, 4, 24):
        packed = {}
        for i in range(count):
            packed[models.name(i)] = {
                "qweight": torch.randint(-(2**31), 2**31 - 1, (1024, 512), dtype=torch.int32, generator=g),
                "qzeros": torch.randint(-(2**31), 2**31 - 1, (8, 512), dtype=torch.int32, generator=g),
                "scales": torch.rand(8, 4096, generator=g).half(),
            }
        config = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
        models.folder(tmp_path / f"in{count}", models.layers(packed), config, shards=2)
    for count in (4, 24):
        arguments = [tmp_path / "in2", tmp_path / f"in{count}", tmp_path / f"out{count}"]
        done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True,
                              check=True)  # fmt: skip
        grown[count] = int(done.stdout) / 1024
    # 20 more layers are 46 MB packed and 168 MB plain: anything that kept them would show
    assert grown[24] - grown[4] < 24, grown
