"""A checkpoint's modules by SGLang's names: the vLLM plugin's inventory, opened without vLLM."""

from __future__ import annotations

from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.pickled import TORCH_DTYPE
from w4plugin.formats.format import Module
from w4plugin.runtime.sglang import host
from w4plugin.runtime.vllm.inventory import Inventory, Kind, Part


def opened(model: str, revision: str | None) -> Inventory:
    """Read the headers of a model's files.

    Raises:
        W4Error: the model cannot be opened, a shard is missing, or a module is of a kind that cannot be served.
    """
    cache = host.setting("download_dir")
    checkpoint = Checkpoint.open(model, revision=revision, cache_dir=cache, headers_only=True)
    found = Inventory(model, revision, cache, bool(checkpoint.source.remote), checkpoint.quant_config)
    found.biases = frozenset(name.removesuffix(".bias") for name in checkpoint.headers if name.endswith(".bias"))
    census = checkpoint.census
    found.parts.update({m.name: _packed(checkpoint, m, "int4") for m in census.modules})
    found.parts.update({m.name: _packed(checkpoint, m, "wide") for m in census.other_width})
    for name, header in checkpoint.headers.items():
        owner, _, suffix = name.rpartition(".")
        if suffix == "weight" and owner not in found.parts and len(header.shape) == 2:
            dtypes = {"weight": TORCH_DTYPE[header.dtype]}
            found.parts[owner] = Part(owner, "plain", shape=tuple(header.shape), dtypes=dtypes)
    for note in (*checkpoint.notes, *census.notes):
        if note.level != "info":
            host.logger.warning("%s", note)
    return found


def _packed(checkpoint: Checkpoint, module: Module, kind: Kind) -> Part:
    own = {suffix: name for suffix, name in module.tensors.items() if suffix != "bias"}
    dtypes = {suffix: TORCH_DTYPE[checkpoint.headers[name].dtype] for suffix, name in own.items()}
    return Part(module.name, kind, module, dtypes=dtypes)
