"""A Linear whose weight stays packed.

    y[..., n] = sum_k x[..., k] * (q[k, n] - zero[g, n]) * scale[g, n] + bias[n]

It lives twice. While the host loads, its buffers are the tensors of the file, by their names there, so that the host's
own loader finds, places and counts them. ``complete`` then decodes them and holds what one kernel backend reads.
``state_dict`` always speaks GPTQ v2, whatever the backend and the format it came from: that is what ``save_pretrained``
writes, and what every tool that reads gptq_v2 can load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from w4plugin.checkpoint.pickled import SAFETENSORS_DTYPE
from w4plugin.errors import CorruptError, UnsupportedError, UsageError, W4Error
from w4plugin.formats.census import find_modules
from w4plugin.formats.format import TensorHeader
from w4plugin.formats.registry import read_module, write_module
from w4plugin.kernels import prepare
from w4plugin.kernels.backend import Groups, Prepared
from w4plugin.kernels.registry import get
from w4plugin.quant_config import QuantConfig
from w4plugin.runtime.messages import OTHER_MODEL
from w4plugin.runtime.pieces import TENSORS
from w4plugin.tensor import W4Tensor

SAVED = "gptq_v2"
"""The format that a module's ``state_dict`` speaks."""


class W4Linear(torch.nn.Module):
    """x ``[..., K]`` -> ``[..., N]`` in x's dtype.

    Args:
        in_features: K.
        out_features: N.
        dtype: of the activations to come; the bias is kept in it.
        backend: a name from ``w4plugin env``; None means the first that fits.

    Attributes:
        qweight, scales, zeros, g_idx, counters: as :class:`~w4plugin.kernels.backend.Prepared` has them, buffers that
            ``state_dict`` does not list under these meanings: it lists GPTQ v2 tensors.
        bias: ``[N]`` parameter, None without one.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    counters: Tensor | None

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype, backend: str | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.dtype, self.wanted_backend = dtype, backend
        self.backend: str | None = None
        self.group_size = 0
        self.groups: Groups | None = None
        self.awaited: tuple[str, ...] = ()
        self.register_parameter("bias", None)

    @staticmethod
    def of(weight: W4Tensor, bias: Tensor | None = None, *, dtype: torch.dtype, backend: str | None = None) -> W4Linear:
        """A complete module of a weight, on the weight's device."""
        module = W4Linear(weight.K, weight.N, dtype=dtype, backend=backend)
        if bias is not None:
            module.bias = torch.nn.Parameter(bias.to(weight.device, dtype), requires_grad=False)
        module.hold(weight)
        return module

    def await_tensors(self, headers: Mapping[str, TensorHeader], dtypes: Mapping[str, torch.dtype]) -> None:
        """Become a place for tensors of the file, on the meta device; ``bias`` is a parameter as in any Linear.

        Args:
            headers: shape of each tensor, by suffix.
            dtypes: the file's, by suffix.
        """
        for suffix, header in headers.items():
            if suffix == "bias":
                empty = torch.empty(header.shape, dtype=self.dtype, device="meta")
                self.bias = torch.nn.Parameter(empty, requires_grad=False)
            else:
                self.register_buffer(suffix, torch.empty(header.shape, dtype=dtypes[suffix], device="meta"))
        self.awaited = tuple(suffix for suffix in headers if suffix != "bias")

    def take_tensors(self) -> dict[str, Tensor]:
        """What the host loaded, by suffix, taken out of the module."""
        found: dict[str, Tensor] = {}
        for suffix in self.awaited:
            tensor = self._buffers.pop(suffix)
            if tensor is None or tensor.is_meta:
                raise CorruptError(suffix, got="no data after loading", wanted="every tensor of the layer")
            found[suffix] = tensor.detach()
        self.awaited = ()
        return found

    def hold(self, weight: W4Tensor) -> None:
        """Hold a weight from now on, in the order of the backend that fits its device.

        Raises:
            CorruptError: it has another shape.
            UnsupportedError: no backend fits.
        """
        if (self.in_features, self.out_features) != (weight.K, weight.N):
            raise CorruptError(
                "weight",
                got=f"[{weight.N}, {weight.K}]",
                wanted=f"[{self.out_features}, {self.in_features}], the architecture's",
                todo=OTHER_MODEL,
            )
        ready = prepare(weight, dtype=self.dtype, backend=self.wanted_backend)
        for name in TENSORS:
            self._buffers.pop(name, None)
            self.register_buffer(name, getattr(ready, name), persistent=False)
        self.backend, self.group_size, self.groups = ready.backend, ready.group_size, ready.groups

    def packed_weight(self) -> W4Tensor:
        """The weight as it came, bit for bit."""
        if self.backend is None:
            raise UsageError("W4Linear", got="no weight yet", wanted="a loaded module")
        tensors = {name: getattr(self, name) for name in TENSORS}
        ready = Prepared(
            backend=self.backend,
            K=self.in_features,
            N=self.out_features,
            group_size=self.group_size,
            groups=self.groups,
            **tensors,
        )
        return get(self.backend).restore(ready)

    def plain_linear(self, dtype: torch.dtype | None = None) -> torch.nn.Linear:
        """An ordinary Linear with the same weight, rounded once to ``dtype`` (None: this module's)."""
        dtype = dtype or self.dtype
        return linear_of(self.packed_weight().dequantize(dtype).t(), self.bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        return torch.ops.w4plugin.w4a16_linear(
            x,
            self.qweight,
            self.scales,
            self.zeros,
            self.g_idx,
            self.counters,
            bias,
            self.out_features,
            self.group_size,
            self.backend,
        )

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{shape}, group_size={self.group_size}, backend={self.backend}"

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            if self.__dict__.get("awaited"):  # some models initialise their children's weights, those not yet loaded
                return _initialized()
            # an AttributeError, so that hasattr() stays a question
            raise AttributeError("W4Linear has no weight: it stays packed. plain_linear() makes an ordinary Linear")
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> W4Linear:
        """``to``, ``cuda``, ``half``: scales are never cast, and another device may want another order."""
        if self.backend is None:
            return super()._apply(fn, recurse)
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.qweight.device))
        if probe.device != self.qweight.device or probe.dtype != self.dtype:
            self.dtype = probe.dtype
            self.hold(self.packed_weight().to(probe.device))
        if self.bias is not None:
            self.bias = torch.nn.Parameter(fn(self.bias.detach()), requires_grad=self.bias.requires_grad)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """GPTQ v2 tensors, on the CPU: restoring a whole model beside itself is not what a full GPU has room for."""
        if self.backend is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        for suffix, tensor in write_module(SAVED, self.packed_weight()).items():
            destination[prefix + suffix] = tensor.cpu()
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self.backend is None:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
            return
        own = ("qweight", "qzeros", "scales", "g_idx")
        wanted = own if self.bias is None else (*own, "bias")
        missing_keys += [prefix + suffix for suffix in wanted if prefix + suffix not in state_dict]
        if strict:
            direct = (key for key in state_dict if key.startswith(prefix) and "." not in key.removeprefix(prefix))
            unexpected_keys += [key for key in direct if key.removeprefix(prefix) not in wanted]
        if not all(prefix + suffix in state_dict for suffix in own):
            return
        tensors = {suffix: state_dict[prefix + suffix].detach().to(self.qweight.device) for suffix in own}
        try:
            self.hold(_decode(prefix.rstrip(".") or "W4Linear", tensors, self._nominal_group_size()))
        except W4Error as error:
            error_msgs.append(str(error))
            return
        if self.bias is not None and prefix + "bias" in state_dict:
            with torch.no_grad():
                self.bias.copy_(state_dict[prefix + "bias"])

    def _nominal_group_size(self) -> int:
        return self.group_size if self.groups is None else self.groups.group_size


def _initialized() -> Tensor:
    """Nothing, marked so that the host's initialisers leave it alone."""
    nothing = torch.empty(0)
    nothing._is_hf_initialized = True  # type: ignore[attr-defined]
    return nothing


def linear_of(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> torch.nn.Linear:
    """A Linear that holds ``weight`` ``[N, K]`` itself, frozen."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight.to(dtype).contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias.detach().to(dtype), requires_grad=False)
    return linear


def _decode(name: str, tensors: Mapping[str, Tensor], group_size: int) -> W4Tensor:
    """The weight of GPTQ v2 tensors that some ``state_dict`` held."""
    config = QuantConfig.from_dict(
        {"quant_method": "gptq", "checkpoint_format": SAVED, "bits": 4, "group_size": group_size}
    )
    headers = {f"{name}.{s}": TensorHeader(SAFETENSORS_DTYPE[t.dtype], tuple(t.shape)) for s, t in tensors.items()}
    found = find_modules(headers, config).modules
    if len(found) != 1:
        raise UnsupportedError(name, got="codes of another width", wanted="4-bit GPTQ v2 tensors")
    return read_module(found[0], tensors, config).weight
