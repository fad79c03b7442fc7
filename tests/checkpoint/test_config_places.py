"""Every place in which a producer leaves its config is read, loses to none it should win over, and is gone afterwards.

The layer is asymmetric and stores true zeros, so a config that is not found shifts every weight by one scale.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.checkpoint import models
from tests.formats import samples
from tests.formats.samples import same, truth
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.repack import read, repack
from w4plugin.checkpoint.verify import verify
from w4plugin.errors import UnsupportedError

T = truth(1, order="act")
V2 = samples.gptq_config(T, "gptq_v2")
LAYER = models.name(0)

PLACES: dict[str, dict[str, Any]] = {
    "config.json: quantization_config": {"config.json": {"quantization_config": V2}},
    "config.json: compression_config": {"config.json": {"compression_config": V2}},
    "config.json: text_config.quantization_config": {
        "config.json": {"text_config": {"hidden_size": 64, "quantization_config": V2}}
    },
    "config.json: llm_config.quantization_config": {"config.json": {"llm_config": {"quantization_config": V2}}},
    "config.json: text_config.compression_config": {"config.json": {"text_config": {"compression_config": V2}}},
    "quantize_config.json": {"quantize_config.json": V2},
    "quant_config.json": {"quant_config.json": V2},
    "quantization_config.json": {"quantization_config.json": V2},
    "the file's metadata": {},
}

METADATA = {
    "format": "pt",
    "auto_gptq_version": "0.7.1",
    **{f"gptq_{k}": str(v) for k, v in V2.items() if k in ("bits", "group_size", "desc_act", "checkpoint_format")},
    "gptq_sym": "False",
    "gptq_quant_method": "gptq",
}


def model(path: Path, place: str) -> Path:
    tensors = {**models.layers({LAYER: samples.pack_gptq(T, offset=0)}), **models.plain()}
    metadata = METADATA if place == "the file's metadata" else None
    source = models.folder(path, tensors, None, metadata=metadata)
    for name, content in PLACES[place].items():
        whole = {**models.CONFIG, **content} if name == "config.json" else content
        (source / name).write_text(json.dumps(whole))
    return source


@pytest.mark.parametrize("place", PLACES)
def test_read_and_gone_afterwards(place: str, tmp_path: Path) -> None:
    source = model(tmp_path / "in", place)
    opened = Checkpoint.open(source)
    (module,) = opened.census.modules
    decoded = read(opened, module)
    same(decoded.weight, T)
    assert [n for n in decoded.notes if n.level != "info"] == []
    assert [n for n in opened.census.notes if n.level != "info"] == []

    repack(opened, tmp_path / "out")
    assert verify(source, tmp_path / "out")["ok"]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not [key for key in ("compression_config", "llm_config", "text_config") if "bits" in str(written.get(key))]
    assert written["quantization_config"]["quant_method"] == "gptq"
    assert not list((tmp_path / "out").glob("*quant*config.json"))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert not [key for key in file.metadata() if "gptq" in key]


def test_config_json_wins_over_the_other_files(tmp_path: Path) -> None:
    source = model(tmp_path / "in", "config.json: quantization_config")
    for name in ("quantize_config.json", "quant_config.json", "quantization_config.json"):
        (source / name).write_text(json.dumps({**V2, "checkpoint_format": "gptq", "group_size": 64}))
    opened = Checkpoint.open(source)
    (module,) = opened.census.modules
    same(read(opened, module).weight, T)
    conflicts = {(n.where, n.text.partition(" ")[0]) for n in opened.census.notes if n.level == "conflict"}
    files = ("quantize_config.json", "quant_config.json", "quantization_config.json")
    assert conflicts == {(file, key) for file in files for key in ("group_size", "layout")}


def test_modelopts_file_is_refused_by_name(tmp_path: Path) -> None:
    source = models.folder(tmp_path / "in", models.plain(), None)
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_AWQ", "group_size": 128}}
    (source / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedError, match=r"hf_quant_config\.json: got NVIDIA ModelOpt"):
        _ = Checkpoint.open(source).census
    with pytest.raises(UnsupportedError, match="ModelOpt"):
        repack(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
