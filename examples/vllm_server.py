"""Serve an INT4 checkpoint with ``vllm serve`` and talk to it through the OpenAI client.

    pip install w4plugin vllm openai
    python examples/vllm_server.py MODEL [more arguments of vllm serve]

The server is vLLM's own command; the plugin is found by it in every process.
"""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from openai import OpenAI


def main(model: str, *options: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        "vllm",
        "serve",
        model,
        "--served-model-name",
        "int4",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *options,
    ]
    server = subprocess.Popen(command, stdout=sys.stderr)  # its log, beside what we print
    try:
        wait(server, f"http://127.0.0.1:{port}/health")
        talk(OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none"))
    finally:
        server.terminate()
        server.wait(60)


def wait(server: subprocess.Popen, url: str) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise SystemExit(f"vllm serve ended with status {server.returncode}")


def talk(client: OpenAI) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = client.chat.completions.create(model="int4", messages=[question], max_tokens=16, temperature=0)
    print("chat:", repr(answer.choices[0].message.content))
    print("stream:", end=" ")
    for part in client.completions.create(
        model="int4", prompt="Once upon a time", max_tokens=16, temperature=0, stream=True
    ):
        print(part.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
