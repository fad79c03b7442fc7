"""Where vLLM's own loaders put a weight on each rank of 1, 2, 4 and 8, against the arithmetic of tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from tests.runtime.vllm.layers import rank_of
from w4plugin.errors import CorruptError
from w4plugin.runtime.placement import Columns, cut
from w4plugin.runtime.vllm import placement
from w4plugin.tensor import W4Tensor

RANKS = [(rank, ranks) for ranks in (1, 2, 4, 8) for rank in {0, ranks // 2, ranks - 1}]
HEADS, KV_HEADS, DIM, K = 8, 2, 16, 64


def placed(layer, n: int, shard_id=None) -> Columns:
    loader = getattr(layer, "weight_loader_v2", layer.weight_loader)
    head = isinstance(layer, ParallelLMHead)
    columns = layer.num_embeddings_per_partition if head else sum(layer.output_partition_sizes)
    return placement.columns(layer, loader, columns, n, shard_id, "a layer")


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
def test_column_parallel(rank: int, ranks: int) -> None:
    with rank_of(rank, ranks):
        found = placed(ColumnParallelLinear(K, 64, bias=False), 64)
    assert found.source.tolist() == list(range(rank * 64 // ranks, (rank + 1) * 64 // ranks))


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
def test_key_heads_are_replicated_when_there_are_more_ranks(rank: int, ranks: int) -> None:
    with rank_of(rank, ranks):
        layer = QKVParallelLinear(K, DIM, HEADS, KV_HEADS, bias=False)
        parts = {s: placed(layer, n * DIM, s) for s, n in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}
        fused = placed(layer, (HEADS + 2 * KV_HEADS) * DIM)
    q, kv = HEADS // ranks, max(1, KV_HEADS // ranks)
    first_kv = rank * KV_HEADS // ranks
    columns = {
        "q": list(range(rank * q * DIM, (rank + 1) * q * DIM)),
        "k": list(range(first_kv * DIM, (first_kv + kv) * DIM)),
    }
    columns["v"] = columns["k"]
    assert {s: found.source.tolist() for s, found in parts.items()} == columns
    assert [parts[s].start for s in "qkv"] == [0, q * DIM, (q + kv) * DIM]
    offset = {"q": 0, "k": HEADS * DIM, "v": (HEADS + KV_HEADS) * DIM}
    assert fused.source.tolist() == [offset[s] + c for s in "qkv" for c in columns[s]]


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
def test_merged_columns(rank: int, ranks: int) -> None:
    with rank_of(rank, ranks):
        layer = MergedColumnParallelLinear(K, [32, 48, 64], bias=False)
        parts = [placed(layer, n, i) for i, n in enumerate((32, 48, 64))]
        spanning = placed(layer, 80, (0, 1))
    local = [n // ranks for n in (32, 48, 64)]
    assert [p.start for p in parts] == [0, local[0], local[0] + local[1]]
    assert [p.source.tolist() for p in parts] == [list(range(rank * n, (rank + 1) * n)) for n in local]
    assert spanning.source.tolist() == parts[0].source.tolist() + [32 + c for c in parts[1].source.tolist()]


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
def test_rows(rank: int, ranks: int) -> None:
    with rank_of(rank, ranks):
        layer = RowParallelLinear(96, 32, bias=False)
        found = placement.rows(layer, layer.weight_loader_v2, layer.input_size_per_partition, 96, "a layer")
    assert found == (rank * 96 // ranks, (rank + 1) * 96 // ranks)


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
def test_vocabulary_is_padded_after_its_last_word(rank: int, ranks: int) -> None:
    with rank_of(rank, ranks):
        head = ParallelLMHead(100, K)
        found = placed(head, 100)
    width = 128 // ranks
    words = range(rank * width, (rank + 1) * width)
    assert found.source.tolist() == [w if w < 100 else -1 for w in words]


def test_replicated_layer_holds_all() -> None:
    with rank_of(1, 4):
        assert placed(ReplicatedLinear(K, 40, bias=False), 40).source.tolist() == list(range(40))
        merged = MergedColumnParallelLinear(K, [24, 40], bias=False, disable_tp=True)
        assert [placed(merged, n, i).source.numel() for i, n in enumerate((24, 40))] == [24, 40]


@pytest.mark.parametrize("n", [HEADS * DIM + 8, HEADS * DIM - 8, 8])
def test_weight_of_another_width_is_refused(n: int) -> None:
    with rank_of(1, 2):
        layer = QKVParallelLinear(K, DIM, HEADS, KV_HEADS, bias=False)
        with pytest.raises(CorruptError, match=f"a layer: got N = {n}"):
            placed(layer, n, "q")


def test_rank_is_as_before_afterwards() -> None:
    with rank_of(1, 2):
        head = ParallelLMHead(100, K)
        before = (head.shard_indices, getattr(head, "tp_rank", None))
        placed(head, 100)
        with pytest.raises(CorruptError):
            placed(head, 101)
        assert (head.shard_indices, getattr(head, "tp_rank", None)) == before


def test_cut_takes_columns_and_makes_padding_zero() -> None:
    codes = torch.arange(8 * 6, dtype=torch.int32).reshape(8, 6)
    weight = W4Tensor(codes, torch.rand(2, 6), torch.randint(0, 16, (2, 6), dtype=torch.uint8), None, 32)
    plain = weight.dequantize(torch.float32)
    for source in ([2, 3, 4], [0, 1, 2, 3, 4, 5], [5, 0, 3], [4, 5, -1, -1]):
        found = cut(weight, torch.tensor(source)).dequantize(torch.float32)
        wanted = torch.stack([plain[:, c] if c >= 0 else torch.zeros(64) for c in source], 1)
        assert torch.equal(found, wanted)
        assert torch.equal(cut(plain.t(), torch.tensor(source)), wanted.t())


def test_asking_wakes_no_threads() -> None:
    """An index_put of torch on the CPU is shared among all cores: 5 ms a weight on a busy host, a second of loading."""
    with rank_of(0, 1):
        layer = ColumnParallelLinear(K, 14336, bias=False)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            found = placed(layer, 14336)
            weight = torch.zeros(14336, K)
            assert torch.equal(cut(weight, found.source), weight)
    assert not {event.key for event in seen.key_averages()} & {"aten::index_put_", "aten::_index_put_impl_"}
