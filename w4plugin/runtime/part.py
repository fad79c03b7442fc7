"""One weight of a checkpoint, as its headers show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from w4plugin.formats.format import Module

Kind = Literal["int4", "wide", "plain", "absent"]


@dataclass(frozen=True)
class Part:
    """One weight of the checkpoint in a layer of the host.

    Attributes:
        name: the module's name in the checkpoint.
        kind: "int4" packed in four bits, "wide" packed in another width, "plain" a floating-point weight, "absent".
        module: of a packed part.
        shape: (N, K) of a plain part, with a leading E of a stack of experts.
        dtypes: of each tensor that makes up the weight, by suffix; the bias is not among them, it is the layer's.
    """

    name: str
    kind: Kind
    module: Module | None = None
    shape: tuple[int, ...] = ()
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    @property
    def N(self) -> int:  # noqa: N802
        """out_features, 0 when absent."""
        return self.module.N if self.module is not None else self.shape[-2] if self.shape else 0

    @property
    def K(self) -> int:  # noqa: N802
        """in_features, 0 when absent."""
        return self.module.K if self.module is not None else self.shape[-1] if self.shape else 0

    @property
    def experts(self) -> int | None:
        """E of a stack of experts, None of a single weight."""
        if self.module is not None:
            return self.module.experts
        return self.shape[0] if len(self.shape) == 3 else None

    @property
    def group_size(self) -> int | None:
        """Rows in a group, K where one covers all; None when plain, or where only the data can tell."""
        if self.module is None or self.module.group_size is None:
            return None
        return min(self.module.group_size, self.module.K)
