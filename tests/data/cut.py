"""Cut real checkpoints down to a few modules: python tests/data/cut.py CHECKPOINTS

CHECKPOINTS holds ``tiny/NAME`` folders and ``tiny/NAME.ref.safetensors``, whose ``MODULE.weight`` is the weight that
the tool named in its metadata computes. Written are NAME/ with the configs as they were, one safetensors file with the
chosen modules' tensors byte for byte, and reference.json: SHA-256 of each chosen weight, float16 [out, in]. Adding 0
makes -0 (a code of zero times a negative scale) and 0 the same: tools that multiply by the identity yield the latter.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

CONFIGS = ("config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")

CHOSEN = (
    "model.layers.0.mlp.down_proj",
    "model.layers.0.self_attn.k_proj",
    "model.layers.1.mlp.down_proj",
    "model.layers.0.mlp.experts.0.down_proj",
    "model.layers.0.block_sparse_moe.experts.0.w2",
    "lm_head",
)
"""An MLP and an attention layer of the first block, an expert, and what may be of another width."""

PLAIN = ("model.layers.0.input_layernorm.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight")


def cut(source: Path, out: Path) -> None:
    """One checkpoint."""
    reference = load_file(f"{source}.ref.safetensors")
    (file,) = source.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    names = {n.rpartition(".")[0] for n in tensors if n.endswith((".qweight", ".weight_packed"))}
    names = {n for n in names if n in CHOSEN and f"{n}.weight" in reference}
    kept = {k: v for k, v in tensors.items() if k.rpartition(".")[0] in names or k in PLAIN}
    out.mkdir(parents=True, exist_ok=True)
    save_file(kept, out / file.name, metadata)
    for config in CONFIGS:
        if (source / config).exists():
            shutil.copyfile(source / config, out / config)
    sums = {n: hashlib.sha256((reference[f"{n}.weight"] + 0.0).numpy().tobytes()).hexdigest() for n in sorted(names)}
    (out / "reference.json").write_text(json.dumps(sums, indent=1) + "\n")


if __name__ == "__main__":
    here = Path(__file__).parent
    for folder in sorted(p for kind in ("tiny", "smol") for p in (Path(sys.argv[1]) / kind).iterdir() if p.is_dir()):
        cut(folder, here / "checkpoints" / folder.name)
