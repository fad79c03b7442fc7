"""Whole models: SGLang's plugin loading, config, model loader, model class and layers, from a folder to logits.

Everything is SGLang's own but two things that its kernels do on a GPU: attention over a KV cache, which is one call of
PyTorch here, and the head's product with the last hidden state, which is the head's own method.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import base as rotary_base
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_loader.loader import get_model_loader
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_parallel

import w4plugin
from tests.runtime.sglang.layers import rank_of
from tests.runtime.vllm.checkpoints import Recipe, Shape, write
from w4plugin.errors import CorruptError
from w4plugin.runtime.sglang.linear import W4LinearMethod

REAL = Path(__file__).parents[3] / "examples" / "llama-gptq-actorder"
IDS = torch.tensor([1, 5, 9, 30, 77, 3, 2, 200])
SERVED = 2e-3
"""Of log-probabilities: a few layers of float32 roundings, norms and softmaxes written twice by two projects."""


@pytest.fixture(autouse=True)
def plugins() -> None:
    load_plugins()  # as SGLang does first in every process; ours is found by its entry point


class Batch(SimpleNamespace):
    """As much of a forward batch as a dense model asks for."""

    forward_mode = ForwardMode.EXTEND
    attn_cp_metadata = None


def attend(self: RadixAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Causal attention over the whole prompt, ``[tokens, heads * d]``."""
    heads = [t.view(len(t), -1, self.head_dim).transpose(0, 1)[None] for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scaling, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(len(q), -1)


@pytest.fixture
def runner() -> Iterator[None]:
    """What a model runner sets up around a model, for one process."""
    one = SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True, is_last_rank=True)
    with (
        rank_of(0, 1),
        get_parallel().override(pp_group=one, pp_rank=0, pp_size=1, tp_group=one, attn_tp_group=one),
        mock.patch.object(RadixAttention, "forward", attend),
        mock.patch.object(rotary_base, "_is_cpu", True),  # or its rotary embedding asks for a GPU kernel of vLLM's
    ):
        yield


def served(folder: Path, quantization: str | None, load_format: str = "auto", dtype: str = "float32") -> Any:
    """A model as SGLang loads it."""
    config = ModelConfig(str(folder), quantization=quantization, dtype=dtype)
    with get_context().override_server_args(model_path=str(folder), device="cpu", load_format=load_format):
        loader = get_model_loader(LoadConfig(load_format=LoadFormat(load_format)), config)
        return loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))


def log_probs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.model(IDS, torch.arange(len(IDS)), Batch())
        logits = model.lm_head.quant_method.apply(model.lm_head, hidden)
    return logits[:, : model.config.vocab_size].log_softmax(-1)


def wanted(folder: Path) -> torch.Tensor:
    """Of the plain weights, by Transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(IDS[None]).logits[0].log_softmax(-1)


def agree(found: torch.Tensor, plain: torch.Tensor) -> None:
    worst = float((found - plain).abs().max())
    assert worst <= SERVED, f"log-probabilities differ by up to {worst}"
    assert torch.equal(found.argmax(-1), plain.argmax(-1))


RECIPES = {
    "gptq_v2": Recipe("gptq_v2"),
    "act-order": Recipe("gptq", act_order="each"),
    "awq": Recipe("awq"),
    "compressed-tensors": Recipe("compressed-tensors"),
    "packed head": Recipe("gptq_v2", head=4),
    "8-bit head": Recipe("gptq_v2", head=8),
    "plain layers among packed ones": Recipe("gptq_v2", skip=("v_proj", "down_proj")),
}


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("name", RECIPES)
def test_logits_are_those_of_the_plain_weights(name: str, tmp_path: Path) -> None:
    packed, plain = write(tmp_path, RECIPES[name], Shape(bias=name == "awq"))
    model = served(packed, "w4plugin")
    methods = [m.quant_method for m in model.modules() if isinstance(getattr(m, "quant_method", None), W4LinearMethod)]
    assert methods
    agree(log_probs(model), wanted(plain))


@pytest.mark.usefixtures("runner")
def test_a_real_checkpoint_that_sglang_refuses_is_claimed_and_served(tmp_path: Path) -> None:
    """AutoGPTQ's, asymmetric and with act-order; its plain weights come from `w4plugin dequantize`, which other tests
    compare with AutoGPTQ's own."""
    w4plugin.dequantize(REAL, tmp_path / "plain", dtype="float32")
    model = served(REAL, None)
    agree(log_probs(model), wanted(tmp_path / "plain"))


@pytest.mark.usefixtures("runner")
def test_noise_for_speed_measurements(tmp_path: Path) -> None:
    packed, _ = write(tmp_path, Recipe("gptq_v2"))
    assert torch.isfinite(log_probs(served(packed, "w4plugin", load_format="dummy"))).all()


@pytest.mark.usefixtures("runner")
def test_a_tensor_that_never_arrives_stops_the_load(tmp_path: Path) -> None:
    packed, _ = write(tmp_path, Recipe("gptq_v2"))
    with (
        mock.patch("sglang.srt.models.llama.get_layer_id", lambda name: 99 if "up_proj.scales" in name else 0),
        pytest.raises(CorruptError, match=r"up_proj\.scales"),
    ):
        served(packed, "w4plugin")
