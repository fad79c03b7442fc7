"""The judge itself: each formula against bits and numbers placed by hand."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from tests.formats.samples import MAKERS, borrowed, pack_gptq, truth
from w4plugin import reference
from w4plugin.errors import UsageError


def numpy(t: torch.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    return reference.widen_bfloat16(t.view(torch.uint16).numpy()) if t.dtype == torch.bfloat16 else t.numpy()


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_every_format_by_the_samples_own_truth(name: str) -> None:
    for seed in range(10):
        sample = MAKERS[name](Random(seed))
        stored = "BF16" if sample.s.dtype == torch.bfloat16 else None
        tensors = {k: numpy(v) for k, v in sample.tensors.items()}
        exact = reference.dequantize(name, tensors, sample.group_size, stored=stored)
        assert np.array_equal(exact.q, sample.q.numpy())
        assert np.array_equal(exact.z, sample.z.numpy())
        assert np.array_equal(exact.s, sample.s.double().numpy())
        assert np.array_equal(exact.g, sample.g.numpy())
        wanted = (exact.q - exact.z[exact.g]) * exact.s[exact.g].astype(np.float64)
        assert np.array_equal(exact.weight().astype(np.float64), wanted)


def test_one_word_by_hand() -> None:
    word = np.array([[0x76543210]], np.uint32).view(np.int32)
    assert reference.along_rows(word).ravel().tolist() == list(range(8))
    assert reference.along_columns(word).ravel().tolist() == list(range(8))
    awq = {"qweight": np.array([[0x75316420]], np.uint32).view(np.int32), "scales": np.ones((1, 8), np.float16)}
    assert reference.dequantize("awq", awq).q.ravel().tolist() == list(range(8))
    assert reference.nibbles(np.array([-1], np.int32)).tolist() == [[15] * 8]


def test_zero_rules() -> None:
    t = truth(1, K=32, N=8, size=32)
    t.z[0] = (5, 5, 0, 5, 5, 5, 5, 15)
    tensors = {k: v.numpy() for k, v in pack_gptq(t, offset=0).items()}
    carry = {**tensors, "qzeros": borrowed(t.z).numpy()}
    assert reference.dequantize("gptq_v2", tensors).z.tolist() == t.z.tolist()
    assert reference.dequantize("gptq", tensors, zeros="true").z.tolist() == t.z.tolist()
    assert reference.dequantize("gptq", carry, zeros="minus-one-carry").z.tolist() == t.z.tolist()
    assert reference.dequantize("gptq", tensors).z.tolist() == [[6, 6, 1, 6, 6, 6, 6, 0]]
    assert reference.dequantize("gptq", tensors, zeros="symmetric").z.tolist() == [[8] * 8]
    with pytest.raises(UsageError, match="minus-one-carry"):
        reference.dequantize("gptq", tensors, zeros="plus-two")


def test_columns_and_wide_words() -> None:
    t = truth(2, K=32, N=12, size=32, lowest=1)
    tensors = {k: v.numpy() for k, v in pack_gptq(t).items()}
    wide = {**tensors, "qweight": tensors["qweight"].astype(np.int64), "qzeros": tensors["qzeros"].astype(np.int64)}
    assert np.array_equal(reference.dequantize("gptq", wide, word_bits=32).q, t.q)
    assert np.array_equal(reference.dequantize("gptq", wide, word_bits=32).z, t.z)
    assert np.array_equal(
        reference.dequantize("gptq", tensors, columns=5).weight(), reference.dequantize("gptq", tensors).weight()[:, :5]
    )


def test_bfloat16() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert np.array_equal(reference.widen_bfloat16(x.view(torch.uint16).numpy()), x.float().numpy())


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, "F16"), (torch.bfloat16, "BF16"), (torch.float32, "F32")])
def test_half_ulp_bounds_rounding_and_is_met(dtype: torch.dtype, kind: str) -> None:
    x = torch.randn(20000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.05
    x = x if kind == "F32" else x.float().double()  # torch rounds float64 to 16 bits by way of float32
    error = (x.to(dtype).double() - x).abs().numpy()
    bound = reference.half_ulp(x.numpy(), *reference._FLOATS[kind])
    assert bool((error <= bound).all())
    assert float((error / bound).max()) > 0.99


def test_unknown_format() -> None:
    with pytest.raises(UsageError, match="gptq_v2"):
        reference.dequantize("gguf", {})


def test_padded_formats_need_a_group_size() -> None:
    sample = MAKERS["awq-gemv"](Random(0))
    with pytest.raises(UsageError, match="padded shapes do not tell"):
        reference.dequantize("awq-gemv", {k: numpy(v) for k, v in sample.tensors.items()})
