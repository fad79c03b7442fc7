"""Registers that a wgmma product in flight still needs while another instruction takes them, read off a kernel's SASS.

A product runs beside the instructions after it until a wait, and nothing but the assembler keeps those away from its
left operand (until it is read) and from its sums. No scoreboard does, so what breaks this breaks results, at times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;", re.M)
NO_DESTINATION = re.compile(r"\w*SETP2?|FCHK|BAR|WARPSYNC|NANOSLEEP")
"""What names registers only to read them though one stands where others have their destination."""
NOT_FOLLOWED = ("BRX", "BRXU", "JMP", "JMX", "JMXU", "CALL", "RET")


@dataclass(frozen=True)
class Instruction:
    address: int
    guarded: bool
    name: str
    operands: list[str]
    text: str

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def left(self) -> range:
        """The left operand of a product, where it is in registers."""
        return span(self.operands[1], 4)

    @property
    def sums(self) -> range:
        found = re.match(r"HGMMA\.64x(\d+)x\d+\.F(16|32)\b", self.name)
        assert found is not None, self.text
        return span(self.operands[0], int(found[1]) * int(found[2]) // 64)

    @property
    def written(self) -> range:
        if NO_DESTINATION.fullmatch(self.kind):
            return range(0)
        # a predicate, also written, may come first
        first = next(dropwhile(lambda o: re.fullmatch(r"U?P[T\d]", o), self.operands), "")
        return self.sums if self.kind == "HGMMA" else span(first, width(self.name))

    @property
    def named(self) -> set[int]:
        """The first register of each operand: wide ones are aligned, so none reaches into sums from below."""
        return {int(n) for operand in self.operands for n in re.findall(r"\bR(\d+)", operand)} | set(self.written)


def span(operand: str, count: int) -> range:
    """The registers of an operand; none of RZ, an address or a constant."""
    found = re.fullmatch(r"R(\d+)(\.\w+)*", operand)
    return range(int(found[1]), int(found[1]) + count) if found else range(0)


def width(name: str) -> int:
    """Registers of an instruction's destination."""
    kind, *suffixes = name.split(".")
    if kind == "LDSM":
        return int(suffixes[-1]) if suffixes[-1].isdigit() else 1
    if kind == "CS2R":
        return 1 if "32" in suffixes else 2
    if "128" in suffixes or kind in ("HMMA", "IMMA"):
        return 4
    return 2 if {"64", "WIDE", "F64"} & set(suffixes) or kind in ("DADD", "DMUL", "DFMA", "DMMA") else 1


def hazards(sass: str) -> int:
    """How many instructions take a register that a product in flight needs."""
    return len(hazardous(sass))


def hazardous(sass: str) -> list[str]:
    """Those instructions. A jump with products in flight to a place that cannot be told counts as one."""
    out = []
    for function in sass.split("Function :"):
        lines = [
            Instruction(int(address, 16), bool(guard), name, operands.split(", "), f"/*{address}*/ {name} {operands}")
            for address, guard, name, operands in INSTRUCTION.findall(function)
        ]
        for line, before in zip(lines, in_flight(lines), strict=True):
            followed = line.kind not in NOT_FOLLOWED or not before
            if not followed or any(takes(line, lines[product]) for product in before):
                out.append(line.text)
    return out


def takes(line: Instruction, product: Instruction) -> bool:
    """Whether an instruction would spoil a product in flight. Products that add to the same sums run in order."""
    same_sums = line.kind == "HGMMA" and line.operands[0] == product.operands[0]
    named = set(line.left) if same_sums else line.named
    return bool(set(line.written) & set(product.left) or named & set(product.sums))


def in_flight(lines: list[Instruction]) -> list[dict[int, int]]:
    """What is in flight before each instruction, by whichever way it was reached (around loops, too): the product's
    index, and the fewest groups that have been committed since it was issued, its own included."""
    before: list[dict[int, int]] = [{} for _ in lines]
    ways = successors(lines)
    todo = [i for i, line in enumerate(lines) if line.kind == "HGMMA"]
    while todo:
        i = todo.pop()
        after = step(i, lines[i], before[i])
        for n in ways[i]:
            fewer = {p: age for p, age in after.items() if age < before[n].get(p, age + 1)}
            if fewer:
                before[n].update(fewer)
                todo.append(n)
    return before


def step(i: int, line: Instruction, before: Mapping[int, int]) -> Mapping[int, int]:
    if line.kind == "HGMMA":
        commits = line.operands[-1] == "gsb0"
        return {p: age + commits for p, age in {**before, i: 0}.items()}
    if line.name == "WARPGROUP.DEPBAR.LE" and not line.guarded:
        assert line.operands[0] == "gsb0", line.text
        return {p: age for p, age in before.items() if age <= int(line.operands[1], 16)}
    return before


def successors(lines: list[Instruction]) -> list[set[int]]:
    """Where each instruction may go on, as indices.

    BSYNC goes on where the BSSY of its barrier says: one that leads here, since barriers are used over and over.
    """
    index = {line.address: i for i, line in enumerate(lines)}
    ways = [set(plain_successors(i, lines, index)) for i in range(len(lines))]
    ends = {i: index[int(line.operands[1], 16)] for i, line in enumerate(lines) if line.kind == "BSSY"}
    led: list[set[int]] = [set() for _ in lines]  # by which BSSY, the last of each barrier
    todo = list(ends)
    while todo:
        i = todo.pop()
        line = lines[i]
        after = led[i]
        if line.kind == "BSSY":
            after = {i} | {b for b in led[i] if lines[b].operands[0] != line.operands[0]}
        elif line.kind == "BSYNC":
            ways[i] |= {ends[b] for b in after if lines[b].operands[0] == line.operands[0]}
        for n in ways[i]:
            if not after <= led[n]:
                led[n] |= after
                todo.append(n)
    for i, line in enumerate(lines):
        if line.kind == "BSYNC":
            same = {b for b in ends if lines[b].operands[0] == line.operands[0]}
            ways[i] |= {ends[b] for b in led[i] & same or same}  # any, where none is seen to lead here
    return ways


def plain_successors(i: int, lines: list[Instruction], index: Mapping[int, int]) -> Iterator[int]:
    """Those that the instruction itself tells."""
    line = lines[i]
    if line.kind == "BRA":
        yield index[int(line.operands[-1], 16)]
    # a second predicate of a branch is its first operand
    always = line.kind in ("BRA", "EXIT") and not line.guarded and len(line.operands) == 1
    if not always and i + 1 < len(lines):
        yield i + 1
