"""Registers of products in flight, in SASS made by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from sass_hazards import hazardous, hazards, width

OTHER = "HGMMA.64x16x16.F32 R24, R44, gdesc[UR8], R24, gsb0"
"""A product before; its sums are R24 .. R31, like those of the one below."""
PRODUCT = "HGMMA.64x16x16.F32 R24, R40, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WAIT_BEFORE = "WARPGROUP.DEPBAR.LE gsb0, 0x1"


def sass(*lines: str) -> str:
    """As cuobjdump prints it, at addresses 0x0100, 0x0110, ..."""
    head = '\t\tFunction : wide_kernel\n\t.headerflags\t@"EF_CUDA_SM90"\n'
    one = "        /*{:04x}*/                   {} ;                  /* 0x0000000a18187210 */\n{}"
    encoding = " " * 68 + "/* 0x000fe20000000000 */\n"
    return head + "".join(one.format(0x100 + 16 * i, line, encoding) for i, line in enumerate(lines))


def test_clean() -> None:
    """The pipeline as it should be: the operand after a product goes where the product before it had its own."""
    loop = [
        "HMUL2 R40, R6, R7.reuse",
        PRODUCT,
        WAIT_BEFORE,
        "LDS.128 R44, [R16+UR8+0x30000]",
        "IADD3 R23, P3, R4, R40, RZ",  # reading a left operand is allowed
        "STG.E.64 desc[UR26][R20.64], R6",
        OTHER,
        WAIT_BEFORE,
        "@P2 BRA 0x0100",
    ]
    assert hazardous(sass(*loop, WAIT, "FADD R24, R24, R25", "CS2R R26, SRZ", "EXIT", "BRA 0x01d0")) == []
    assert hazards(sass("FADD R24, R24, R25", "LDS.128 R40, [R2]", "EXIT")) == 0


@pytest.mark.parametrize(
    "line",
    [
        "MOV R43, R2",
        "@!P0 MOV R40, R2",
        "IMAD.WIDE.U32 R42, R2, UR4, RZ",
        "CS2R R42, SRZ",
        "LDS.64 R42, [R16]",
        "LDSM.16.MT88.4 R40, [R7+0x36000]",
        "LOP3.LUT P0, R41, R6, 0xf000f, RZ, 0xea, !PT",
        "SHFL.IDX PT, R41, R2, RZ, 0x1f",
        "HGMMA.64x16x16.F32 R40, R48, gdesc[UR8], RZ, !UPT",
    ],
)
def test_left_operand_overwritten(line: str) -> None:
    assert hazards(sass(OTHER, PRODUCT, WAIT_BEFORE, line, WAIT, line)) == 1
    # that of the group before may be
    assert hazards(sass(PRODUCT, OTHER, WAIT_BEFORE, line, WAIT)) == (1 if line.startswith("HGMMA") else 0)


@pytest.mark.parametrize(
    "line",
    [
        "FADD R2, RZ, R31",
        "STG.E desc[UR26][R20.64], R24",
        "STL [R1+0x20], R25",
        "CS2R R30, SRZ",
        "ISETP.NE.U32.AND P2, PT, R31, R5, PT",
        "BAR.ARV R24, 0x120",
        "HGMMA.64x16x16.F32 R64, R28, gdesc[UR8], R64",
        "HGMMA.64x8x16.F32 R28, R48, gdesc[UR8], R28",
    ],
)
def test_sums_touched(line: str) -> None:
    assert hazardous(sass(PRODUCT, WAIT_BEFORE, line, WAIT, line)) == [f"/*0120*/ {line}"]


@pytest.mark.parametrize(
    "line",
    [
        "FADD R2, R23, R32",
        "MOV R39, R44",
        "STG.E.128 desc[UR26][R20.64], R32",
        "ISETP.NE.U32.AND P2, PT, R40, R5, PT",
        "BAR.ARV R41, 0x120",
        "R2UR UR24, R40",
        "UMOV UR24, UR40",
        "SYNCS.ARRIVE.TRANS64 RZ, [UR24+0x28], R40",
        "HGMMA.64x16x16.F32 R24, R48, gdesc[UR8], R24",
        "HGMMA.64x16x16.F32 R24, gdesc[UR8], R24",
    ],
)
def test_others_are_let_alone(line: str) -> None:
    assert hazards(sass(PRODUCT, line, WAIT)) == 0


def test_around_a_loop() -> None:
    """Harmless in the order of lines: only the next time round the product flies."""
    body = ("MOV R40, R2", "WARPGROUP.ARRIVE", PRODUCT, "@P0 BRA 0x0100")
    assert hazardous(sass(*body, WAIT)) == ["/*0100*/ MOV R40, R2"]
    assert hazards(sass(*body[:3], WAIT, body[3])) == 0
    # nor may the sums be read past its end
    assert hazards(sass(PRODUCT, WAIT_BEFORE, "@P0 BRA 0x0100", "FADD R2, R24, R25")) == 1


def test_follows_branches() -> None:
    """Lines that a branch passes over are not run; where it goes, they are. A guarded wait may not wait."""
    assert hazards(sass(PRODUCT, "BRA 0x0130", "MOV R40, R2", WAIT)) == 0
    assert hazards(sass(PRODUCT, "@!P1 BRA 0x0130", "MOV R40, R2", WAIT)) == 1
    assert hazards(sass(PRODUCT, "BRA UP0, 0x0130", "MOV R40, R2", WAIT)) == 1
    assert hazards(sass(PRODUCT, "BRA 0x0130", WAIT, "MOV R40, R2")) == 1
    assert hazards(sass("BSSY B0, 0x0140", PRODUCT, "BSYNC B0", WAIT, "MOV R40, R2")) == 1
    # a barrier is used again: the second BSYNC does not go on where the first BSSY says, over by then
    ways = ["BSSY B0, 0x0120", "BSYNC B0", "MOV R40, R2", PRODUCT, "BSSY B0, 0x0160", "BSYNC B0"]
    assert hazards(sass(*ways, WAIT, "MOV R40, R2")) == 0
    assert hazards(sass(*ways, "MOV R40, R2", WAIT)) == 1
    assert hazards(sass(PRODUCT, "@P0 " + WAIT, "MOV R40, R2")) == 1
    assert hazards(sass("BRX R2 -0x3c0", PRODUCT, "CALL.REL.NOINC 0x0100", WAIT, "RET.REL.NODEC R2 0x0")) == 1


def test_group_of_two() -> None:
    """A group is done as a whole, and what no group holds yet is never done."""
    first = PRODUCT.removesuffix(", gsb0")
    assert hazards(sass(first, OTHER, WAIT, "MOV R40, R2")) == 0
    assert hazards(sass(first, OTHER, WAIT_BEFORE, "MOV R40, R2", "MOV R44, R2")) == 2
    assert hazards(sass(first, WAIT, "MOV R40, R2")) == 1


def test_widths() -> None:
    names = {
        "IMAD": 1, "IMAD.WIDE.U32": 2, "IMAD.HI.U32": 1, "CS2R": 2, "CS2R.32": 1, "LDG.E.64.STRONG.GPU": 2,
        "LDS.128": 4, "LDS.U8": 1, "LDSM.16.MT88": 1, "LDSM.16.M88.2": 2, "LDSM.16.MT88.4": 4, "SHF.L.U64.HI": 1,
        "HMMA.16816.F32": 4, "DADD": 2, "LDL.LU.64": 2,
    }  # fmt: skip
    assert {name: width(name) for name in names} == names
