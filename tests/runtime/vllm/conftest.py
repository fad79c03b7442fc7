"""vLLM reads its environment when it is imported: one process, a small cache, no network, no usage reports."""

import os

import pytest

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two test processes would bind to the same cores
os.environ.pop("W4PLUGIN_CLAIM", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/runtime/vllm/" in item.path.as_posix():
            item.add_marker(pytest.mark.vllm)
