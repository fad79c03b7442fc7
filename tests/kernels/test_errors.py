"""Bad input: one clear error before any launch, with the argument's name and both values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.cases import Case, activations, backends, sample
from w4plugin import kernels
from w4plugin.errors import UnsupportedError, UsageError, W4Error
from w4plugin.kernels import op, portable
from w4plugin.kernels.backend import Prepared, Target
from w4plugin.tensor import W4Tensor

F16, BF16 = torch.float16, torch.bfloat16
CASE = Case(256, 48, 64)


@pytest.fixture
def prepared(device: torch.device) -> Prepared:
    return kernels.prepare(sample(CASE, device).weight, dtype=F16, backend="portable")


def refuse(x: torch.Tensor, p: Prepared, *words: str, bias: torch.Tensor | None = None) -> None:
    with pytest.raises(W4Error) as caught:
        kernels.linear(x, p, bias)
    for word in words:
        assert word in str(caught.value), f"{caught.value} does not say {word}"


def test_activations(prepared: Prepared, device: torch.device) -> None:
    refuse(torch.zeros(2, 128, dtype=F16, device=device), prepared, "x", "[2, 128]", "256")
    refuse(torch.zeros(2, 256, dtype=torch.int32, device=device), prepared, "x", "int32", "float16")
    refuse(torch.zeros(2, 256, dtype=torch.float64, device=device), prepared, "x", "float64", "float16")


def test_bias(prepared: Prepared, device: torch.device) -> None:
    x = activations(2, 256, F16, device)
    refuse(x, prepared, "bias", "[40]", "[48]", bias=torch.zeros(40, dtype=F16, device=device))
    refuse(x, prepared, "bias", "float32", "float16", bias=torch.zeros(48, device=device))


def test_weight(device: torch.device) -> None:
    """Refused at the first call, and behind a good one of the same shapes, whose plan is kept."""
    x, s = activations(2, 256, F16, device), sample(CASE, device)
    names = {"portable", "hopper"} & set(backends(device, F16, s.weight))
    assert "portable" in names
    for name in names:
        p = kernels.prepare(s.weight, dtype=F16, backend=name)
        _refuse_weights(x, p, device)
        kernels.linear(x, p)
        _refuse_weights(x, p, device)


def _refuse_weights(x: torch.Tensor, p: Prepared, device: torch.device) -> None:
    strided = torch.zeros(4, 3, 256, dtype=torch.int32, device=device)[:, :, ::2]
    refuse(x, replace(p, qweight=strided), "qweight", "strided", "contiguous")
    refuse(x, replace(p, qweight=p.qweight.long()), "qweight", "int64", "int32")
    refuse(x, replace(p, qweight=p.qweight[:2]), "qweight", "[2, 3, 128]", "[4, 3, 128]")
    refuse(x, replace(p, group_size=128), "scales", "[4, 48]", "[2, 48]", "group_size = 128")
    refuse(x, replace(p, N=32), "qweight", "[4, 3, 128]", "[4, 2, 128]")
    refuse(x, replace(p, scales=p.scales.t().contiguous().t()), "scales", "contiguous")
    assert p.zeros is not None
    refuse(x, replace(p, zeros=p.zeros[:1]), "zeros", "[1, 48]", "[4, 48]")
    refuse(x, replace(p, zeros=p.zeros.int()), "zeros", "int32", "uint8")
    refuse(x, replace(p, g_idx=torch.zeros(8, dtype=torch.int32, device=device)), "g_idx", "[8]", "[256]")
    refuse(x, replace(p, backend="fast"), "backend", "'fast'", "portable")


def test_devices(prepared: Prepared, device: torch.device) -> None:
    """Called below the dispatcher, which takes any meta tensor for a question about shapes."""
    p, x, bias = prepared, activations(2, 256, F16, device), torch.zeros(48, dtype=F16, device=device)

    def call(x: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor) -> None:
        op._impl(x, p.qweight, scales, p.zeros, p.g_idx, p.counters, bias, p.N, p.group_size, p.backend)

    for name, arguments in {
        "x": (x.to("meta"), p.scales, bias),
        "scales": (x, p.scales.to("meta"), bias),
        "bias": (x, p.scales, bias.to("meta")),
    }.items():
        with pytest.raises(UsageError) as caught:
            call(*arguments)
        assert name in str(caught.value)
        assert "meta" in str(caught.value)
        assert str(device) in str(caught.value)


@pytest.mark.gpu
def test_tensors_on_the_cpu(prepared: Prepared) -> None:
    refuse(torch.zeros(2, 256, dtype=F16), prepared, "x", "cpu", "cuda:0")


def test_cpu_weight() -> None:
    p = kernels.prepare(sample(CASE, torch.device("cpu")).weight, dtype=F16, backend="cpu")
    x = activations(2, 256, F16, torch.device("cpu"))
    refuse(x, replace(p, group_size=128), "scales", "group_size = 128")
    refuse(x.double(), p, "x", "float64")


def test_prepare(device: torch.device) -> None:
    s = sample(CASE, device)
    stack = W4Tensor.stack_experts([s.weight, s.weight])
    with pytest.raises(UsageError, match="2 experts"):
        kernels.prepare(stack, dtype=F16)
    with pytest.raises(UsageError, match="'fast'"):
        kernels.prepare(s.weight, dtype=F16, backend="fast")
    with pytest.raises(UnsupportedError, match="float64") as caught:
        kernels.prepare(s.weight, dtype=torch.float64, backend="portable")
    assert "portable:" in str(caught.value)


def test_nothing_fits_means_every_reason(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from w4plugin.kernels import registry

    fitting = [b for b in registry.BACKENDS if b.name != "plain"]
    monkeypatch.setattr(registry, "BACKENDS", tuple(fitting))
    with pytest.raises(UnsupportedError) as caught:
        kernels.prepare(sample(CASE, device).weight, dtype=torch.float64)
    for backend in fitting:
        assert f"{backend.name}: " in str(caught.value)


def test_reasons_without_a_gpu_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Target(torch.device("cuda", 0), F16, "sm_75")
    assert "sm_75" in str(portable.why_not(old, None))
    monkeypatch.setattr(portable.device, "triton_version", lambda: None)
    new = Target(torch.device("cuda", 0), F16, "sm_90")
    assert "not installed" in str(portable.why_not(new, None))
    monkeypatch.setattr(portable.device, "triton_version", lambda: "3.5.1")
    assert "3.5.1" in str(portable.why_not(new, None))
    monkeypatch.setattr(portable.device, "triton_version", lambda: "3.10.0")
    assert portable.why_not(new, None) is None
    assert "xpu" in str(portable.why_not(Target(torch.device("cpu"), F16, "xpu"), None))
    assert portable.why_not(Target(torch.device("cuda", 0), F16, "gfx942"), None) is None


def test_float32_goes_to_a_backend_that_takes_it(device: torch.device) -> None:
    assert "portable" not in backends(device, torch.float32)
    assert backends(device, torch.float32)
