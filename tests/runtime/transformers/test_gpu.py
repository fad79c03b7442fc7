"""The adapter on a CUDA device: the same tokens and losses as the dequantised model there.

python3 -m pytest -m gpu tests/runtime/transformers
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import w4plugin
import w4plugin.runtime.transformers as w4
from tests.runtime.transformers.models import IDS, TINY, Recipe, logits, write

pytestmark = pytest.mark.gpu

CUDA = {"device_map": "cuda:0"} if importlib.util.find_spec("accelerate") else {}
"""Without accelerate Transformers takes no device_map; a model is moved then, which is tested anyway."""

NEAR = 2e-2
"""Of logits of unit size: two layers of float16 activations, in kernels that add in different orders."""


def loaded(folder: Path, dtype: torch.dtype = torch.float16, **settings: Any) -> Any:
    return w4.from_pretrained(folder, dtype=dtype, **CUDA, **settings).to("cuda:0")


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    scale = float(wanted.abs().max())
    worst = float((found.float().cpu() - wanted.float().cpu()).abs().max())
    assert worst <= NEAR * scale, f"differs by {worst / scale} of the largest logit"


def on_gpu(ids: torch.Tensor) -> torch.Tensor:
    return ids.to("cuda:0")


@pytest.fixture(scope="module")
def plain_gpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("plain") / "model"
    w4plugin.dequantize(TINY, out, dtype="float16")
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float16).to("cuda:0")


def backends(model: Any) -> set[str | None]:
    return {m.backend for m in model.modules() if isinstance(m, w4.W4Linear)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_real_checkpoint(plain_gpu: Any, dtype: torch.dtype) -> None:
    model = loaded(TINY, dtype)
    assert backends(model) <= {"hopper", "portable"}
    assert {m.qweight.device.type for m in model.modules() if isinstance(m, w4.W4Linear)} == {"cuda"}
    near(logits(model, on_gpu(IDS)), logits(plain_gpu, on_gpu(IDS)))
    said = model.generate(on_gpu(IDS), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    # each token is the plain model's choice too, or ties with it
    scores = logits(plain_gpu, said)[0, IDS.shape[1] - 1 : -1]
    scores[:, model.generation_config.eos_token_id] = -torch.inf  # min_new_tokens forbids it
    chosen = scores.gather(1, said[0, IDS.shape[1] :, None])[:, 0]
    assert float((scores.amax(1) - chosen).max()) <= NEAR * float(scores.amax())


@pytest.mark.parametrize("name", ["gptq", "awq", "auto-round", "compressed-tensors"])
def test_formats(tmp_path: Path, name: str) -> None:
    reference = write(tmp_path / "m", Recipe(name)).to("cuda:0", torch.float16)
    model = loaded(tmp_path / "m")
    near(logits(model, on_gpu(IDS)), logits(reference, on_gpu(IDS)))


def test_moved_there_after_loading(plain_gpu: Any) -> None:
    """A model loaded on the CPU and moved is in the GPU's order; saved, it is GPTQ v2 with the same bits."""
    model = w4.from_pretrained(TINY, dtype=torch.float16).to("cuda:0")
    near(logits(model, on_gpu(IDS)), logits(plain_gpu, on_gpu(IDS)))


def test_saved_from_there(tmp_path: Path) -> None:
    loaded(TINY).save_pretrained(tmp_path / "saved")
    assert w4plugin.verify(TINY, tmp_path / "saved")["ok"]


def test_compile(plain_gpu: Any) -> None:
    model = loaded(TINY)
    compiled = torch.compile(model, fullgraph=True)
    near(logits(compiled, on_gpu(IDS)), logits(plain_gpu, on_gpu(IDS)))


def test_static_cache_in_a_cuda_graph() -> None:
    model = loaded(TINY)
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    dynamic = model.generate(on_gpu(IDS), **options)
    model.generation_config.cache_implementation = "static"
    static = model.generate(on_gpu(IDS), **options)
    assert torch.equal(static[:, :40], dynamic[:, :40])


def test_gradient_of_x_is_that_of_the_plain_layer(tmp_path: Path) -> None:
    reference = write(tmp_path / "m", Recipe(act_order=True)).to("cuda:0")
    model = loaded(tmp_path / "m")
    name = "model.layers.0.mlp.down_proj"
    packed, plain = model.get_submodule(name), reference.get_submodule(name)
    x = torch.randn(5, packed.in_features, device="cuda:0", dtype=torch.float16)
    found, wanted = (t.clone().requires_grad_() for t in (x, x.float()))
    packed(found).float().square().sum().backward()
    plain(wanted).square().sum().backward()
    near(found.grad, wanted.grad)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="LoRA is PEFT's")
def test_lora() -> None:
    import peft

    torch.manual_seed(0)
    model = loaded(TINY, torch.bfloat16)
    tuned = peft.get_peft_model(model, w4.lora(peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])))
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for _ in range(6):
        loss = tuned(on_gpu(IDS), labels=on_gpu(IDS)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < 0.9 * found[0], found


def test_a_backend_by_name() -> None:
    model = loaded(TINY, backend="portable")
    assert backends(model) == {"portable"}
