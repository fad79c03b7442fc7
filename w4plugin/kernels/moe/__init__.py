"""Mixture of experts: ``prepare_experts`` two stacks of W4Tensors once, run ``experts`` as often as you like."""

from w4plugin.kernels.moe.backend import PreparedExperts
from w4plugin.kernels.moe.op import (
    EXPERTS_BACKENDS,
    experts,
    experts_reasons,
    prepare_experts,
    restore_experts,
)

__all__ = ["EXPERTS_BACKENDS", "PreparedExperts", "experts", "experts_reasons", "prepare_experts", "restore_experts"]
