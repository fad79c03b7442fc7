"""Layers of 2 to 8 bits that the producers' own packers wrote, inside a 4-bit checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint import models
from tests.formats import samples
from tests.formats.samples import truth
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.dequantize import dequantize
from w4plugin.checkpoint.repack import repack
from w4plugin.checkpoint.verify import verify
from w4plugin.errors import UnsupportedError

UPSTREAM = models.DATA / "upstream"
NARROW, WIDE = models.name(0), models.name(1)
FIXTURES = [*(f"autogptq_{bits}bit" for bits in (2, 3, 8)), *(f"gptqmodel_planar_{bits}bit" for bits in (3, 5, 6, 7))]


def mixed(path: Path, fixture: str) -> tuple[Path, Tensor]:
    """A 4-bit layer and the fixture's layer, under the rule that GPTQModel writes; and the fixture's weight [N, K]."""
    with safe_open(UPSTREAM / f"{fixture}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        stated = json.loads(file.metadata()["config"])
    want = {key.removeprefix("want."): tensors.pop(key) for key in list(tensors) if key.startswith("want.")}
    rows = torch.arange(want["q"].shape[0]) // 32
    weight = (want["q"].double() - want["z"].double()[rows]) * want["s"].double()[rows]
    t = truth(1, lowest=1)
    version = stated.get("checkpoint_format", "gptq")
    narrow = samples.pack_gptq(t, offset=1 if version == "gptq" else 0)
    rule = {"bits": stated["bits"], "group_size": 32, "sym": False}
    config = samples.gptq_config(t, version, dynamic={rf"+:.*\.{WIDE.split('.')[2]}\..*": rule})
    layers = models.layers({NARROW: narrow, WIDE: tensors})
    return models.folder(path, {**layers, **models.plain()}, config), weight.T


@pytest.mark.parametrize("fixture", FIXTURES)
def test_refused_by_name_kept_or_made_plain(fixture: str, tmp_path: Path) -> None:
    source, weight = mixed(tmp_path / "in", fixture)
    bits = int(fixture.rpartition("bit")[0][-1])
    (module,) = Checkpoint.open(source).census.other_width
    assert (module.name, module.bits) == (WIDE, bits)
    with pytest.raises(UnsupportedError, match=rf"{WIDE} \({bits} bits\).*--other-widths keep"):
        repack(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))

    report = repack(source, tmp_path / "plain", other_widths="dequantize")
    assert report["made_plain"] == [WIDE]
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert torch.equal(plain[f"{WIDE}.weight"].double(), weight.to(plain[f"{WIDE}.weight"].dtype).double())
    written = json.loads((tmp_path / "plain" / "config.json").read_text())["quantization_config"]
    assert "-:" + WIDE.replace(".", r"\.") + "$" in written["dynamic"]

    to = "gptq" if fixture.startswith("autogptq") else "gptq_v2"
    report = repack(source, tmp_path / "kept", to=to, other_widths="keep")
    assert report["kept"] == [WIDE]
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "kept" / "model.safetensors")
    for name in before:
        if name.startswith(WIDE):
            assert torch.equal(before[name], after[name]), name
    dequantize(tmp_path / "kept", tmp_path / "later")  # what is kept still reads as it did
    again = load_file(tmp_path / "later" / "model.safetensors")[f"{WIDE}.weight"]
    assert torch.equal(again, plain[f"{WIDE}.weight"])
    for out in ("plain", "kept"):
        result = verify(source, tmp_path / out)
        assert result["ok"], result["mismatches"]


@pytest.mark.parametrize("fixture", FIXTURES)
def test_a_wrong_weight_is_noticed(fixture: str, tmp_path: Path) -> None:
    source, _ = mixed(tmp_path / "in", fixture)
    repack(source, tmp_path / "out", other_widths="dequantize")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors[f"{WIDE}.weight"][3, 5] += 2.0**-9
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    result = verify(source, tmp_path / "out")
    assert {m["tensor"] for m in result["mismatches"]} == {f"{WIDE}.weight"}
    assert any(m["what"].startswith("1 weights differ") for m in result["mismatches"]), result["mismatches"]


def test_planes_keep_their_label(tmp_path: Path) -> None:
    for fixture, label in (("gptqmodel_planar_3bit", "gptq_p"), ("autogptq_3bit", "gptq")):
        source, _ = mixed(tmp_path / fixture / "in", fixture)
        repack(source, tmp_path / fixture / "out", to="gptq_v2" if label == "gptq_p" else label, other_widths="keep")
        written = json.loads((tmp_path / fixture / "out" / "config.json").read_text())["quantization_config"]
        assert (written["checkpoint_format"], written["format"]) == (label, label)
