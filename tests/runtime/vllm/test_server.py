"""``vllm serve`` as a user starts it: the entry point, the multiprocess engine, the OpenAI client; and the examples."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.runtime.vllm.checkpoints import Recipe, Shape, write

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
OPTIONS = ["--max-model-len", "128", "--max-num-seqs", "4", "--enforce-eager", "--dtype", "float32"]
START = 300
"""Seconds a server may take to start, on two busy cores; 40 were seen."""


def add_tokenizer(folder: Path, vocab: int) -> None:
    """A word for each id, and a chat template."""
    words = ["<s>", "</s>", "<unk>"] + [f"w{i}" for i in range(3, vocab)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint that vLLM refuses by itself, and its plain weights; both with a tokenizer."""
    packed, plain = write(tmp_path_factory.mktemp("served"), Recipe("gptq", act_order="each"), Shape())
    for folder in (packed, plain):
        add_tokenizer(folder, Shape().vocab)
    return packed, plain


def environment() -> dict[str, str]:
    """Everything as vLLM's defaults have it: the engine in a process of its own."""
    kept = {k: v for k, v in os.environ.items() if k not in ("VLLM_ENABLE_V1_MULTIPROCESSING", "W4PLUGIN_CLAIM")}
    return {**kept, "PATH": f"{BIN}:{os.environ['PATH']}", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass
class Server:
    client: OpenAI
    log: Path

    def complete(self, prompt: str, **request: object) -> str:
        answer = self.client.completions.create(
            model="int4", prompt=prompt, temperature=0, extra_body={"ignore_eos": True}, **request
        )
        return answer.choices[0].text


def serve(folder: Path, log: Path) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [BIN / "vllm", "serve", folder, "--served-model-name", "int4", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as stream:
        process = subprocess.Popen([*command, *OPTIONS], stdout=stream, stderr=subprocess.STDOUT, env=environment())
    try:
        deadline = time.time() + START
        while True:
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.time() < deadline, f"not up after {START} s\n{log.read_text()[-5000:]}"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        yield Server(OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0), log)
    finally:
        process.terminate()
        assert process.wait(60) is not None


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serve(folders[0], tmp_path_factory.mktemp("log") / "server.log")


def test_log_says_once_what_was_claimed_and_why(server: Server) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "w4plugin serves" in line]
    assert len(lines) == 1
    assert re.search(": (vLLM .* refuses it|this CPU build of vLLM has no INT4 kernels)", lines[0])


def test_chat(server: Server) -> None:
    message = {"role": "user", "content": "w10 w20 w30"}
    answer = server.client.chat.completions.create(model="int4", messages=[message], max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


def test_stream_is_what_one_answer_is(server: Server) -> None:
    whole = server.complete("w7 w8 w9", max_tokens=12)
    parts = server.client.completions.create(
        model="int4", prompt="w7 w8 w9", max_tokens=12, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    texts = [part.choices[0].text for part in parts]
    assert len(texts) > 2
    assert "".join(texts) == whole


def test_concurrent_requests_get_what_they_get_alone(server: Server) -> None:
    prompts = [f"w{10 + i} w{20 + 3 * i} w{40 + 7 * i}" for i in range(8)]
    alone = [server.complete(prompt, max_tokens=10) for prompt in prompts]
    assert len(set(alone)) == len(alone)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: server.complete(prompt, max_tokens=10), prompts)) == alone


def test_stop_ends_the_text(server: Server) -> None:
    whole = server.complete("w50 w60", max_tokens=12)
    word = whole.split()[5]
    stopped = server.complete("w50 w60", max_tokens=12, stop=[word])
    assert stopped == whole[: whole.index(word)]


def test_bad_checkpoint_ends_the_server_with_the_reason(folders: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folders[0].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    command = [BIN / "vllm", "serve", broken, "--quantization", "w4plugin", *OPTIONS]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=START)
    assert ended.returncode != 0
    assert "got a layer 1; wanted the 1 layers of config.json" in ended.stdout + ended.stderr


def test_offline_example(folders: tuple[Path, Path]) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "examples/vllm_offline.py", folders[0]],
        env={**environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=START,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "served by w4plugin" in ended.stdout
    assert ended.stdout.count(" -> ") == 3


def test_server_example(folders: tuple[Path, Path]) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "examples/vllm_server.py", folders[0], *OPTIONS],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=START + 60,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    chat, stream = ended.stdout.splitlines()
    assert chat.startswith("chat: 'w")
    assert stream.startswith("stream: w")
