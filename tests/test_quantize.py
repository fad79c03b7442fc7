"""Round to nearest: the formula of the module's docstring, in Python numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.packing import unpack
from w4plugin.quantize import quantize


def random_weight(K: int, N: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(K, N, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("K", "size"), [(64, 16), (64, -1), (40, 16), (8, 128)])
def test_codes_follow_the_formula(K: int, size: int, sym: bool) -> None:
    w = random_weight(K, 6)
    found = quantize(w, size, sym=sym)
    size = K if size == -1 else size
    codes = unpack(found.qweight, 0)
    assert math.ceil(K / size) == found.G
    for g in range(found.G):
        for n in range(6):
            group = w[g * size : (g + 1) * size, n]
            low, high = np.float32(group.min()), np.float32(group.max())
            exact = max(abs(low), abs(high)) / np.float32(7) if sym else (high - low) / np.float32(15)
            scale = np.float16(exact)
            assert found.scales[g, n].item() == float(scale)
            zero = 8 if sym else int(np.clip(np.rint(-low / np.float32(scale)), 0, 15))
            assert int(found.full_zeros()[g, n]) == zero
            wanted = np.clip(np.rint(group.numpy() / np.float32(scale)) + zero, 0, 15)
            assert codes[g * size : (g + 1) * size, n].tolist() == wanted.tolist()


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 9), st.sampled_from([8, 24, 32, -1]), st.booleans(), st.integers(0, 99))
def test_error_is_at_most_one_step(eighths: int, N: int, size: int, sym: bool, seed: int) -> None:
    w = random_weight(8 * eighths, N, seed)
    found = quantize(w, size, sym=sym, scale_dtype=torch.float32)
    step = found.scales[found.groups()].double()
    error = (found.dequantize(torch.float64) - w.double()).abs()
    # half a step of rounding; a range that does not contain 0 may also be shifted by the clamped zero point
    inside = (w.double() / step + found.full_zeros()[found.groups()].double()).round()
    clipped = (inside < 0) | (inside > 15)
    assert bool((error <= step / 2 * (1 + 1e-6))[~clipped].all())


def test_a_stack_of_experts() -> None:
    w = torch.stack([random_weight(32, 4, seed) for seed in range(3)])
    found = quantize(w, 16)
    assert found.experts == 3
    for i in range(3):
        assert torch.equal(found.expert(i).dequantize(), quantize(w[i], 16).dequantize())


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_constant_groups_keep_their_value(value: float, sym: bool) -> None:
    found = quantize(torch.full((16, 3), value), 8, sym=sym)
    assert torch.allclose(found.dequantize(torch.float64), torch.full((16, 3), value, dtype=torch.float64), rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    assert quantize(random_weight(16, 3), 8, scale_dtype=dtype).scales.dtype == dtype


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value: float) -> None:
    w = random_weight(16, 3)
    w[3, 1] = value
    with pytest.raises(CorruptError, match="NaN or infinity"):
        quantize(w)


def test_scales_beyond_the_dtype() -> None:
    with pytest.raises(CorruptError, match="wider scale_dtype"):
        quantize(torch.full((8, 1), 1e7) * torch.tensor([[1.0], [-1.0]] * 4), 8)


def test_sizes_that_make_no_sense() -> None:
    with pytest.raises(UnsupportedError, match="K = 12"):
        quantize(random_weight(12, 3))
    for size in (0, -2):
        with pytest.raises(UnsupportedError, match="group_size"):
            quantize(random_weight(16, 3), size)
