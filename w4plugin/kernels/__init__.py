"""W4A16 matrix multiplication: ``prepare`` a W4Tensor once, ``linear`` it as often as you like."""

from w4plugin.kernels.backend import Backend, Prepared, Target
from w4plugin.kernels.op import linear, prepare
from w4plugin.kernels.registry import BACKENDS, reasons

__all__ = ["BACKENDS", "Backend", "Prepared", "Target", "linear", "prepare", "reasons"]
