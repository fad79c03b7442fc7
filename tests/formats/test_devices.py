"""Formats read and write on whatever device the tensors are on, to the same bits."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.formats.samples import MAKERS
from w4plugin.errors import W4Error
from w4plugin.formats import conformance, get
from w4plugin.formats.other_widths import dequantize
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import W4Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def same(a: W4Tensor, b: W4Tensor) -> bool:
    theirs = b.tensors()
    return a.tensors().keys() == theirs.keys() and all(torch.equal(t.cpu(), theirs[n]) for n, t in a.tensors().items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_reading_and_writing(name: str, device: str) -> None:
    fmt = get(name)
    for seed in range(8):
        sample = MAKERS[name](Random(seed))
        config = QuantConfig.from_dict(sample.config)
        module, here = conformance.check_read(fmt, sample)
        there = fmt.read(module, {s: t.to(device) for s, t in sample.tensors.items()}, config, None)
        assert there.weight.device.type == device
        assert same(there.weight, here.weight)
        assert there.notes == here.notes
        try:
            wanted = fmt.write(here.weight) if fmt.write is not None else {}
        except W4Error:  # refused here, refused there
            wanted = {}
        if fmt.write is not None and wanted:
            written = fmt.write(there.weight)
            assert all(torch.equal(written[s].cpu(), t) for s, t in wanted.items())


@pytest.mark.parametrize("device", DEVICES)
def test_plain_weights(device: str) -> None:
    for seed in range(4):
        sample = MAKERS["gptq_v2"](Random(seed))
        config = QuantConfig.from_dict(sample.config)
        module, here = conformance.check_read(get("gptq_v2"), sample)
        made = dequantize(module, {s: t.to(device) for s, t in sample.tensors.items()}, config)
        assert made.weight.device.type == device
        assert torch.equal(made.weight.cpu(), here.weight.dequantize().T)
