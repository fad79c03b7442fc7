"""Formats by name, and formats that other packages bring."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.formats.samples import MAKERS
from w4plugin.errors import UsageError
from w4plugin.formats import registry
from w4plugin.formats.conformance import headers
from w4plugin.formats.format import Format
from w4plugin.formats.registry import BUILT_IN, ENTRY_POINTS

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_format"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path that packages can be installed into, and a registry that looks again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.formats.cache_clear()
    yield tmp_path
    registry.formats.cache_clear()


def install(site: Path, target: str, name: str = "half-bytes") -> None:
    info = site / f"w4_{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: w4-{name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{name} = {target}\n")


def test_names_are_unique_and_every_format_says_what_it_is() -> None:
    assert len({f.name for f in BUILT_IN}) == len(BUILT_IN)
    for f in BUILT_IN:
        assert f.title
        assert f.producers
        assert f.key <= f.suffixes
        assert (f.write is None) == (f.config is None)
        assert f.limits.startswith("read only") == (f.write is None)


def test_unknown_name() -> None:
    with pytest.raises(UsageError, match="gptq_v2"):
        registry.get("gguf")


def test_third_party_format_is_found_read_and_written(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    install(site, "w4_half_bytes:FORMAT")
    import w4_half_bytes  # type: ignore[import-not-found]

    from w4plugin.formats import find_modules, quantization_config, read_module, write_module
    from w4plugin.formats.format import Layer
    from w4plugin.quant_config import QuantConfig

    assert list(registry.formats()) == [*(f.name for f in BUILT_IN), "half-bytes"]
    sample = w4_half_bytes.sample(Random(0))
    config = QuantConfig.from_dict(sample.config)
    (module,) = find_modules({f"m.{k}": h for k, h in headers(sample.tensors).items()}, config).modules
    assert module.format == "half-bytes"
    weight = read_module(module, sample.tensors, config).weight
    assert set(write_module("half-bytes", weight)) == {"codes", "scale"}
    assert quantization_config("half-bytes", [Layer.of("m", weight)])["bits"] == 4


def test_built_in_formats_cannot_be_taken_over(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "greedy.py").write_text(
        "from dataclasses import replace\nfrom w4plugin.formats.registry import BUILT_IN\n"
        "TAKEN = next(f for f in BUILT_IN if f.name == 'gptq')\nFORMAT = replace(TAKEN, name='greedy')\n"
    )
    install(site, "greedy:FORMAT", "greedy")
    from w4plugin.formats import find_modules
    from w4plugin.quant_config import QuantConfig

    sample = MAKERS["gptq"](Random(0))
    found = find_modules(
        {f"m.{k}": h for k, h in headers(sample.tensors).items()}, QuantConfig.from_dict(sample.config)
    )
    assert [m.format for m in found.modules] == ["gptq"]
    registry.formats.cache_clear()
    install(site, "greedy:TAKEN", "taken")
    with pytest.raises(UsageError, match=r"greedy:TAKEN of w4-taken.*'gptq', which is taken"):
        registry.formats()


@pytest.mark.parametrize(
    ("target", "got"),
    [
        ("no_such_module:FORMAT", "ModuleNotFoundError"),
        ("raises:FORMAT", "RuntimeError: boom"),
        ("nothing:MISSING", "AttributeError"),
        ("nothing:FORMAT", "got int"),
    ],
)
def test_entry_points_that_do_not_load_name_their_package(site: Path, target: str, got: str) -> None:
    (site / "raises.py").write_text("raise RuntimeError('boom')\n")
    (site / "nothing.py").write_text("FORMAT = 3\n")
    install(site, target, "broken")
    with pytest.raises(UsageError) as error:
        registry.formats()
    assert "w4-broken" in str(error.value)
    assert got in str(error.value)
    assert error.value.todo


def test_the_example_passes_its_own_conformance_run() -> None:
    command = [sys.executable, EXAMPLE / "w4_half_bytes.py"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])}  # the package need not be installed
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert "no check failed" in run.stdout


def test_conformance_catches_a_reader_that_is_off_by_one() -> None:
    from dataclasses import replace

    from w4plugin.errors import MismatchError
    from w4plugin.formats import conformance, gptq
    from w4plugin.quant_config import QuantConfig

    def wrong(module, tensors, config, shard):  # type: ignore[no-untyped-def]
        return gptq.read(module, tensors, replace(config, layout="gptq_v2"), shard)

    broken: Format = replace(registry.get("gptq"), read=wrong)
    sample = MAKERS["gptq"]
    seed = next(s for s in range(99) if not sample(Random(s)).config["sym"])
    assert QuantConfig.from_dict(sample(Random(seed)).config).layout == "gptq"
    with pytest.raises(MismatchError, match="zero points"):
        conformance.check(broken, sample, Random(seed))
