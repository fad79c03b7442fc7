"""Legacy .bin and .pt files: nothing in them runs, wherever it hides, and nothing large is read before it is asked for.

Case H9, and request R8: llm-awq's pickles as safetensors.
"""

from __future__ import annotations

import builtins
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint import models
from tests.formats import samples
from tests.formats.samples import truth
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.repack import repack
from w4plugin.checkpoint.verify import verify
from w4plugin.errors import CorruptError, UnsafeError, UnsupportedError


class Calls:
    """Calls a function with arguments when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.what = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.what


class StatefulList(list):  # type: ignore[type-arg]
    """A class of the attacker's own, restored by __setstate__."""

    def __setstate__(self, state: object) -> None:
        raise AssertionError("restored")


HIDING_PLACES: dict[str, Callable[[object], object]] = {
    "the file itself": lambda evil: evil,
    "a value": lambda evil: {"a.qweight": torch.zeros(2), "b": evil},
    "a state_dict": lambda evil: {"state_dict": {"a": torch.zeros(2), "b": evil}},
    "a list in a list": lambda evil: {"a": torch.zeros(2), "b": [[(1, evil)]]},
    "a key": lambda evil: {"a": torch.zeros(2), (evil,): 1},
    "a tensor's attribute": lambda evil: {"a": torch.nn.Parameter(torch.zeros(2)), "hooks": {"b": evil}},
}


@pytest.mark.parametrize("place", HIDING_PLACES)
@pytest.mark.parametrize("how", ["torch", "legacy", "plain"])
@pytest.mark.parametrize("function", ["system", "eval", "open", "class"])
def test_h9_nothing_runs_wherever_it_hides(place: str, how: str, function: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    evil = {
        "system": lambda: Calls(os.system, f"touch {mark}"),
        "eval": lambda: Calls(builtins.eval, f"open({str(mark)!r}, 'w')"),
        "open": lambda: Calls(open, str(mark), "w"),
        "class": lambda: StatefulList([1]),
    }[function]()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(models.CONFIG))
    try:
        content = HIDING_PLACES[place](evil)
    except TypeError:  # a list is no key
        content = HIDING_PLACES["a value"](evil)
    with open(folder / "pytorch_model.bin", "wb") as file:
        if how == "plain":
            pickle.dump(content, file)
        else:
            torch.save(content, file, _use_new_zipfile_serialization=how == "torch")
    with pytest.raises(UnsafeError, match="--allow-pickle"):
        Checkpoint.open(folder)
    with pytest.raises((UnsafeError, CorruptError), match=r"pytorch_model\.bin") as caught:
        Checkpoint.open(folder, allow_pickle=True)
    assert "weights_only=False" not in str(caught.value)
    assert not mark.exists()


def test_h9_a_pickle_beside_safetensors_is_not_even_opened(tmp_path: Path) -> None:
    source = models.awq(tmp_path / "in")
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        with open(source / name, "wb") as file:
            pickle.dump({"a": Calls(os.system, f"touch {tmp_path / 'ran'}")}, file)
        os.chmod(source / name, 0)
    checkpoint = Checkpoint.open(source, allow_pickle=True)
    assert not checkpoint.pickled
    repack(checkpoint, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert not list((tmp_path / "out").glob("*.bin"))


MEASURE = """
import resource, sys
from w4plugin.checkpoint.checkpoint import Checkpoint
Checkpoint.open(sys.argv[1] + "/small", allow_pickle=True).headers  # imports, allocators
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = Checkpoint.open(sys.argv[1] + "/large", allow_pickle=True)
assert found.headers["large.weight"].shape == (1 << 20, 64), found.headers
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_h9_tensors_of_a_pickle_are_mapped_and_not_read(tmp_path: Path) -> None:
    for name, rows in (("small", 1), ("large", 1 << 20)):
        (tmp_path / name).mkdir()
        content = {f"{name}.weight": torch.zeros(rows, 64, dtype=torch.float32)}  # 256 MiB
        torch.save(content, tmp_path / name / "pytorch_model.bin")
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64, f"{done.stdout} MiB"


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_result_of_awqs_search_is_explained(wrapped: bool, tmp_path: Path) -> None:
    found: dict[str, Any] = {"scale": [("model.layers.0", ("q",), torch.ones(3))], "clip": [("a", torch.ones(2))]}
    torch.save({"model": found} if wrapped else found, tmp_path / "llama-7b-w4-g128.pt")
    with pytest.raises(UnsupportedError, match="result of AWQ's scale search") as error:
        Checkpoint.open(tmp_path, allow_pickle=True)
    assert "run AWQ with it" in error.value.todo


PACKERS: dict[str, tuple[Callable[..., dict[str, Tensor]], str]] = {
    "llm-awq v2": (lambda t: samples.pack_fast(t, "scaled_zeros"), "llm-awq"),
    "llm-awq v1": (samples.pack_gemv, "awq-gemv"),
    "llm-awq before that": (samples.pack_awq, "awq"),
    "GPTQ-for-LLaMa": (lambda t: samples.pack_gptq(t, g_idx=False), "gptq"),
}


@pytest.mark.parametrize("tool", PACKERS)
def test_r8_bare_pickles_of_2023_become_safetensors(tool: str, tmp_path: Path) -> None:
    """One .pt file, no config: the tensors tell."""
    pack, format_name = PACKERS[tool]
    t = truth(3, K=1152, N=32, size=128, lowest=1)
    tensors = {**models.layers({models.name(0): pack(t)}), **models.plain()}
    (tmp_path / "in").mkdir()
    torch.save(tensors, tmp_path / "in" / "llama-7b-4bit-128g.pt")
    checkpoint = Checkpoint.open(tmp_path / "in", allow_pickle=True)
    report = repack(checkpoint, tmp_path / "out")
    assert [m["from"] for m in report["modules"]] == [format_name]
    assert verify(checkpoint, tmp_path / "out")["ok"]
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(after[f"{models.name(0)}.qweight"], samples.pack_gptq(t)["qweight"])
