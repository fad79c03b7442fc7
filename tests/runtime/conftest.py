"""Tests of a host run where that host is installed: tools/test makes an environment for each."""

from importlib.util import find_spec

collect_ignore = [host for host in ("vllm", "transformers", "sglang") if not find_spec(host)]
