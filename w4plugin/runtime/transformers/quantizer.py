"""The config and the quantizer that Transformers makes of a checkpoint, and through which it loads and saves it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from w4plugin.checkpoint.header import read_header
from w4plugin.checkpoint.pickled import TORCH_DTYPE
from w4plugin.errors import CorruptError, UnsupportedError, UsageError, W4Error
from w4plugin.formats import other_widths
from w4plugin.formats.census import Census, find_modules
from w4plugin.formats.format import Layer, Module, TensorHeader
from w4plugin.formats.registry import quantization_config
from w4plugin.quant_config import QuantConfig
from w4plugin.runtime.loading import decode_packed
from w4plugin.runtime.messages import OTHER_MODEL, warn
from w4plugin.runtime.transformers import placement
from w4plugin.runtime.transformers.experts import W4Experts
from w4plugin.runtime.transformers.linear import SAVED, W4Linear, linear_of
from w4plugin.runtime.transformers.placement import Place
from w4plugin.tensor import W4Tensor

NAME = "w4plugin"
"""The quantisation method's name in Transformers."""

logger = logging.getLogger(f"transformers.{NAME}")  # below the host's, so that its verbosity is ours


class W4QuantizationConfig(QuantizationConfigMixin):
    """What the checkpoint says about itself, and how to multiply.

    Args:
        configs: the checkpoint's config files by name, as :meth:`w4plugin.quant_config.QuantConfig.from_files` takes
            them.
        backend: a name from ``w4plugin env``; None means the first that fits.
    """

    def __init__(
        self,
        configs: Mapping[str, Mapping[str, Any]] | None = None,
        backend: str | None = None,
        quant_method: str = NAME,
    ) -> None:
        self.quant_method = quant_method
        self.configs = dict(configs or {})
        self.backend = backend
        self.saved: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """What config.json says: of a loaded model the GPTQ v2 config of what ``save_pretrained`` writes."""
        if self.saved is not None:
            return dict(self.saved)
        return {"quant_method": self.quant_method, "configs": self.configs, "backend": self.backend}


class W4Quantizer(HfQuantizer):
    """Puts W4Linear where the checkpoint has packed modules, and completes them once the host has loaded."""

    requires_calibration = True  # the host's word for: quantised checkpoints only
    quantization_config: W4QuantizationConfig

    def __init__(self, quantization_config: W4QuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.config = QuantConfig()
        self.census: Census | None = None
        self.places: list[Place] = []
        self.mixtures: list[placement.Layer] = []
        self.dtype = torch.get_default_dtype()
        self.uncast: dict[str, torch.dtype] = {}  # 5.19 and older leave renamed tensors in the file's dtype

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        device_map = kwargs.get("device_map")
        used = {str(device) for device in device_map.values()} if isinstance(device_map, Mapping) else set()
        if "disk" in used or ("cpu" in used and len(used) > 1):
            raise UnsupportedError(
                "device_map",
                got=f"modules on {', '.join(sorted(used))}",
                wanted="accelerators alone, or the CPU alone",
                todo="packed layers are not offloaded; use a smaller model, more GPUs, or device_map='cpu'",
            )

    def _process_model_before_weight_loading(
        self,
        model: Any,
        dtype: torch.dtype | None = None,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        headers = self._read_headers(checkpoint_files)
        self.dtype = dtype or torch.get_default_dtype()
        self.census = find_modules(headers, self.config)
        warn(self.census.notes, logger)
        self.mixtures = placement.mixtures(model, self.census)
        experts = frozenset(module.name for layer in self.mixtures for module in layer.modules.values())
        self.places = placement.places(model, self.census, experts)
        for head in placement.untie(model, [place.name for place in self.places]):
            logger.warning("%s: packed by itself, and used although config.json says tie_word_embeddings", head)
        for place in self.places:
            if place.bias and "bias" not in place.module.tensors:
                raise CorruptError(f"{place.module.name}.bias", got="no such tensor", wanted="the architecture's bias")
            model.set_submodule(place.name, self._waiting(place.module, place.K, place.N, headers))
        for layer in self.mixtures:
            made = W4Experts(model.get_submodule(layer.name), layer.words, dtype=self.dtype, where=layer.name)
            for below, module in layer.modules.items():
                made.await_projection(below, self._waiting(module, module.K, module.N, headers))
            model.set_submodule(layer.name, made)
        if not hasattr(HfQuantizer, "get_new_dtype"):
            self.uncast = {name: p.dtype for name, p in model.named_parameters() if name not in headers}

    def _waiting(self, module: Module, K: int, N: int, headers: Mapping[str, TensorHeader]) -> W4Linear:
        """A place for the tensors of one packed module."""
        own = {suffix: headers[full] for suffix, full in module.tensors.items()}
        waiting = W4Linear(K, N, dtype=self.dtype, backend=self.quantization_config.backend)
        waiting.await_tensors(own, {suffix: TORCH_DTYPE[header.dtype] for suffix, header in own.items()})
        return waiting

    def _read_headers(self, checkpoint_files: Sequence[str] | None) -> dict[str, TensorHeader]:
        if not checkpoint_files:
            raise UsageError("from_pretrained", got="weights that are not files", wanted="a model folder or a hub id")
        headers: dict[str, TensorHeader] = {}
        metadata: dict[str, str] = {}
        for file in map(Path, checkpoint_files):
            if file.suffix != ".safetensors":
                raise UnsupportedError(
                    file.name,
                    got="weights in a pickle",
                    wanted="safetensors",
                    todo="`w4plugin repack --allow-pickle` writes them",
                )
            header = read_header(file)
            metadata = {**header.metadata, **metadata}
            headers |= {name: TensorHeader(span.dtype, span.shape) for name, span in header.spans.items()}
        self.config = QuantConfig.from_files(self.quantization_config.configs, metadata)
        return headers

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Decode what was loaded, one module at a time, so that no second copy of the model is ever there."""
        for name, dtype in self.uncast.items():
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(dtype)
        layers = []
        for place in self.places:
            try:
                layer = self._complete(model, place)
            except W4Error as error:
                raise error.at(place.module.name) if place.module.name not in error.where else error from error
            layers += [] if layer is None else [layer]
        for mixture in self.mixtures:
            layers += self._complete_experts(model.get_submodule(mixture.name), mixture)
        assert self.census is not None
        wide = [place.module.name for place in self.places if place.module.bits != 4]
        self.quantization_config.saved = quantization_config(SAVED, layers, [*self.census.plain_layers, *wide])
        return model

    def _complete(self, model: Any, place: Place) -> Layer | None:
        """Fill one module; the layer as the saved config describes it, None of one that became plain."""
        waiting = model.get_submodule(place.name)
        tensors = _taken(waiting)
        bias = waiting.bias
        if bias is not None and not place.bias and not bool(bias.any()):  # 2023's GPTQ packers gave every layer one
            waiting.bias = None
        if place.module.bits != 4:
            plain = other_widths.dequantize(place.module, tensors, self.config, self.dtype)
            warn(plain.notes, logger)
            logger.warning("%s: packed in %d bits, not 4; held as a plain weight", place.name, place.module.bits)
            _replace(model, place.name, linear_of(plain.weight, waiting.bias, self.dtype))
            return None
        weight = decode_packed(place.module, tensors, self.config, logger)
        waiting.hold(weight)
        if waiting.bias is not None:
            waiting.bias.requires_grad_(False)
        return Layer.of(place.module.name, weight)

    def _complete_experts(self, waiting: W4Experts, mixture: placement.Layer) -> list[Layer]:
        """Fill one layer of experts; its projections as the saved config describes them."""
        hidden, inner = waiting.hidden_dim, waiting.intermediate_dim
        layers, weights = [], {}
        for below, module in mixture.modules.items():
            child = waiting.get_submodule(below)
            try:
                weight = decode_packed(module, _taken(child), self.config, logger)
                K, N = (inner, hidden) if below.endswith(f".{mixture.words[2]}") else (hidden, inner)
                if weight.K != K or weight.N != N:
                    got = f"K = {weight.K}, N = {weight.N}"
                    wanted = f"K = {K}, N = {N}, the architecture's"
                    raise CorruptError(module.name, got=got, wanted=wanted, todo=OTHER_MODEL)
                if child.bias is not None and bool(child.bias.any()):
                    wanted = "none, since the architecture has no place for it"
                    raise UnsupportedError(f"{module.name}.bias", got="a bias that is not zero", wanted=wanted)
            except W4Error as error:
                raise error.at(module.name) if module.name not in error.where else error from error
            weights[below] = weight
            layers.append(Layer.of(module.name, weight))
        try:
            waiting.hold(
                *(
                    W4Tensor.stack_experts([weights.pop(f"{e}.{word}") for e in range(waiting.num_experts)])
                    for word in mixture.words
                )
            )
        except W4Error as error:
            raise error.at(mixture.name) from error
        return layers

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        if isinstance(dtype, str):  # save_pretrained leaves the dtype's name in the model's config
            dtype = getattr(torch, dtype)
        for name, module in list(model.named_modules()):
            if isinstance(module, W4Linear):
                _replace(model, name, module.plain_linear(dtype))
            elif isinstance(module, W4Experts):
                _replace(model, name, module.plain_experts(dtype))
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters beside the packed weights can be trained; the weights themselves are frozen. Experts have no
        gradient with respect to their input."""
        return not self.mixtures

    @property
    def is_compileable(self) -> bool:
        return True


def _taken(waiting: W4Linear) -> dict[str, Tensor]:
    """What the host loaded into one module, its bias included."""
    tensors = waiting.take_tensors()
    return tensors if waiting.bias is None else tensors | {"bias": waiting.bias.detach()}


def _replace(model: Any, name: str, module: torch.nn.Module) -> None:
    """Put a module in another's place, with the hook by which accelerate brings its inputs to its device."""
    hook = getattr(model.get_submodule(name), "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(module, hook)
    model.set_submodule(name, module)
