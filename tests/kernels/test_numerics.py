"""Every backend against the float64 reference: odd sizes, all kinds of groups, exact integers, extreme floats."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.cases import Case, activations, backends, check, sample
from w4plugin import kernels
from w4plugin.quantize import quantize
from w4plugin.tensor import W4Tensor

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Fresh memory is full of NaN: what a kernel forgets to write, or reads before writing, shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def run(case: Case, ms: list[int], dtype: torch.dtype, device: torch.device, bias: bool = False) -> None:
    s = sample(case, device)
    names = backends(device, dtype, s.weight)
    assert names, "some backend must take every weight"
    for name in names:
        p = kernels.prepare(s.weight, dtype=dtype, backend=name)
        for m in ms:
            x = activations(m, case.k, dtype, device)
            b = activations(1, case.n, dtype, device, seed=2)[0] if bias else None
            check(kernels.linear(x, p, b), x, s.exact, b, f"{name} {case} M={m} {dtype}")


SMALL = [
    Case(128, 64),
    Case(256, 32, 64, False),
    Case(192, 48, 128),  # the last group is short
    Case(192, 48, 128, False, BF16),
    Case(96, 24, 32),
    Case(160, 32, 32),  # half a block of 64 rows
    Case(96, 24, 16, True, F32),
    Case(80, 40, 16, False),
    Case(576, 33, -1),
    Case(24, 8, -1, False),
    Case(8, 1, -1),
    Case(8, 1, 8),
    Case(512, 20, 256, True, F32),
    Case(320, 17, 40),  # no power of two of 16 or more divides the group
    Case(288, 32, 96),
    Case(256, 32, 32, True, F16, "act"),
    Case(192, 16, 128, False, BF16, "act"),
    Case(256, 24, 32, True, F16, "random"),
    Case(128, 24, 16, False, F32, "random"),
]
LARGE = [
    Case(4096, 4096),
    Case(4096, 4096, 128, False, BF16),
    Case(11008, 2880, 128, False),
    Case(2880, 2880, 32),
    Case(10944, 48, 64, True, F32),
    Case(576, 1536, 64),
    Case(14336, 1024, -1),
    Case(4096, 2880, 128, True, F16, "act"),
    Case(3696, 1024, 128, True, F16, "random"),
    Case(24, 2880, -1),
    Case(8, 48, -1),
    Case(11008, 1, 128),
    Case(11008, 8, 16, False, F32),
]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small_sizes(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    run(case, [1, 8, 17], dtype, device, bias=True)


@pytest.mark.parametrize("case", SMALL[:4], ids=str)
def test_float32_activations(case: Case, device: torch.device) -> None:
    run(case, [1, 5], F32, device)


@gpu
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_sizes(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    run(case, [1, 3, 8, 16, 33, 64, 72, 100, 128, 150, 190, 256, 320, 513, 1024, 2100], dtype, device, bias=True)


@pytest.mark.parametrize("m", [1, 8, 16, 33, 128])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(
    ("k", "n"), [(256, 128), pytest.param(4096, 4096, marks=gpu)], ids=lambda v: str(v) if isinstance(v, int) else None
)
def test_paired_with_reference_dequantisation(k: int, n: int, dtype: torch.dtype, m: int, device: torch.device) -> None:
    """The method's test: fused against x @ dequantised weight (never the original weight)."""
    g = torch.Generator().manual_seed(0)
    original = torch.randn(k, n, generator=g) * k**-0.5
    w = quantize(original, group_size=128, sym=False, scale_dtype=F16).to(device)
    x = torch.randn(m, k, generator=g).to(dtype).to(device)
    want = (x.double() @ w.dequantize(torch.float64)).to(dtype)
    for name in backends(device, dtype, w):
        got = kernels.linear(x, kernels.prepare(w, dtype=dtype, backend=name))
        torch.testing.assert_close(got, want, atol=2e-2, rtol=1e-2, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(136, 40, 128),
        Case(512, 24, 64, False),
        Case(96, 16, 16),
        Case(256, 16, 32, True, BF16, "act"),
        Case(128, 16, 32, True, F32, "random"),
        pytest.param(Case(11008, 2880), marks=gpu),
        pytest.param(Case(4096, 4096, -1, False), marks=gpu),
        pytest.param(Case(2880, 2880, 32, True, BF16), marks=gpu),
    ],
    ids=str,
)
def test_integers_are_exact(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Small integers times powers of two: every partial sum is exact, so only the last rounding is left: equality."""
    s = sample(case, device, integers=True)
    g = torch.Generator().manual_seed(3)
    for name in backends(device, dtype, s.weight):
        p = kernels.prepare(s.weight, dtype=dtype, backend=name)
        for m in (1, 8, 33) if case.k <= 512 else (1, 8, 16, 33, 64, 128, 500, 2100):
            x = torch.randint(-4, 5, (m, case.k), generator=g).to(dtype).to(device)
            want = (x.double() @ s.exact).to(dtype)
            got = kernels.linear(x, p)
            assert torch.equal(got, want), f"{name} {case} M={m}: {int((got != want).sum())} differ"


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("m", [2, 40, pytest.param(300, marks=gpu), pytest.param(2100, marks=gpu)])
def test_nan_and_infinity_pass_through(m: int, dtype: torch.dtype, device: torch.device) -> None:
    """As in a matmul: a NaN spoils its row, an infinity meets the sign of each weight, and 0 * inf is NaN."""
    case = Case(256, 48, 64)
    s = sample(case, device)
    x = activations(m, case.k, dtype, device)
    x[0, 5] = float("nan")
    x[1, 70] = float("inf")
    if m > 2:
        x[m - 1, 255] = float("-inf")
    want = x.double() @ s.exact
    for name in backends(device, dtype, s.weight):
        got = kernels.linear(x, kernels.prepare(s.weight, dtype=dtype, backend=name)).double()
        assert torch.equal(got.isnan(), want.isnan()), name
        assert torch.equal(got.isinf(), want.isinf()), name
        assert torch.equal(got[want.isinf()].sign(), want[want.isinf()].sign()), name


@pytest.mark.parametrize("m", [1, 8, pytest.param(64, marks=gpu), pytest.param(2100, marks=gpu)])
def test_g2_sums_that_overflow_float16_on_the_way(m: int, device: torch.device) -> None:
    """Accumulators are float32, so float16 overflows only where the true value does, and partial sums may cancel."""
    k, n = 4096, 16
    codes = torch.full((k // 8, n), -0x55555556, dtype=torch.int32)  # code 10 everywhere: W = 2 with zero 8
    w = W4Tensor(codes, torch.ones(k // 128, n, dtype=F16), None, None, 128).to(device)
    for dtype in (F16, BF16):
        for name in backends(device, dtype, w):
            p = kernels.prepare(w, dtype=dtype, backend=name)
            x = torch.full((m, k), 300.0, dtype=dtype, device=device)
            got = kernels.linear(x, p)
            want = torch.tensor(300.0 * 2 * k, dtype=torch.float64).to(dtype)  # 2.4e6: infinity in float16
            assert torch.equal(got.cpu(), want.expand(m, n)), name
            x = torch.full((m, k), 60000.0, dtype=dtype, device=device)
            x[:, k // 2 :] *= -1
            assert bool((kernels.linear(x, p) == 0).all()), f"{name}: {kernels.linear(x, p)[0, 0]}"


@pytest.mark.parametrize("m", [1, 9, pytest.param(64, marks=gpu), pytest.param(2100, marks=gpu)])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_bfloat16_range(dtype: torch.dtype, m: int, device: torch.device) -> None:
    """A product of an activation and an unscaled code may leave float32's range while the scaled sum does not."""
    s = sample(Case(256, 32, 128, True), device)
    x = activations(m, 256, dtype, device) * (2.0**124 if dtype == BF16 else 2.0**12)
    for name in backends(device, dtype, s.weight):
        check(kernels.linear(x, kernels.prepare(s.weight, dtype=dtype, backend=name)), x, s.exact, where=name)


@pytest.mark.parametrize("value", [0.0, 2.0**-24], ids=["zero", "subnormal"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("group", [16, 128])
def test_g3_zero_and_subnormal_scales(group: int, dtype: torch.dtype, value: float, device: torch.device) -> None:
    """Groups of zeros have scales that are zero or tiny; the weights are zero or tiny, not NaN."""
    s = sample(Case(256, 32, group), device)
    scales = s.weight.scales.clone()
    scales[1] = value
    w = W4Tensor(s.weight.qweight, scales, s.weight.zeros, None, group)
    exact = w.dequantize(torch.float64)
    for m in (1, 20):
        x = activations(m, 256, dtype, device)
        for name in backends(device, dtype, w):
            check(kernels.linear(x, kernels.prepare(w, dtype=dtype, backend=name)), x, exact, where=name)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_g1_activations_and_scales_of_every_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Bfloat16 activations with float16 scales and the other way round; float32 scales are not narrowed."""
    for scales in (F16, BF16, F32):
        for group in (32, 128):
            run(Case(256, 32, group, True, scales), [1, 33], dtype, device)


def test_a_long_float32_scale_is_not_narrowed(device: torch.device) -> None:
    """1 + 2^-20 times an integer: visible in the sum over equal rows only if all 24 bits of the scale arrive."""
    k, n, step = 1024, 16, 2.0**-20
    codes = torch.full((k // 8, n), 0x11111111 * 9 - 2**32, dtype=torch.int32)  # W = 1 * scale
    scales = torch.full((k // 128, n), 1 + step)
    w = W4Tensor(codes, scales, None, None, 128).to(device)
    x = torch.ones(1, k, dtype=F16, device=device)
    x[:, ::2] = -1  # sum 0 but for:
    x[0, 0] = 0  # one missing, so y = 1 + 2^-20 before the last rounding
    for name in backends(device, F16, w):
        p = kernels.prepare(w, dtype=F16, backend=name)
        assert float(kernels.linear(x, p)[0, 0]) == 1.0, name
        bias = torch.full((n,), -1.0, dtype=F16, device=device)
        got = float(kernels.linear(x, p, bias)[0, 0])
        rounded = {"plain"}  # rounds each weight to x's dtype, as documented
        assert got == step or (name in rounded and got == 0.0), f"{name}: {got}"
