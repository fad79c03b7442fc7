"""What is not INT4 group quantisation is refused by name, with advice (section 8)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.formats.samples import census, checkpoint, ct_config, gptq_config, pack_gptq, truth
from w4plugin.errors import UnsupportedError
from w4plugin.formats import find_modules
from w4plugin.formats.conformance import headers
from w4plugin.formats.refused import LAYOUTS, METHODS
from w4plugin.quant_config import QuantConfig

T = truth(0, lowest=1)
PLAIN = {"model.layers.0.up.weight": torch.zeros(8, 8).half()}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_by_name(method: str) -> None:
    for tensors in (PLAIN, checkpoint(layer=pack_gptq(T))):  # whatever the tensors look like
        with pytest.raises(UnsupportedError) as error:
            census(tensors, {"quant_method": method.upper(), "bits": 4})
        assert error.value.got == METHODS[method][0]
        assert error.value.todo == METHODS[method][1]


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts_by_name(layout: str) -> None:
    method = "compressed-tensors" if "-" in layout or layout == "dense" else "gptq"
    config = {"quant_method": method, "format": layout, "bits": 4}
    with pytest.raises(UnsupportedError) as error:
        census(checkpoint(layer=pack_gptq(T)), config)
    assert error.value.got == LAYOUTS[layout][0]


SIGNS: dict[str, dict[str, torch.Tensor]] = {
    "bitsandbytes": {
        "m.weight": torch.zeros(32, 1, dtype=torch.uint8),
        "m.weight.absmax": torch.zeros(2),
        "m.weight.quant_map": torch.zeros(16),
        "m.weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8),
    },
    "LLM.int8": {"m.weight": torch.zeros(8, 8, dtype=torch.int8), "m.SCB": torch.zeros(8)},
    "HQQ": {"m.W_q": torch.zeros(8, 8, dtype=torch.uint8), "m.scale": torch.zeros(8, 1), "m.zero": torch.zeros(8, 1)},
    "EXL2": {"m.q_weight": torch.zeros(8, 8, dtype=torch.int32), "m.q_scale": torch.zeros(1, 1, dtype=torch.int32)},
    "EXL3": {"m.trellis": torch.zeros(1, 1, 8, dtype=torch.int16), "m.suh": torch.zeros(8).half()},
    "AQLM": {"m.codes": torch.zeros(8, 1, 1, dtype=torch.int8), "m.codebooks": torch.zeros(1, 256, 1, 8).half()},
    "VPTQ": {"m.indices": torch.zeros(1, 8, dtype=torch.int32), "m.centroids.weight": torch.zeros(8, 8)},
    "QuIP#": {"m.Qidxs": torch.zeros(8, 8, dtype=torch.int16)},
    "SpQR": {"m.row_offsets": torch.zeros(9, dtype=torch.int32), "m.col_vals": torch.zeros(9, dtype=torch.int32)},
    "quanto": {"m.weight._data": torch.zeros(8, 8, dtype=torch.uint8), "m.weight._scale": torch.zeros(8, 1)},
    "QQQ": {"m.B": torch.zeros(4, 16, dtype=torch.int32), "m.s_channel": torch.zeros(1, 8)},
    "Marlin's 2:4": {"m.B_24": torch.zeros(4, 16, dtype=torch.int32), "m.B_meta": torch.zeros(8, dtype=torch.int16)},
    "FP8": {"m.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "m.weight_scale": torch.ones(1)},
    "INT8": {"m.weight": torch.zeros(8, 8, dtype=torch.int8), "m.weight_scale": torch.ones(8, 1)},
    "NVFP4": {"m.weight_packed": torch.zeros(8, 4, dtype=torch.uint8), "m.weight_global_scale": torch.ones(1)},
    "ModelOpt": {"m.weight": torch.zeros(8, 4, dtype=torch.uint8), "m.pre_quant_scale": torch.ones(8)},
    "MXFP4": {"m.gate_up_proj_blocks": torch.zeros(8, 4, dtype=torch.uint8), "m.gate_up_proj_bias": torch.ones(8)},
}


@pytest.mark.parametrize("name", sorted(SIGNS))
def test_tensors_give_the_method_away(name: str) -> None:
    tensors = dict(SIGNS[name])
    if name == "VPTQ":
        tensors["m.centroids"] = tensors.pop("m.centroids.weight")
    found = {
        full: header._replace(dtype="F8_E4M3") if tensors[full].dtype == torch.float8_e4m3fn else header
        for full, header in headers(tensors).items()
    }
    with pytest.raises(UnsupportedError, match=name.replace(".", r"\.")) as error:
        find_modules(found, QuantConfig())
    assert error.value.todo


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"data_type": "mx_fp"}, "data_type"),
        ({"rotation_config": {"kind": "hadamard"}}, "rotation_config"),
        ({"transform_config": {"u": 1}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"quant_algo": "W4A8_AWQ"}, "hf_quant_config.json"),
        ({"quantization": {"quant_algo": "NVFP4"}}, "hf_quant_config.json"),
    ],
)
def test_values_that_make_a_known_method_something_else(change: dict[str, Any], where: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        census(checkpoint(layer=pack_gptq(T)), gptq_config(T, **change))
    assert error.value.where == where


@pytest.mark.parametrize("packing", ["auto_round:fp8", "auto_round:nvfp4", "auto_round:mxfp4", "auto_round:fp8_static"])
def test_float_packings_of_autoround(packing: str) -> None:
    with pytest.raises(UnsupportedError, match="AutoRound"):
        census(PLAIN, {"quant_method": "auto-round", "packing_format": packing, "bits": 4})


@pytest.mark.parametrize(
    ("weights", "scheme"),
    [
        ({"type": "float"}, {}),
        ({"strategy": "tensor"}, {}),
        ({"strategy": "block"}, {}),
        ({}, {"input_activations": {"num_bits": 8}}),
        ({}, {"format": "nvfp4-pack-quantized"}),
    ],
)
def test_schemes_of_compressed_tensors(weights: dict[str, Any], scheme: dict[str, Any]) -> None:
    config = ct_config(T, **weights)
    config["config_groups"]["group_0"] |= scheme
    with pytest.raises(UnsupportedError, match="config_groups: group_0"):
        census(PLAIN, config)


def test_what_is_harmless_is_not_refused() -> None:
    config = gptq_config(T, rotation=None, transform_config={}, sparsity_config={"format": "dense"}, data_type="int")
    assert len(census(checkpoint(layer=pack_gptq(T)), config).modules) == 1
