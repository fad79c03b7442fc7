"""Layers that the producers' own packing code made, against the codes that went in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.formats.test_real_checkpoints import FORMATS
from w4plugin.errors import CorruptError
from w4plugin.formats import Decoded, Module, find_modules, read_module
from w4plugin.formats.conformance import headers
from w4plugin.formats.other_widths import dequantize
from w4plugin.formats.registry import BUILT_IN
from w4plugin.packing import unpack
from w4plugin.quant_config import QuantConfig

FOLDER = Path(__file__).parent.parent / "data" / "upstream"

WHOLE = {
    "marlin_g128": "gptq-marlin",
    "marlin_channel": "gptq-marlin",
    "autoawq_marlin_g128": "awq-marlin",
    "autoawq_gemv_g32": "awq-gemv",
    "autoawq_gemv_g64": "awq-gemv",
    "autoawq_gemv_g128": "awq-gemv",
    "autoawq_gemv_fast_g32": "awq-gemv-fast",
    "autoawq_gemv_fast_g64": "awq-gemv-fast",
    "autoawq_gemv_fast_g128": "awq-gemv-fast",
    "llm_awq_v2_bf16_g128": "llm-awq",
    "gptq_v0": "gptq-v0",
    "autogptq_n48_sym": "gptq",
    "auto_round_asym": "auto-round",
    "auto_round_auto_gptq_asym": "auto-round",
    "gptqmodel_int8": "gptq_v2",
    "gptqmodel_int16": "gptq_v2",
    "gptqmodel_int64": "gptq_v2",
    "compressed_tensors_0_9_1": "compressed-tensors",
    "compressed_tensors_0_18_0": "compressed-tensors",
}

OTHER = (*(f"autogptq_{b}bit" for b in (2, 3, 8)), *(f"gptqmodel_planar_{b}bit" for b in (3, 5, 6, 7)))


def opened(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], QuantConfig]:
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as f:
        tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
        stated = json.loads(f.metadata()["config"])
    want = {key.removeprefix("want."): tensors.pop(key) for key in list(tensors) if key.startswith("want.")}
    return tensors, want, QuantConfig.from_dict(stated) if stated else QuantConfig()


def module_of(tensors: dict[str, Tensor], config: QuantConfig) -> Module:
    census = find_modules({f"layer.{k}": h for k, h in headers(tensors).items()}, config)
    (module,) = census.modules + census.other_width
    return module


def read(name: str) -> tuple[Module, Decoded, dict[str, Tensor]]:
    tensors, want, config = opened(name)
    module = module_of(tensors, config)
    return module, read_module(module, tensors, config), want


def test_every_format_was_written_by_a_tool_of_its_own() -> None:
    """Here, or among the checkpoints that tools wrote (test_real_checkpoints)."""
    found = {*WHOLE.values(), *FORMATS.values()}
    assert {f.name for f in BUILT_IN} == found


def test_every_file_is_used() -> None:
    used = {*WHOLE, *OTHER, "autogptq_underflow", "autogptq_k80", "autogptq_n48_asym"}
    assert used == {p.stem for p in FOLDER.glob("*.safetensors")}


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_codes_zero_points_and_scales(name: str) -> None:
    module, decoded, want = read(name)
    weight = decoded.weight
    assert module.format == WHOLE[name]
    assert torch.equal(unpack(weight.qweight, 0), want["q"])
    assert torch.equal(weight.full_zeros(), want["z"])
    assert torch.equal(weight.scales.double(), want["s"].double())
    sequential = torch.arange(weight.K) // (weight.K // weight.G)
    assert torch.equal(weight.groups(), want.get("g", sequential))
    assert (weight.g_idx is not None) == ("g" in want and not torch.equal(want["g"], sequential))
    spoken = [note for note in decoded.notes if note.level != "info"]
    assert bool(spoken) == (name == "autogptq_n48_sym"), spoken


@pytest.mark.parametrize("name", sorted(OTHER))
def test_other_widths_become_plain(name: str) -> None:
    tensors, want, config = opened(name)
    module = module_of(tensors, config)
    assert module.bits == int(name.rpartition("bit")[0][-1])
    rows = torch.arange(module.K) // 32
    wanted = (want["q"].double() - want["z"].double()[rows]) * want["s"].double()[rows]
    assert torch.equal(dequantize(module, tensors, config, torch.float64).weight, wanted.T)


def test_a3_underflow_of_autogptqs_own_packer_is_reported() -> None:
    _, decoded, want = read("autogptq_underflow")
    zeros = decoded.weight.full_zeros()
    lost = zeros != want["z"]
    assert int(lost.sum()) == 14
    assert bool((zeros[lost] == 0).all())
    assert bool((zeros[want["z"] == 0] == 0).all())
    assert torch.equal(unpack(decoded.weight.qweight, 0), want["q"])
    (note,) = decoded.notes
    assert note.level == "warning"
    assert "14 zero points were lost by the quantiser in 4 words" in note.text


def test_c13_rows_that_autogptqs_own_packer_dropped() -> None:
    tensors, _, config = opened("autogptq_k80")
    with pytest.raises(CorruptError, match=r"64 rows at 4 bits.*80"):
        module_of(tensors, config)


def test_c4_zero_points_that_autogptqs_own_packer_dropped() -> None:
    tensors, _, config = opened("autogptq_n48_asym")
    with pytest.raises(CorruptError, match="16 columns missing"):
        read_module(module_of(tensors, config), tensors, config)
