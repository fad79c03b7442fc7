"""A plain checkpoint as a packed one, round to nearest: no calibration data, so calibrated checkpoints are better ones.

Which layers: two-dimensional ``weight`` tensors inside the decoder blocks. Embeddings, heads, norms, routers and vision
towers stay plain unless a pattern asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from w4plugin.checkpoint import output
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.output import Request, Work
from w4plugin.checkpoint.prediction import Sizes, predict
from w4plugin.checkpoint.repack import DEFAULT_FORMAT, ELEMENTS, Selection, facts_of
from w4plugin.checkpoint.stream import Job, Product, copy_job
from w4plugin.errors import UnsupportedError, UsageError, W4Error
from w4plugin.formats import registry
from w4plugin.formats.format import Decoded, Layer, Module
from w4plugin.note import Note
from w4plugin.packing import NIBBLES
from w4plugin.quantize import quantize as quantize_weight
from w4plugin.tensor import W4Tensor

IN_A_BLOCK = re.compile(r"(^|\.)(layers|h|blocks|block)\.\d+\.")
NOT_DECODER = re.compile(
    r"(^|\.)(visual|vision\w*|image\w*|audio\w*|multi_modal_projector|mm_projector|mtp|resampler|encoder)\."
)
NOT_A_LINEAR = re.compile(
    r"(^|\.)(gate|router|shared_expert_gate|wg|\w*embed\w*|wte|wpe|\w*norm\w*|ln_\w+|conv\w*|lora_\w+)$"
)
"""Last parts of names: routers decide by small differences, embeddings are looked up, norms and convolutions are not
Linear layers."""

FLOATS = ("F16", "BF16", "F32")


def quantize(
    model: str | Path | Checkpoint,
    out: str | Path | Request,
    *,
    to: str = DEFAULT_FORMAT,
    group_size: int = 128,
    sym: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> dict[str, Any]:
    """Quantise the Linear layers of a plain checkpoint's decoder.

    Args:
        model: a folder, a hub id, or an opened checkpoint.
        out: the folder to create, or a :class:`Request` that says more about how.
        to: registry name of the format to write.
        group_size: rows that share a scale; -1 means all.
        sym: fix the zero point at 8.
        include: shell patterns of layer names to quantise instead of the usual ones.
        exclude: shell patterns of layers to leave out.

    Returns:
        The report; see ``report.schema.json``.

    Raises:
        UsageError: no format is called ``to``, or no layer fits.
        UnsupportedError: the checkpoint is quantised already, or a layer's shape does not allow it.
    """
    registry.writer(to)
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
    request = out if isinstance(out, Request) else Request(Path(out))
    census = checkpoint.census
    if census.modules or census.other_width or checkpoint.quant_config.method is not None:
        raise UnsupportedError(
            checkpoint.source.label(), got="a quantised checkpoint", wanted="a plain one",
            todo="`w4plugin repack` rewrites it; `w4plugin dequantize` makes it plain.",
        )  # fmt: skip
    if group_size != -1 and (group_size < NIBBLES or group_size % NIBBLES):
        raise UsageError("--group-size", got=str(group_size), wanted="-1, or a multiple of 8")
    names = list(census.plain_layers)
    selected = Selection(include, exclude)
    selected.require_used(names)
    chosen = [name for name in names if selected(name) and (include or is_decoder_linear(name))]
    fitting = [name for name in chosen if _fits(checkpoint, name)]
    if not fitting:
        raise UsageError(
            checkpoint.source.label(), got="no layer to quantise", wanted="Linear layers in the decoder's blocks",
            todo="--include names others.",
        )  # fmt: skip
    _require_untied(checkpoint, fitting)
    notes = [_kept(checkpoint, name) for name in chosen if name not in fitting]
    jobs = [_job(checkpoint, name, to, (group_size, sym), request.device) for name in fitting]
    taken = {f"{name}.weight" for name in fitting}
    jobs += [copy_job(checkpoint, name) for name in checkpoint.headers if name not in taken]
    plain = [name for name in names if name not in fitting]

    def config(facts: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        return registry.quantization_config(to, [Layer(n, **facts[n]["layer"]) for n in fitting], plain)

    options = {"to": to, "group_size": group_size, "sym": sym, "include": list(include), "exclude": list(exclude)}
    return output.write(checkpoint, Work("quantize", options, jobs, config, {}, notes, {}), request)


def is_decoder_linear(name: str) -> bool:
    """Whether a layer of that name is quantised without being asked for."""
    return bool(IN_A_BLOCK.search(name)) and not NOT_DECODER.search(name) and not NOT_A_LINEAR.search(name)


def _fits(checkpoint: Checkpoint, name: str) -> bool:
    header = checkpoint.headers[f"{name}.weight"]
    return header.dtype in FLOATS and header.shape[1] % NIBBLES == 0 and min(header.shape) >= NIBBLES


def _kept(checkpoint: Checkpoint, name: str) -> Note:
    header = checkpoint.headers[f"{name}.weight"]
    return Note("warning", name, f"{header.dtype} {list(header.shape)} cannot be packed and stays plain")


def _require_untied(checkpoint: Checkpoint, names: Sequence[str]) -> None:
    """A tied head is the embedding: packed, the embedding would still be needed."""
    heads = [name for name in names if name.rpartition(".")[2] == "lm_head"]
    if heads and checkpoint.config.get("tie_word_embeddings"):
        raise UnsupportedError(heads[0], got="a head tied to the embeddings", wanted="a head of its own, to pack it")


def _job(checkpoint: Checkpoint, name: str, to: str, grid: tuple[int, bool], device: str) -> Job:
    group_size, sym = grid
    full = f"{name}.weight"
    N, K = checkpoint.headers[full].shape
    size = checkpoint.nbytes(full)
    module = Module(name, "plain", 16, K, N, None, {"weight": full})

    def make() -> Product:
        stored = checkpoint.tensor(full).to(device)
        try:
            weight = _in_cuts(stored, group_size, sym)
            written = registry.write_module(to, weight)
        except W4Error as fault:
            raise fault.at(full) from fault
        facts = facts_of(module, Decoded(weight, zero_rule="symmetric" if sym else "true"))
        return Product(
            {f"{name}.{s}": t for s, t in written.items()}, {**facts, "from": checkpoint.headers[full].dtype}
        )

    groups = 1 if group_size == -1 else -(-K // group_size)
    predicted = predict(name, to, Sizes((), K, N, groups, "F16", sym, act_order=False))
    return Job(name, predicted, make, 2 * size + 32 * ELEMENTS, size)


def _in_cuts(stored: Tensor, group_size: int, sym: bool) -> W4Tensor:
    """The quantised ``[N, K]`` weight, a few columns at a time: the quantiser works in several float32 copies."""
    step = max(1, ELEMENTS // stored.shape[1])
    return W4Tensor.cat_n([quantize_weight(cut.t(), group_size, sym=sym) for cut in stored.split(step)])
