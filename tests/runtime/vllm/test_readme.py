"""The README's one line for vLLM starts a server that answers."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

from openai import OpenAI, OpenAIError

from tests.blocks import ROOT, of_runner
from tests.runtime.vllm.test_server import OPTIONS, START, environment

MODEL = ROOT / "examples" / "llama-gptq-actorder"


def test_the_line_serves(tmp_path: Path) -> None:
    """With a port of its own, and what a machine without a GPU needs, behind it."""
    (block,) = of_runner("vllm")
    (line,) = block.strip().splitlines()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*line.replace("MODEL", str(MODEL)).split(), "--host", "127.0.0.1", "--port", str(port), *OPTIONS]
    log = tmp_path / "log"
    settings = {**environment(), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=settings)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        deadline = time.time() + START
        while True:
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.time() < deadline, log.read_text()[-5000:]
            try:
                answer = client.completions.create(model=str(MODEL), prompt="the cat", max_tokens=8, temperature=0)
                break
            except OpenAIError:
                time.sleep(1)
        assert answer.choices[0].text.strip()
        assert "w4plugin serves" in log.read_text()
    finally:
        process.terminate()
        process.wait(60)
