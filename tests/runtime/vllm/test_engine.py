"""The real engine: every format generates what its dequantised weights generate in the same engine.

Random models run in float32, where both ways of computing differ by rounding at 1e-6 only: 64 greedy decisions are
equal unless a weight is wrong.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runtime.vllm.checkpoints import Recipe, Shape, edit_config, write
from tests.runtime.vllm.engines import compare, engine, greedy, method, prompts
from w4plugin.kernels import experts_reasons
from w4plugin.kernels.device import target
from w4plugin.runtime.vllm.linear import backends

EXACT = 1e-3
"""Of log-probabilities of about -5 in float32: their sum over a vocabulary of 512 is good to 1e-4."""

MIXTRAL = Shape(mixture="mixtral", inner=256)
QWEN2_MOE = Shape(mixture="qwen2_moe", inner=320)

CASES: dict[str, tuple[Recipe, Shape]] = {
    "gptq symmetric": (Recipe("gptq", sym=True), Shape()),
    "gptq asymmetric": (Recipe("gptq"), Shape()),
    "gptq_v2 act-order, its own in every module": (Recipe("gptq_v2", act_order="each"), Shape()),
    "gptq act-order, shared by fused modules": (Recipe("gptq", act_order="shared"), Shape()),
    "gptq groups of 16": (Recipe("gptq_v2", group_size=16), Shape()),
    "gptq one group": (Recipe("gptq_v2", group_size=512), Shape()),
    "gptq short last group": (Recipe("gptq_v2", group_size=192), Shape()),
    "gptq packed head, padded vocabulary": (Recipe("gptq_v2", head=4), Shape(vocab=500)),
    "gptq 8-bit head": (Recipe("gptq_v2", head=8), Shape()),
    "gptq with plain v and up": (Recipe("gptq_v2", skip=("v_proj", "up_proj")), Shape()),
    "gptq with attention biases": (Recipe("gptq_v2", act_order="each"), Shape(bias=True)),
    "gptq tied embeddings": (Recipe("gptq_v2"), Shape(tied=True)),
    "gptq fused in the file": (Recipe("gptq_v2", act_order="each"), Shape(fused=True)),
    "auto-round": (Recipe("auto-round"), Shape()),
    "awq": (Recipe("awq"), Shape()),
    "awq gemv": (Recipe("awq-gemv"), Shape()),
    "awq gemv_fast": (Recipe("awq-gemv-fast"), Shape()),
    "awq marlin": (Recipe("awq-marlin", group_size=128, sym=True), Shape(heads=4, kv_heads=4, inner=512)),
    "gptq marlin": (Recipe("gptq-marlin", group_size=128, sym=True), Shape(heads=4, kv_heads=4, inner=512)),
    "compressed-tensors": (Recipe("compressed-tensors"), Shape()),
    "compressed-tensors act-order": (Recipe("compressed-tensors act-order", act_order="each"), Shape()),
    "compressed-tensors bfloat16 scales": (Recipe("compressed-tensors", scale_dtype=torch.bfloat16), Shape()),
    "gptq_v2 float32 scales": (Recipe("gptq_v2", scale_dtype=torch.float32), Shape()),
    "mixtral gptq symmetric": (Recipe("gptq", sym=True), MIXTRAL),
    "mixtral gptq_v2 act-order": (Recipe("gptq_v2", group_size=32, act_order="each"), MIXTRAL),
    "mixtral awq one group": (Recipe("awq", group_size=256), MIXTRAL),
    "qwen2_moe gptq asymmetric": (Recipe("gptq", group_size=32), QWEN2_MOE),
    "qwen2_moe gptq short last group": (Recipe("gptq_v2", group_size=192), QWEN2_MOE),
    "qwen2_moe awq": (Recipe("awq"), QWEN2_MOE),
    "qwen2_moe compressed-tensors": (Recipe("compressed-tensors"), QWEN2_MOE),
    "qwen2_moe compressed-tensors act-order": (
        Recipe("compressed-tensors act-order", act_order="each"),
        QWEN2_MOE,
    ),
    "qwen2_moe plain shared expert": (
        Recipe("gptq_v2", skip=tuple(f"shared_expert.{n}" for n in ("gate_proj", "up_proj", "down_proj"))),
        QWEN2_MOE,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_generates_what_the_weights_generate(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4PLUGIN_CLAIM", "all")
    packed, plain = write(tmp_path, *CASES[name])
    with engine(packed, dtype="float32") as llm:
        assert method(llm) == "w4plugin"
        ours = greedy(llm)
    with engine(plain, dtype="float32") as llm:
        assert method(llm) is None
        compare(ours, greedy(llm), EXACT)


@pytest.mark.parametrize("shape", [MIXTRAL, QWEN2_MOE], ids=["mixtral", "qwen2_moe"])
def test_f8_plain_experts_among_packed_ones(shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 1 is served as plain weights, layer 0 as it is in the file."""
    names = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
    plain_expert = tuple(f"layers.1.{at}.experts.2.{n}" for at in ("mlp", "block_sparse_moe") for n in names)
    packed, plain = write(tmp_path, Recipe("gptq_v2", act_order="each", skip=plain_expert), shape)
    with pytest.raises(Exception, match=r"layers\.1\..*experts\.2\..*W4PLUGIN_MIXED_EXPERTS=dequantize"):  # noqa: SIM117
        with engine(packed, dtype="float32", quantization="w4plugin"):
            pass
    monkeypatch.setenv("W4PLUGIN_MIXED_EXPERTS", "dequantize")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # backends is sent by name
    with engine(packed, dtype="float32", quantization="w4plugin") as llm:
        (found,) = llm.apply_model(backends)
        against = experts_reasons(target(torch.device("cpu"), torch.float32))
        packed_by = next(name for name, reason in against.items() if reason is None)
        assert {name: n for name, n in found.items() if "experts" in name} == {
            f"{packed_by} experts": 1,
            "plain weight experts": 1,
        }
        ours = greedy(llm)
    with engine(plain, dtype="float32") as llm:
        compare(ours, greedy(llm), EXACT)


def test_experts_of_a_model_that_looks_its_parameters_up_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")  # vLLM's attention for DeepSeek wants other sizes on a CPU
    packed, plain = write(tmp_path, Recipe("gptq_v2", act_order="each"), Shape(mixture="deepseek_v2", inner=320))
    with engine(packed, dtype="float32", quantization="w4plugin") as llm:
        ours = greedy(llm)
    with engine(plain, dtype="float32") as llm:
        compare(ours, greedy(llm), EXACT)


def test_packed_head_that_the_config_calls_tied(tmp_path: Path) -> None:
    packed, plain = write(tmp_path, Recipe("gptq_v2", head=4))
    edit_config(packed, tie_word_embeddings=True)
    with engine(packed, dtype="float32", quantization="w4plugin") as llm:
        ours = greedy(llm)
    with engine(plain, dtype="float32") as llm:
        compare(ours, greedy(llm), EXACT)


@pytest.mark.parametrize("file", ["", "quantize_config.json"])
def test_checkpoint_without_a_config_in_config_json(file: str, tmp_path: Path) -> None:
    """Everything follows from the tensors, or from the file that AutoGPTQ wrote beside them."""
    packed, plain = write(tmp_path, Recipe("gptq", act_order="each"))
    quant = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_config(packed, quantization_config=None)
    if file:
        (packed / file).write_text(json.dumps(quant))
    with engine(packed, dtype="float32", quantization="w4plugin") as llm:
        ours = greedy(llm)
    with engine(plain, dtype="float32") as llm:
        compare(ours, greedy(llm), EXACT)


@pytest.mark.parametrize(
    "shape", [Shape(bias=True, layers=1), replace(QWEN2_MOE, layers=1)], ids=["llama", "qwen2_moe"]
)
def test_compiled_graph_is_the_same_model(shape: Shape, tmp_path: Path) -> None:
    packed, plain = write(tmp_path, Recipe("gptq_v2", act_order="each"), shape)
    with engine(packed, dtype="float32", quantization="w4plugin", enforce_eager=False) as llm:
        config = llm.llm_engine.vllm_config
        key = config.compute_hash()
        config.additional_config["w4plugin"] += " and another backend"
        assert config.compute_hash() != key  # or vLLM would use a graph that was compiled for other multiplications
        ours = greedy(llm)
    with engine(plain, dtype="float32") as llm:
        compare(ours, greedy(llm), EXACT)


def test_chunked_prefill_and_prefix_caching(tmp_path: Path) -> None:
    packed, plain = write(tmp_path, Recipe("gptq_v2", act_order="each"))
    asked = prompts(512, count=3, length=100)
    settings = {"dtype": "float32", "max_num_batched_tokens": 32, "enable_prefix_caching": True}
    with engine(packed, quantization="w4plugin", **settings) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill
        ours = greedy(llm, asked=asked)
        compare(greedy(llm, asked=asked), ours, EXACT)  # now out of the prefix cache
    with engine(plain, dtype="float32") as llm:
        compare(ours, greedy(llm, asked=asked), EXACT)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_as_near_as_its_rounding(dtype: str, tmp_path: Path) -> None:
    """First tokens of the prompts: nothing has been decided yet, so the log-probabilities can be compared."""
    packed, plain = write(tmp_path, Recipe("gptq_v2", act_order="each"))
    with engine(packed, dtype=dtype, quantization="w4plugin") as llm:
        ours = greedy(llm, count=1)
    with engine(plain, dtype="float32") as llm:
        exact = greedy(llm, count=1)
    # eight roundings of about 2**-11 (2**-8) of unit-scale activations on the way to a logit
    bound = {"float16": 0.02, "bfloat16": 0.15}[dtype]
    for a, b in zip(ours, exact, strict=True):
        assert abs(a.logprobs[0] - b.logprobs[0]) <= bound
