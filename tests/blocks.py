"""Code blocks of README.md and docs/, for the tests that run them: each in the environment of what it needs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def blocks(page: Path) -> list[tuple[str, str]]:
    """(kind, content) of each fenced block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def runner(kind: str, content: str) -> str:
    """Which test runs a block: "python", "transformers", "vllm", "tools", "verbs", "named"; "" for one that is no code.

    Raises:
        LookupError: none does.
    """
    if kind == "text":
        return ""
    if kind == "python":
        return "transformers" if "runtime.transformers" in content else "python"
    first = content.split()[0]
    found = {"./tools/demo": "tools", "vllm": "vllm", "w4plugin": "verbs", "tools/check_vllm": "named"}.get(first)
    if kind or found is None:
        raise LookupError(f"no test runs this block ({kind or 'shell'}): {content}")
    return found


def of_runner(name: str) -> list[str]:
    """All blocks that one test runs."""
    return [text for page in PAGES for kind, text in blocks(page) if runner(kind, text) == name]
