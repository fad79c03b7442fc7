"""Convert an AWQ checkpoint to GPTQ, and look at one weight on both sides.

    python examples/awq_to_gptq.py MODEL OUT

AWQ packs eight outputs a word in the order 0 2 4 6 1 3 5 7, GPTQ eight inputs a word in order: other words, the same
codes, zero points and scales. MODEL is a folder or a hub id.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import w4plugin


def main(model: str, out: Path) -> None:
    w4plugin.repack(model, out, to="gptq_v2")
    awq, gptq = w4plugin.open(model), w4plugin.open(out)
    name = awq.modules[0].name
    for side in (awq, gptq):
        module = next(m for m in side.modules if m.name == name)
        words = side.tensor(module.tensors["qweight"])
        print(f"{module.format}: {name}.qweight {list(words.shape)}, first word {int(words[0, 0]) & 0xFFFFFFFF:#010x}")

    one, other = awq.weight(name), gptq.weight(name)
    assert all(torch.equal(one.tensors()[field], other.tensors()[field]) for field in ("qweight", "scales", "zeros"))
    assert torch.equal(one.dequantize(), other.dequantize())
    proof = w4plugin.verify(model, out)
    assert proof["ok"], proof["mismatches"]
    print(f"the same codes, zero points and scales in {proof['modules']} modules")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
