"""Checkpoint formats: headers to a census of modules, tensors to W4Tensor and back. Pure functions, any device."""

from w4plugin.formats.census import Census, find_modules
from w4plugin.formats.format import Candidate, Decoded, Format, Found, Layer, Module, RowShard, TensorHeader
from w4plugin.formats.registry import formats, get, quantization_config, read_module, write_module
from w4plugin.note import Note

__all__ = [
    "Candidate",
    "Census",
    "Decoded",
    "Format",
    "Found",
    "Layer",
    "Module",
    "Note",
    "RowShard",
    "TensorHeader",
    "find_modules",
    "formats",
    "get",
    "quantization_config",
    "read_module",
    "write_module",
]
