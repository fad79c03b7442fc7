"""Words of eight nibbles, against bits counted in Python integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from w4plugin.errors import CorruptError, UnsupportedError
from w4plugin.packing import AWQ_ORDER, SEQUENTIAL, columns_to_rows, pack, pack_padded, rows_to_columns, unpack

ORDERS = {"sequential": SEQUENTIAL, "awq": AWQ_ORDER}


def random_words(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def nibble(word: int, i: int) -> int:
    return (word & 0xFFFFFFFF) >> (4 * i) & 15


def test_the_test_word() -> None:
    codes = torch.arange(8, dtype=torch.uint8).view(8, 1)
    assert pack(codes, 0).item() == 0x76543210
    assert pack(codes, 0, AWQ_ORDER).item() == 0x75316420


def test_bit_31_is_a_code_like_any_other() -> None:
    codes = torch.full((8, 1), 15, dtype=torch.uint8)
    assert pack(codes, 0).item() == -1
    assert torch.equal(unpack(pack(codes, 0), 0), codes)
    assert pack(torch.tensor([0, 0, 0, 0, 0, 0, 0, 8]), 0).item() == -(2**31)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_unpack_is_counting_bits(order: tuple[int, ...], dim: int) -> None:
    words = random_words(3, 2, 5)
    codes = unpack(words, dim, order)
    axis = dim % 3
    assert codes.dtype == torch.uint8
    assert codes.shape[axis] == 8 * words.shape[axis]
    for at in torch.cartesian_prod(*(torch.arange(n) for n in codes.shape)).tolist():
        word = list(at)
        word[axis] //= 8
        assert codes[tuple(at)].item() == nibble(int(words[tuple(word)]), order[at[axis] % 8])


@given(
    st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 1]), st.sampled_from(sorted(ORDERS)), st.integers(0, 99)
)
def test_pack_undoes_unpack(rows: int, columns: int, dim: int, order: str, seed: int) -> None:
    words = random_words(rows, columns, seed=seed)
    again = pack(unpack(words, dim, ORDERS[order]), dim, ORDERS[order])
    assert torch.equal(again, words)
    assert again.is_contiguous()


@pytest.mark.parametrize("size", [1, 7, 8, 9, 17])
def test_padding_fills_with_zeros(size: int) -> None:
    codes = torch.full((2, size), 15, dtype=torch.uint8)
    words = pack_padded(codes, 1)
    assert words.shape == (2, -(-size // 8))
    back = unpack(words, 1)
    assert torch.equal(back[:, :size], codes)
    assert not bool(back[:, size:].any())


def test_sizes_that_fill_no_word() -> None:
    with pytest.raises(UnsupportedError, match="multiple of 8"):
        pack(torch.zeros(9, 2, dtype=torch.uint8), 0)
    with pytest.raises(UnsupportedError, match="12 rows"):
        columns_to_rows(random_words(12, 2), AWQ_ORDER)
    with pytest.raises(UnsupportedError, match="12 columns"):
        rows_to_columns(random_words(2, 12), AWQ_ORDER)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_words_of_another_dtype(dtype: torch.dtype) -> None:
    words = torch.zeros(8, 8).to(dtype)
    for refuse in (
        lambda: unpack(words, 0),
        lambda: columns_to_rows(words, AWQ_ORDER),
        lambda: rows_to_columns(words, AWQ_ORDER),
    ):
        with pytest.raises(CorruptError, match=r"torch\.int32"):
            refuse()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("shape", [(8, 1), (16, 3), (64, 8), (2, 24, 5), (3, 8, 2), (1024, 700)])
def test_transposition_is_unpack_and_pack(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    words = random_words(*shape)
    wanted = pack(unpack(words, -1, order), -2)
    turned = columns_to_rows(words, order)
    assert torch.equal(turned, wanted)
    assert turned.is_contiguous()
    assert torch.equal(rows_to_columns(turned, order), words)


def test_transposition_of_a_view_leaves_its_source_alone() -> None:
    words = random_words(16, 12)
    before = words.clone()
    view = words[:, 2:10]
    assert torch.equal(columns_to_rows(view, AWQ_ORDER), columns_to_rows(view.contiguous(), AWQ_ORDER))
    assert torch.equal(rows_to_columns(view, AWQ_ORDER), rows_to_columns(view.contiguous(), AWQ_ORDER))
    assert torch.equal(words, before)


@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from(sorted(ORDERS)), st.integers(0, 99))
def test_transposition_at_any_size(blocks: int, columns: int, order: str, seed: int) -> None:
    words = random_words(8 * blocks, columns, seed=seed)
    turned = columns_to_rows(words, ORDERS[order])
    assert torch.equal(unpack(turned, 0), unpack(words, 1, ORDERS[order]))
