"""Every format, one line each, and those that other packages register.

A package adds a format with an entry point in the group ``w4plugin.formats`` whose value is a
:class:`~w4plugin.formats.format.Format`. Built-in formats are asked first, so that a third party can add a layout but
not take one over.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from torch import Tensor

from w4plugin.errors import UnsupportedError, UsageError
from w4plugin.formats import (
    awq,
    awq_fast,
    awq_gemv,
    compressed_tensors,
    config_spelling,
    gptq,
    gptq_v0,
    marlin,
)
from w4plugin.formats.format import Candidate, Decoded, Format, Found, Layer, Module, RowShard
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import W4Tensor

ENTRY_POINTS = "w4plugin.formats"

ROUNDED = (
    "read only: it stores rounded products; an original kernel may differ by half a unit in the last place of s * z"
)


def _gptq(candidate: Candidate) -> Found | None:
    return gptq.detect(candidate) if candidate.config.layout != "gptq_v2" else None


def _auto_round(candidate: Candidate) -> Found | None:
    return gptq.detect(candidate) if candidate.config.method == "auto-round" else None


BUILT_IN: tuple[Format, ...] = (
    Format(
        name="awq-gemv",
        title="AWQ GEMV, and llm-awq v1",
        producers="AutoAWQ, llm-awq 2023-09 to 2024-02",
        suffixes=awq_gemv.SUFFIXES,
        key=frozenset({"qweight"}),
        detect=awq_gemv.detect,
        read=awq_gemv.read,
        limits="read only: its kernels exist in AutoAWQ alone",
    ),
    Format(
        name="auto-round",
        title="AutoRound's own packing of GPTQ tensors",
        producers="AutoRound",
        suffixes=gptq.SUFFIXES,
        key=frozenset({"qweight"}),
        detect=_auto_round,
        read=gptq.read,
        write=gptq.write_auto_round,
        config=config_spelling.auto_round,
        limits="written without act-order, with float16 scales, as packing_format auto_round, which vLLM's own loader"
        " refuses",
    ),
    Format(
        name="gptq",
        title="GPTQ v1: zero - 1 stored",
        producers="GPTQ-for-LLaMa, AutoGPTQ, GPTQModel, optimum, AutoRound",
        suffixes=gptq.SUFFIXES,
        key=frozenset({"qweight"}),
        detect=_gptq,
        read=gptq.read,
        write=gptq.write_v1,
        config=functools.partial(config_spelling.gptq, "gptq"),
        limits="written without zero points of 0",
    ),
    Format(
        name="gptq_v2",
        title="GPTQ v2: true zeros; what this project writes by default",
        producers="GPTQModel, w4plugin",
        suffixes=gptq.SUFFIXES,
        key=frozenset({"qweight"}),
        detect=gptq.detect,
        read=gptq.read,
        write=gptq.write,
        config=functools.partial(config_spelling.gptq, "gptq_v2"),
    ),
    Format(
        name="awq",
        title="AWQ GEMM (also version exllama and ipex)",
        producers="AutoAWQ, GPTQModel, AutoRound, llm-awq before 2023-09",
        suffixes=awq.SUFFIXES,
        key=frozenset({"qweight"}),
        detect=awq.detect,
        read=awq.read,
        write=awq.write,
        config=config_spelling.awq,
        limits="written without act-order, N a multiple of 8, whole groups of one size, float16 scales",
    ),
    Format(
        name="compressed-tensors",
        title="compressed-tensors pack-quantized W4A16",
        producers="llm-compressor, compressed-tensors, AutoRound",
        suffixes=compressed_tensors.SUFFIXES,
        key=frozenset({"weight_packed"}),
        detect=compressed_tensors.detect,
        read=compressed_tensors.read,
        write=compressed_tensors.write,
        config=config_spelling.compressed_tensors,
        limits="written in whole groups; act-order loads only before compressed-tensors 0.19.0, which rejects actorder"
        " group and dynamic",
    ),
    Format(
        name="awq-gemv-fast",
        title="AWQ GEMV_FAST",
        producers="AutoAWQ, GPTQModel",
        suffixes=awq_fast.SUFFIXES,
        key=frozenset({"qweight"}),
        detect=awq_fast.detect,
        read=awq_fast.read,
        limits=ROUNDED,
        exact=False,
    ),
    Format(
        name="llm-awq",
        title="llm-awq v2",
        producers="llm-awq since 2024-02",
        suffixes=awq_fast.LLM_AWQ_SUFFIXES,
        key=frozenset({"qweight"}),
        detect=awq_fast.detect_llm_awq,
        read=awq_fast.read,
        limits=ROUNDED,
        exact=False,
    ),
    Format(
        name="awq-marlin",
        title="AWQ serialised in Marlin's order",
        producers="AutoAWQ",
        suffixes=marlin.AWQ_SUFFIXES,
        key=frozenset({"qweight"}),
        detect=marlin.detect_awq,
        read=marlin.read,
        limits="read only: no current tool loads it",
    ),
    Format(
        name="gptq-marlin",
        title="GPTQ serialised in Marlin's order",
        producers="AutoGPTQ <= 0.7.1, IST marlin",
        suffixes=marlin.SUFFIXES,
        key=frozenset({"B"}),
        detect=marlin.detect,
        read=marlin.read,
        limits="read only: no current tool loads it",
    ),
    Format(
        name="gptq-v0",
        title="GPTQ of March 2023: one scale an output, products for zeros",
        producers="GPTQ-for-LLaMa before 2023-03-20",
        suffixes=gptq_v0.SUFFIXES,
        key=frozenset({"qweight"}),
        detect=gptq_v0.detect,
        read=gptq_v0.read,
        limits=ROUNDED,
        exact=False,
    ),
)


@functools.cache
def formats() -> Mapping[str, Format]:
    """Every format by name: the built-in ones, then those of other packages.

    Raises:
        UsageError: another package's entry point does not load, is no Format, or takes a name that exists.
    """
    found = {f.name: f for f in BUILT_IN}
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda e: e.name):
        where = f"entry point {entry.value} of {entry.dist.name if entry.dist else 'an unknown package'}"
        todo = "uninstall or fix that package"
        try:
            value = entry.load()
        except Exception as error:  # whatever a foreign module raises while it is imported
            raise UsageError(where, got=f"{type(error).__name__}: {error}", wanted="a Format", todo=todo) from error
        if not isinstance(value, Format):
            raise UsageError(where, got=type(value).__name__, wanted="a w4plugin.formats.Format", todo=todo)
        if value.name in found:
            raise UsageError(where, got=f"the name {value.name!r}, which is taken", wanted="a new name", todo=todo)
        found[value.name] = value
    return found


def get(name: str) -> Format:
    """The format of that name.

    Raises:
        UsageError: there is none.
    """
    known = formats()
    if name not in known:
        raise UsageError("format", got=repr(name), wanted=" | ".join(known))
    return known[name]


def read_module(
    module: Module, tensors: Mapping[str, Tensor], config: QuantConfig, shard: RowShard | None = None
) -> Decoded:
    """One module's weight.

    Args:
        module: from a :class:`~w4plugin.formats.census.Census`, or made by a host.
        tensors: this module's tensors by suffix, on one device. Shapes are taken from them, so a host may hand over
            columns of a column-parallel shard, or whole experts.
        config: the checkpoint's config.
        shard: which rows the tensors hold, when a host cut them along K.

    Raises:
        CorruptError: tensors are missing, damaged or contradict each other.
        UnsupportedError: they are well formed but not 4-bit group quantisation.
    """
    if module.bits != 4:
        raise UnsupportedError(module.name, got=f"{module.bits}-bit codes", wanted="4-bit codes")
    return get(module.format).read(module, tensors, config, shard)


def write_module(format_name: str, weight: W4Tensor) -> dict[str, Tensor]:
    """The tensors of a weight by suffix; exactly the same codes, zeros and scales.

    Raises:
        UnsupportedError: the format cannot hold this weight without a loss, or can only be read.
    """
    return writer(format_name).write(weight)  # type: ignore[misc]


def quantization_config(format_name: str, layers: Sequence[Layer], plain: Sequence[str] = ()) -> dict[str, Any]:
    """The value of ``quantization_config`` for a checkpoint of that format.

    Args:
        format_name: what the layers were written as.
        layers: every packed layer.
        plain: ``Census.plain_layers``, the layers that stay plain.

    Raises:
        UnsupportedError: the format's config has no words for this mixture of layers, or it can only be read.
    """
    if not layers:
        raise UsageError(format_name, got="no layers", wanted="at least one packed layer")
    return writer(format_name).config(layers, plain)  # type: ignore[misc]


def writer(format_name: str) -> Format:
    """The format of that name, which can be written.

    Raises:
        UsageError: there is none.
        UnsupportedError: it can only be read.
    """
    known = formats()
    names = " | ".join(f.name for f in known.values() if f.write is not None)
    if format_name not in known:
        raise UsageError("format", got=repr(format_name), wanted=names)
    chosen = known[format_name]
    if chosen.write is None or chosen.config is None:
        raise UnsupportedError(format_name, got="a format that can only be read", wanted=names)
    return chosen
