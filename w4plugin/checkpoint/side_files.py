"""Everything of a model folder that is not weights: copied as it is, or left behind and said so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from w4plugin.checkpoint import disk
from w4plugin.checkpoint.checkpoint import CONFIG, QUANT_CONFIGS, Checkpoint
from w4plugin.checkpoint.source import Source
from w4plugin.checkpoint.staging import REPORT

WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".gguf", ".ggml", ".onnx", ".onnx_data", ".h5",
    ".msgpack", ".npz", ".npy", ".tflite", ".mlmodel", ".safetensors.index.json", ".bin.index.json", ".partial",
    ".incomplete", ".lock",
)  # fmt: skip
"""Ends of names that are weights, indexes of weights, or debris of a download."""

CARD = "README.md"
SOURCE_CARD = "README.source.md"

CARRIED_FOLDERS = ("additional_chat_templates",)
"""Folders that belong to a tokenizer; others (``onnx``, ``original`` ...) hold the model in another form."""


@dataclass(frozen=True)
class SideFiles:
    """What happens to the files beside the weights.

    Attributes:
        copied: target name -> source path.
        replaced: configs that describe the old quantisation; the new one stands in config.json alone.
        left: names of files and folders that are not carried over.
    """

    copied: Mapping[str, Path]
    replaced: tuple[str, ...]
    left: tuple[str, ...]


def plan(checkpoint: Checkpoint) -> SideFiles:
    """Sort the files of a checkpoint's folder."""
    source = checkpoint.source
    read = {file.name for file in checkpoint.files}
    copied: dict[str, Path] = {}
    replaced, left = [], []
    for name in source.names():
        if name in QUANT_CONFIGS:
            replaced.append(name)
        elif name.endswith(WEIGHTS):
            left += [name] if name not in read and not name.endswith(".index.json") else []
        elif name == CARD:
            copied[SOURCE_CARD] = source.file(name)
        elif name not in (CONFIG, REPORT, SOURCE_CARD):
            copied[name] = source.file(name)
    for folder in source.folders():
        if folder in CARRIED_FOLDERS:
            names = Source(source.folder / folder).names()
            copied.update({f"{folder}/{name}": source.file(name, inside=folder) for name in names})
        else:
            left.append(folder + "/")
    return SideFiles(dict(sorted(copied.items())), tuple(replaced), tuple(left))


def copy(files: SideFiles, target: Path) -> None:
    """Copy what :func:`plan` found into ``target``."""
    for name, path in files.copied.items():
        disk.make_folder((target / name).parent)
        disk.copy_file(path, target / name)
