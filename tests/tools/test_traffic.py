"""Reading Nsight Compute's table, without Nsight Compute."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "tools" / "traffic"
TABLE = """==PROF== Connected to process 12
RESULT {"backend": "hopper", "expected_read": 60}
==PROF== Disconnected
"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","Mbyte","Kbyte"
"0","12","dequantize_kernel","58.72","1,024.5"
"1","12","nvjet_hsh_64x8","235.00","12"
"""


def test_parse() -> None:
    loader = importlib.machinery.SourceFileLoader("traffic", str(PATH))
    spec = importlib.util.spec_from_loader("traffic", loader)
    assert spec is not None
    traffic = importlib.util.module_from_spec(spec)
    loader.exec_module(traffic)
    found = traffic.parse(TABLE)
    assert found == {"kernels": ["dequantize_kernel", "nvjet_hsh_64x8"], "read": 293720000, "written": 1036500}
    with pytest.raises(SystemExit, match="no table"):
        traffic.parse("ERR_NVGPUCTRPERM")
