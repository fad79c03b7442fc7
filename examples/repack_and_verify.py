"""Repack a real checkpoint from Python, prove that nothing changed, and compare with the tool that wrote it.

python examples/repack_and_verify.py [MODEL] [OUT]
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import w4plugin


def main(model: Path, out: Path) -> None:
    seen = w4plugin.inspect(model)
    print(f"{seen['source']['name']}: {len(seen['modules'])} packed modules, {seen['bits_per_weight']} bits a weight")

    report = w4plugin.repack(model, out / "packed")
    read_as = sorted({module["zero_rule"] for module in report["modules"]})
    print(f"repacked as {report['options']['to']}; zero points were read as {', '.join(read_as)}")

    proof = w4plugin.verify(model, out / "packed")
    print(f"verified: {proof['ok']} ({proof['modules']} modules, {proof['plain_tensors']} other tensors)")
    assert proof["ok"], proof["mismatches"]

    # the weights that AutoGPTQ itself computes, by their hashes: float16 [out, in], with -0 as 0
    want = json.loads((model / "reference.json").read_text())
    w4plugin.dequantize(out / "packed", out / "plain", dtype="float16")
    plain = w4plugin.open(out / "plain")
    for name, sha in want.items():
        weight = plain.tensor(f"{name}.weight") + 0.0
        assert hashlib.sha256(weight.numpy().tobytes()).hexdigest() == sha, name
    print(f"{len(want)} weights are bit for bit what AutoGPTQ computes")


if __name__ == "__main__":
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "llama-gptq-actorder"
    with tempfile.TemporaryDirectory() as scratch:
        main(model, Path(sys.argv[2]) if len(sys.argv) > 2 else Path(scratch))
