"""AutoRound's packers and unpackers of GPTQ and AWQ tensors, from its own package."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.truth.layers import draw, read, same, write
from w4plugin.tensor import W4Tensor

SIZES = [(256, 32, 32), (512, 64, 128), (64, 96, -1), (2048, 32, 128)]


@pytest.fixture(scope="module")
def site() -> Path:
    """Where the package lies; its ``__init__`` wants accelerate and datasets, which packing does not."""
    found = PathFinder.find_spec("auto_round")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parents[1]


def load(site: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One file of AutoRound, with the one function of the rest that it calls."""
    package, used = ModuleType("auto_round"), ModuleType("auto_round.utils")
    used.get_packing_device = lambda device=None: "cpu"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "auto_round", package)
    monkeypatch.setitem(sys.modules, "auto_round.utils", used)
    spec = spec_from_file_location(file.replace("/", "_").removesuffix(".py"), site / file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def linear(weight: W4Tensor) -> nn.Linear:
    made = nn.Linear(weight.K, weight.N, bias=False)
    made.weight.data = weight.dequantize(torch.float32).mT.contiguous()
    return made


def stated(weight: W4Tensor, **more: Any) -> dict[str, Any]:
    size = -1 if weight.G == 1 else weight.group_size
    return {"bits": 4, "group_size": size, "sym": weight.symmetric, "data_type": "int", **more}


def unpacked(module: nn.Module, tensors: dict[str, Tensor]) -> Tensor:
    """``[K, N]``: what their layer multiplies by."""
    for name, tensor in tensors.items():
        if name != "g_idx":
            setattr(module, name, tensor)
    rows: Tensor = module(torch.eye(tensors["scales"].shape[0] * module.group_size, dtype=torch.float16))
    return rows


V1, V2 = "auto_round_extension/torch/qlinear_torch_zp.py", "auto_round_extension/torch/qlinear_torch.py"
AWQ = "auto_round/export/export_to_awq/utils.py"


@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("K", "N", "size"), SIZES)
@pytest.mark.parametrize(
    ("file", "packing", "writer"),
    [(V1, "auto_round:auto_gptq", "gptq"), (V2, "auto_round", "auto-round"), (V2, "auto_round:gptqmodel", "gptq_v2")],
)
def test_gptq(
    K: int, N: int, size: int, sym: bool, file: str, packing: str, writer: str, site: Path, monkeypatch: Any
) -> None:
    weight = draw(K + N, K, N, size, sym=sym, lowest=0)
    their_module = load(site, file, monkeypatch).QuantLinear(4, size, K, N, False)
    their_module.device = "cpu"  # which their exporter sets
    zeros = weight.full_zeros().T.int().contiguous()
    their_module.pack(linear(weight), weight.scales.T.float().contiguous(), zeros)
    theirs = {name: getattr(their_module, name) for name in ("qweight", "qzeros", "scales")}
    found = read(theirs, stated(weight, quant_method="auto-round", packing_format=packing))
    same(found.weight, weight)

    if writer == "gptq":  # v1's writer refuses zero points of 0, which its readers (theirs too) decode as 16
        weight = draw(K + N, K, N, size, sym=sym, lowest=1)
    ours, _ = write(writer, weight)
    assert torch.equal(unpacked(their_module, ours), weight.dequantize(torch.float16))


@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("K", "N", "size"), SIZES)
def test_awq(K: int, N: int, size: int, sym: bool, site: Path, monkeypatch: Any) -> None:
    weight = draw(K + N, K, N, size, sym=sym)
    module = load(site, AWQ, monkeypatch)
    scales, zeros = weight.scales.float(), weight.full_zeros().int()
    packed = module.WQLinear_GEMM.from_linear(linear(weight), 4, weight.group_size, scales=scales, zeros=zeros)
    theirs = dict(packed.named_buffers())
    found = read(theirs, stated(weight, quant_method="awq", version="gemm", zero_point=not sym))
    same(found.weight, weight)

    ours, _ = write("awq", weight)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    back = module.dequantize_gemm(ours["qweight"], ours["qzeros"], ours["scales"], 4, weight.group_size)
    assert torch.equal(back, weight.dequantize(torch.float16))
