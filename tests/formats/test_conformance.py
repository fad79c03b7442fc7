"""Every built-in format passes the suite that third parties run on theirs."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats import samples
from w4plugin.formats import conformance, registry


def test_every_format_has_a_sample_maker() -> None:
    assert set(samples.MAKERS) == {f.name for f in registry.BUILT_IN}


@pytest.mark.parametrize("name", sorted(samples.MAKERS))
def test_conformance(name: str) -> None:
    for seed in range(25):
        conformance.check(registry.get(name), samples.MAKERS[name], Random(seed))


@pytest.mark.parametrize("name", sorted(samples.MAKERS))
@settings(max_examples=40, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_damage(name: str, random: Random) -> None:
    sample = samples.MAKERS[name](random)
    conformance.check_damage(registry.get(name), sample, random)
