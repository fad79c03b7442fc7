"""W4A16 matrix multiplication: ``prepare`` a W4Tensor once, ``linear`` it as often as you like; experts likewise."""

from w4plugin.kernels.backend import Backend, Prepared, Target
from w4plugin.kernels.moe import (
    EXPERTS_BACKENDS,
    PreparedExperts,
    experts,
    experts_reasons,
    prepare_experts,
    restore_experts,
)
from w4plugin.kernels.op import linear, prepare
from w4plugin.kernels.registry import BACKENDS, reasons

__all__ = [
    "BACKENDS",
    "EXPERTS_BACKENDS",
    "Backend",
    "Prepared",
    "PreparedExperts",
    "Target",
    "experts",
    "experts_reasons",
    "linear",
    "prepare",
    "prepare_experts",
    "reasons",
    "restore_experts",
]
