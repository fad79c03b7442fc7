"""Real ranks: layers over gloo in 2, 4 and 8 processes, and an engine with two ranks on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing

from tests.runtime.vllm.checkpoints import FORMATS, Recipe, Shape, draw, plain_weight, write

ROOT = Path(__file__).parents[3]
WORLD, SIZES = 8, (2, 4, 8)
K, HEADS, KV_HEADS, DIM = 192, 8, 2, 16
EXACT = 5e-5
"""Of sums of K = 192 products of unit size in float32, in another order on every number of ranks."""

WEIGHTS = {"q_proj": HEADS * DIM, "k_proj": KV_HEADS * DIM, "v_proj": KV_HEADS * DIM, "gate_proj": K, "up_proj": K}


def _rank(rank: int, folder: Path) -> None:
    """One process: every size in turn, each time a small network as a model has it, its output whole on every rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=(folder / "port").read_text())
    torch.set_num_threads(1)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        get_tensor_model_parallel_rank,
        init_distributed_environment,
        initialize_model_parallel,
        tensor_model_parallel_all_gather,
    )
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from tests.runtime.vllm.layers import load, opened

    saved = torch.load(folder / "weights.pt")
    tensors, plain, x = saved["tensors"], saved["plain"], saved["x"]
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(WORLD, rank, "env://", rank, "gloo")
        for size in SIZES:
            os.environ["VLLM_DIST_IDENT"] = f"{os.environ['MASTER_PORT']}-{size}"  # names its shared memory
            initialize_model_parallel(size)
            made = {"quant_config": opened(folder / "checkpoint", packed), "bias": False}
            at = "model.layers.0.{}".format
            qkv = QKVParallelLinear(K, DIM, HEADS, KV_HEADS, prefix=at("qkv_proj"), **made)
            load(qkv, {s: tensors[f"{s}_proj"] for s in "qkv"})
            gate_up = MergedColumnParallelLinear(K, [K, K], prefix=at("gate_up_proj"), **made)
            load(gate_up, {0: tensors["gate_proj"], 1: tensors["up_proj"]})
            down = RowParallelLinear(K, K, prefix=at("down_proj"), **made)
            load(down, {None: tensors["down_proj"]})
            column = ColumnParallelLinear(K, K, gather_output=True, prefix=at("o_proj"), **made)
            load(column, {None: tensors["o_proj"]})
            head = ParallelLMHead(100, K, prefix="lm_head", quant_config=made["quant_config"])
            load(head, {None: tensors["lm_head"]})

            q = qkv(x)[0][:, : HEADS // size * DIM].contiguous()
            near("q", tensor_model_parallel_all_gather(q), x @ plain["q_proj"].t())
            kv_heads = max(1, KV_HEADS // size)
            first = get_tensor_model_parallel_rank() * KV_HEADS // size * DIM
            keys = qkv(x)[0][:, HEADS // size * DIM :][:, : kv_heads * DIM]
            near("k", keys, (x @ plain["k_proj"].t())[:, first : first + kv_heads * DIM])
            gate, up = gate_up(x)[0].chunk(2, -1)
            inner = (x @ plain["gate_proj"].t()) * (x @ plain["up_proj"].t())
            near("down", down(gate * up)[0], inner @ plain["down_proj"].t(), 20 * EXACT)
            near("column", column(x)[0], x @ plain["o_proj"].t())
            logits = tensor_model_parallel_all_gather(head.quant_method.apply(head, x))
            near("head", logits[:, :100], x @ plain["lm_head"].t())
            destroy_model_parallel()


def near(what: str, found: torch.Tensor, wanted: torch.Tensor, bound: float = EXACT) -> None:
    worst = float((found - wanted).abs().max())
    assert found.shape == wanted.shape, what
    assert worst <= bound, f"{what} differs by up to {worst}"


def test_layers_over_gloo(tmp_path: Path) -> None:
    """Act-order scatters the groups of K = 192 over all ranks, and 24 rows a rank cut groups of 32."""
    import socket

    from tests.runtime.vllm.layers import save

    rng = np.random.default_rng(0)
    recipe = Recipe("gptq", group_size=32, act_order="each")
    truths = {name: draw(rng, n, K, recipe) for name, n in {**WEIGHTS, "lm_head": 100, "o_proj": K}.items()}
    truths["down_proj"] = draw(rng, K, K, Recipe("gptq", group_size=32))
    pack, spell = FORMATS["gptq"]
    tensors = {name: pack(truth) for name, truth in truths.items()}
    modules = {name if name == "lm_head" else f"model.layers.0.{name}": t for name, t in tensors.items()}
    save(tmp_path / "checkpoint", modules, spell(truths["q_proj"]))
    plain = {name: plain_weight(truth) for name, truth in truths.items()}
    x = torch.from_numpy(rng.normal(size=(3, K))).float()
    torch.save({"tensors": tensors, "plain": plain, "x": x}, tmp_path / "weights.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(probe.getsockname()[1]))
    torch.multiprocessing.spawn(_rank, (tmp_path,), WORLD)


TWO_RANKS: dict[str, tuple[Shape, list[str]]] = {
    "layers": (Shape(hidden=192, heads=6, inner=320, layers=1), []),
    "experts cut": (Shape(mixture="qwen2_moe", inner=320, layers=1), []),
    "experts whole": (Shape(mixture="mixtral", layers=1), ["--ours", '{"enable_expert_parallel": true}']),
}


@pytest.mark.parametrize("name", TWO_RANKS)
def test_engine_with_two_ranks(name: str, tmp_path: Path) -> None:
    """tools/check_vllm starts both engines, two processes each; 96 or 160 rows a rank cut groups of 64.

    vLLM's own plain experts on a CPU do not know of absent ones, so the reference has them cut.
    """
    shape, arguments = TWO_RANKS[name]
    packed, _ = write(tmp_path, Recipe("gptq_v2", act_order="each"), shape)
    result = tmp_path / "result.json"
    asked = ["--tp", "2", "--dtype", "float32", "--out", result, *arguments, packed]
    ended = subprocess.run(
        [sys.executable, ROOT / "tools/check_vllm", *asked],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-5000:]
    (found,) = json.loads(result.read_text())
    assert found["tp"] == 2
    assert found["equal"]
    assert any(backend.endswith(" experts") for backend in found["backends"]) == (name != "layers")
