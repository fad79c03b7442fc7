"""The entry point: harmless to import, once per process whatever it is called, and one warning on an untested vLLM."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from w4plugin.runtime.vllm import register, versions


def test_importing_w4plugin_loads_no_host() -> None:
    code = (
        "import sys, w4plugin, w4plugin.runtime.vllm;"
        "assert not {'vllm', 'transformers', 'sglang', 'triton'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_vllm_finds_the_entry_point() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="w4plugin")
    assert found.load() is register


def test_h13_registering_again_changes_nothing() -> None:
    from vllm.model_executor.layers import quantization

    register()
    first = quantization.get_quantization_config("w4plugin")
    register()
    assert quantization.get_quantization_config("w4plugin") is first
    assert quantization.QUANTIZATION_METHODS.count("w4plugin") == 1


@pytest.mark.parametrize(
    ("version", "warned"),
    [("0.25.1", True), ("0.26.0", False), ("0.32.0", False), ("0.33.1", False), ("0.34.0", True), ("unknown", True)],
)
def test_untested_version_warns_and_goes_on(version: str, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(versions, "version", lambda: version)
    monkeypatch.setattr(versions.logger(), "warning", lambda text, *args: lines.append(text % args))
    versions.warn_if_untested()
    assert bool(lines) is warned
    assert all(version in line for line in lines)
