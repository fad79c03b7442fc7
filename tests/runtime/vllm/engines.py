"""Engines in this process, one after the other, and what they generate."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

SETTINGS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
    "distributed_executor_backend": "uni",
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "seed": 0,
}


@dataclass(frozen=True)
class Text:
    """What one prompt led to: token ids, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


@contextmanager
def engine(model: Path, **settings: Any) -> Iterator[LLM]:
    """An engine that is gone afterwards, so that the next one can start in this process."""
    try:
        llm = LLM(str(model), **{**SETTINGS, **settings})
    except BaseException:
        # a model that was refused leaves groups of ranks behind, made for its kind: a mixture needs another
        gc.collect()
        cleanup_dist_env_and_memory()
        raise
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()  # or its finaliser would tear down the next engine's groups
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def prompts(vocab: int, count: int = 4, length: int = 20) -> list[dict[str, list[int]]]:
    """Arbitrary token ids."""
    return [{"prompt_token_ids": [(7 * i + 13 * j) % (vocab - 4) + 4 for j in range(length)]} for i in range(count)]


def greedy(llm: LLM, count: int = 16, asked: list[Any] | None = None, **request: Any) -> list[Text]:
    """The ``count`` most likely tokens after each prompt."""
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, detokenize=False)
    outputs = llm.generate(asked or prompts(vocab), sampling, use_tqdm=False, **request)
    found = []
    for output in outputs:
        best = output.outputs[0]
        chosen = [step[token].logprob for step, token in zip(best.logprobs, best.token_ids, strict=True)]
        found.append(Text(list(best.token_ids), chosen))
    return found


def method(llm: LLM) -> str | None:
    """The quantisation method that serves the model."""
    return llm.llm_engine.vllm_config.model_config.quantization


def compare(ours: list[Text], plain: list[Text], tolerance: float) -> None:
    """Equal tokens, and log-probabilities within ``tolerance``."""
    assert [text.tokens for text in ours] == [text.tokens for text in plain]
    worst = max(
        abs(a - b) for x, y in zip(ours, plain, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True)
    )
    assert worst <= tolerance, f"log-probabilities differ by up to {worst}"
