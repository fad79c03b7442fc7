"""The catalogue of problems that people had with INT4 checkpoints, and that each has a test named after it.

A case is a kind of fault, met in the public trackers of vLLM, GPTQModel, AutoGPTQ, AutoAWQ, llm-compressor, AutoRound
and others or read off a packer's source. Its tests are called ``test_<id>_...``, in lower case, and lie beside those of
the part that must get it right; ``pytest -k b3_`` runs those of one case.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CASES = {
    "A1": "v2 stores the zero point, v1 one less: both read as the same weight",
    "A2": "a symmetric file labelled v1 that stores 8: the values decide",
    "A3": "a zero of 0 in v1, lost by AutoGPTQ's packer: reported, never read as 16",
    "A6": "AWQ's zeros of 0 stay 0, and are refused by v1's writer",
    "A7": "AutoRound's packing_format says whether zeros have an offset, under any of its keys",
    "A9": "an empty qzeros tensor of a symmetric layer",
    "A12": "unsigned zero points in a signed field of compressed-tensors",
    "B1": "a row shard of an act-order layer needs the scales of the whole",
    "B2": "act-order survives, in files and in vLLM's weight stream",
    "B3": "a real g_idx under desc_act: false",
    "B7": "q, k and v with three different orders",
    "C1": "a row shard that cuts a group",
    "C2": "a short last group",
    "C4": "zero words that a packer dropped where N is no multiple of 32",
    "C7": "group_size -1",
    "C9": "a group size in the config that the tensors contradict",
    "C10": "a kernel's step over K that spans several groups",
    "C13": "rows that a packer dropped where K is no multiple of 32",
    "D1": "a bias of zeros in every Linear of 2023's files",
    "D3": "a quantised lm_head, stated or not",
    "D4": "a plain lm_head",
    "E1": "the config in any one of its files",
    "E2": "no config at all",
    "E4": "AWQ GEMV with padding columns",
    "E5": "checkpoints serialised in Marlin's order",
    "E6": "an include list that omits a packed layer",
    "E9": "rules that skip a packed layer, and layers that were never filled",
    "E12": "every spelling of actorder",
    "E13": "who decides which quantisation method a host uses",
    "F1": "a vision tower beside a packed language model",
    "F2": "lists of names from before a renaming",
    "F5": "tensors that are missing, or that nothing consumed",
    "F7": "a router beside packed experts",
    "F8": "an expert that calibration never reached",
    "G1": "bfloat16 activations with float16 scales, and the other way round",
    "G2": "sums that overflow float16 on the way",
    "G3": "scales that are zero or subnormal",
    "G6": "stored products of scale and zero, rounded",
    "H1": "a file shorter than its header says",
    "H2": "headers that are cut, absurd, overlapping or doubled",
    "H3": "names in an index that lead out of the folder",
    "H5": "one tensor in two shards",
    "H8": "a shard that is absent",
    "H9": "pickles that run code, and pickles of tensors",
    "H11": "memory that grows with the model",
    "H13": "a plugin that is loaded twice",
}


def names() -> set[str]:
    """Every test function, those of environments and machines that are not here included."""
    found = set()
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text(), str(path))
        found |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_a_test_named_after_it(case: str) -> None:
    assert any(name.startswith(f"test_{case.lower()}_") for name in names()), f"{case}: {CASES[case]}"
