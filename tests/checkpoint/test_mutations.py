"""Any bytes of a model folder changed or cut, in every format: one of our errors and nothing written, or a whole output
that verifies against the damaged source."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.checkpoint import models
from tests.formats import samples
from w4plugin.checkpoint.output import Request
from w4plugin.checkpoint.repack import repack
from w4plugin.checkpoint.summary import inspect
from w4plugin.checkpoint.verify import verify
from w4plugin.errors import W4Error


@pytest.mark.parametrize("name", sorted(samples.MAKERS))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_folders_of_every_format(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    sample = samples.MAKERS[name](Random(data.draw(st.integers(0, 5), label="sample")))
    tensors = {**models.layers({models.name(0): sample.tensors}), **models.plain()}
    source = models.folder(folder / "in", tensors, sample.config, files={})
    path = source / data.draw(st.sampled_from(["config.json", "model.safetensors"]), label="file")
    raw = bytearray(path.read_bytes())
    # half of the changes hit the header, which is small beside the data
    header = min(len(raw), 8 + int.from_bytes(raw[:8], "little")) if path.suffix == ".safetensors" else len(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header - 1) | st.integers(0, len(raw) - 1), label="at")
        raw[at : at + data.draw(st.integers(1, 4))] = data.draw(st.binary(min_size=0, max_size=4), label="bytes")
    path.write_bytes(raw)
    try:
        inspect(source)
        repack(source, Request(folder / "out"))
    except W4Error:
        assert not list(folder.glob("out*"))
    else:
        result = verify(source, folder / "out")
        assert result["ok"], result["mismatches"]
