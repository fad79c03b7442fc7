"""Which files of a folder hold the weights, and which file holds which tensor.

Producers name them in many ways: one ``model.safetensors``; shards with an index; ``gptq_model-4bit-128g.safetensors``;
whatever ``model_file_base_name`` says; 2023 files with a free name. The rules, in order:

1. An index decides which file holds which tensor. A tensor that lies in a file without being assigned to it is stale
   and ignored; a file that the index does not name is ignored.
2. Without an index the file named ``model.safetensors``, else the one that the config's ``model_file_base_name`` names.
3. Else every safetensors file together, apart from what is known not to be the model. A tensor that stands in two of
   them must be the same bytes in both.
4. Only when there is no safetensors file: pickles, and only when asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from w4plugin.checkpoint.json_text import parse_json
from w4plugin.checkpoint.source import Source, plain_name
from w4plugin.errors import CorruptError, StorageError, UnsafeError, UsageError
from w4plugin.note import Note

SAFETENSORS = ".safetensors"
INDEX = ".safetensors.index.json"
PICKLE = (".bin", ".pt", ".pth")
PICKLE_INDEX = ".bin.index.json"

MAX_JSON = 256 << 20
"""Bytes a config or an index may have."""

NOT_THE_MODEL = re.compile(
    r"adapter_model|autogptq_model_|consolidated|vae|controlnet|lora|embedding_model|optimizer|scheduler|training_args"
    r"|rng_state"
)
"""Begin of the names of weight files that lie beside a model without being it: adapters, AutoGPTQ's repack cache ..."""

_PART = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})(\.[a-z]+)$")


@dataclass(frozen=True)
class WeightFiles:
    """The files to open, and what an index says about them.

    Attributes:
        names: file names, sorted.
        assigned: tensor -> file, as the index has it; None without an index.
        index: name of the index file, None without one.
        pickled: the files are pickles.
        notes: what was ignored, and why.
    """

    names: tuple[str, ...]
    assigned: Mapping[str, str] | None
    index: str | None
    pickled: bool
    notes: tuple[Note, ...]


def find(source: Source, base: Any, *, allow_pickle: bool) -> WeightFiles:
    """The weight files of ``source``.

    Args:
        source: where to look.
        base: what a config gives as ``model_file_base_name``, None when it gives nothing.
        allow_pickle: whether pickles may be used.

    Raises:
        UsageError: the folder holds no weights.
        UnsafeError: it holds only pickles and they were not allowed, or an index names a path.
        CorruptError: an index that is not one, or that names files which are not there.
    """
    names = source.names()
    tensors = [n for n in names if n.endswith(SAFETENSORS)]
    indexes = [n for n in names if n.endswith(INDEX)]
    if tensors or indexes:
        return _choose(source, base, tensors, indexes, SAFETENSORS)
    pickles = [n for n in names if n.endswith(PICKLE) and not NOT_THE_MODEL.match(n)]
    indexes = [n for n in names if n.endswith(PICKLE_INDEX)]
    if not pickles and not indexes:
        other = [n for n in names if n.endswith((".gguf", ".ggml", ".onnx", ".h5", ".msgpack", ".ckpt"))]
        got = f"only {', '.join(other)}" if other else "no weight file"
        raise UsageError(str(source.folder), got=got, wanted="*.safetensors (or *.bin, *.pt with --allow-pickle)")
    if not allow_pickle:
        raise UnsafeError(
            source.label(),
            got=f"weights as pickles ({', '.join([*indexes, *pickles][:4])})",
            wanted="safetensors, since a pickle can hold code",
            todo="--allow-pickle reads tensors from them and runs nothing.",
        )
    return _choose(source, base, pickles, indexes, PICKLE)


def _choose(
    source: Source, base: Any, found: list[str], indexes: list[str], suffix: str | tuple[str, ...]
) -> WeightFiles:
    pickled = suffix is PICKLE
    notes: list[Note] = []
    index = _pick_index(indexes, base, pickled)
    if index is not None:
        assigned = _read_index(source, index, suffix)
        wanted = sorted(set(assigned.values()))
        missing = [n for n in wanted if n not in found]
        if missing:
            _refuse_missing(index, missing, assigned)
        notes += [Note("info", n, f"not named by {index}: ignored") for n in found if n not in wanted]
        return WeightFiles(tuple(wanted), assigned, index, pickled, tuple(notes))
    if isinstance(base, str) and plain_name(base):
        named = next((n for n in found if n.rpartition(".")[0] == base), None)
    else:
        named = None
    single = "model.safetensors" if not pickled else "pytorch_model.bin"
    chosen = [single] if single in found else [named] if named else [n for n in found if not NOT_THE_MODEL.match(n)]
    chosen = chosen or found
    why = f"the model is {chosen[0]}" if len(chosen) == 1 else "its name says it is not the model"
    notes += [Note("info", n, f"ignored: {why}") for n in found if n not in chosen]
    _require_all_parts(source, chosen)
    return WeightFiles(tuple(sorted(chosen)), None, None, pickled, tuple(notes))


def _pick_index(indexes: list[str], base: Any, pickled: bool) -> str | None:
    """The one index to follow."""
    usual = "pytorch_model.bin.index.json" if pickled else "model.safetensors.index.json"
    if len(indexes) <= 1:
        return indexes[0] if indexes else None
    for name in (usual, f"{base}{INDEX}"):
        if name in indexes:
            return name
    raise CorruptError(
        ", ".join(indexes), got=f"{len(indexes)} indexes", wanted="one", todo="Move away those of other models."
    )


def _read_index(source: Source, index: str, suffix: str | tuple[str, ...]) -> dict[str, str]:
    """tensor -> file, every file name checked."""
    found = read_json(source, index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CorruptError(index, got=f"weight_map {type(found).__name__}", wanted="file names by tensor")
    for name, file in found.items():
        if not isinstance(file, str):
            raise CorruptError(f"{index}: {name}", got=repr(file), wanted="a file name")
    for file in sorted(set(found.values())):
        if not plain_name(file):
            raise UnsafeError(
                index, got=f"the file name {file!r}", wanted="one plain name inside the checkpoint's own folder"
            )
        if not file.endswith(suffix):
            raise UnsafeError(index, got=f"the file name {file!r}", wanted=f"a name that ends in {suffix}")
    return found


def _refuse_missing(index: str, missing: list[str], assigned: Mapping[str, str]) -> None:
    modules = sorted({name.rpartition(".")[0] for name, file in assigned.items() if file in missing})
    shown = ", ".join(modules[:6]) + (f" and {len(modules) - 6} more" if len(modules) > 6 else "")
    raise CorruptError(
        index,
        got=f"no file {', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}",
        wanted=f"every file it names; these modules are missing: {shown}",
        todo="Download what is missing; if a single file holds the whole model, remove the index.",
    )


def _require_all_parts(source: Source, names: list[str]) -> None:
    """Shards numbered i of n must be n, with an index or without."""
    found: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := _PART.match(name):
            found.setdefault((match["stem"], int(match["parts"])), set()).add(int(match["part"]))
    for (stem, parts), have in sorted(found.items()):
        missing = [i for i in range(1, parts + 1) if i not in have]
        if missing:
            raise CorruptError(
                source.label(), got=f"{len(have)} of {parts} files {stem}-*", wanted=f"also part {missing[0]}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""), todo="Download what is missing.",
            )  # fmt: skip


def read_json(source: Source, name: str) -> dict[str, Any]:
    """The JSON object in the file ``name`` of the folder."""
    path = source.file(name)
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise CorruptError(name, got=f"{size} bytes", wanted=f"at most {MAX_JSON} for a JSON file")
        text = path.read_bytes()
    except OSError as fault:
        raise StorageError(str(path), got=fault.strerror or str(fault), wanted="a readable file") from fault
    return parse_json(name, text)
