"""True zero points of GPTQ files, which store them in three ways.

v2 ("gptq_v2") stores z. v1 ("gptq") stores z - 1, which has no room for z = 0, and writers disagree about it:

| writer | intended 5,5,0,5,5,5,5,5 is stored as | decoded by |
|---|---|---|
| GPTQModel, AutoRound: subtract 0x11111111 from the word | 4,4,15,3,4,4,4,4 | adding 0x11111111 to the word ("carry") |
| AutoGPTQ's AWQ import: (z - 1) & 15 a nibble | 4,4,15,4,4,4,4,4 | (n + 1) & 15 a nibble |
| AutoGPTQ: -1 cast to uint32, then OR-ed in | 4,4,15,15,15,15,15,15 | nothing: lanes above the first zero are lost |

Labels lie: files that say "gptq" and store 8 (v2) exist, so for a symmetric module the values decide. A zero of 16,
which some old readers produce from a stored 15, fits no 4-bit code and is never made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from w4plugin.errors import CorruptError
from w4plugin.note import Note


class Zeros(NamedTuple):
    """Decoded zero points.

    Attributes:
        zeros: uint8 ``[*E, G, N]``, None when every one is the middle of its range (8 at 4 bits).
        rule: "true", "minus-one", "minus-one-carry" or "symmetric".
        notes: what decided.
    """

    zeros: Tensor | None
    rule: str
    notes: tuple[Note, ...]


class Claim(NamedTuple):
    """What the config says about the zero points of one module.

    Attributes:
        true: True when the label says that true zeros are stored (v2), False for z - 1 (v1).
        sym: True, False, or None when no config speaks.
        borrows: True when the producer subtracts from whole words.
        label: the label, for messages.
        bits: width of a code.
    """

    true: bool
    sym: bool | None
    borrows: bool
    label: str
    bits: int = 4

    @property
    def middle(self) -> int:
        """The zero point of symmetric quantisation."""
        return 1 << (self.bits - 1)

    @property
    def top(self) -> int:
        """The largest code, which is how z - 1 looks for z = 0."""
        return (1 << self.bits) - 1


def decode(name: str, stored: Tensor, columns: int, lanes: int, claim: Claim) -> Zeros:
    """Zero points of one GPTQ module.

    Args:
        name: module, for messages.
        stored: uint8 ``[*E, G, C]`` unpacked codes; C may be below ``columns`` (missing words) or above (padding).
        columns: N.
        lanes: codes in a word of the packer (8 for int32 at 4 bits); 1 where words do not hold whole codes (3 bits).
        claim: what the config says.

    Raises:
        CorruptError: zero points of an asymmetric module are missing.
    """
    where = f"{name}.qzeros"
    if stored.numel() == 0 or stored.shape[-1] < columns:
        return _missing(where, stored, columns, claim)
    nibbles = stored[..., :columns]
    if claim.sym is not False:
        level = _constant(nibbles)
        if level is not None and level in (claim.middle - 1, claim.middle):
            return _symmetric(where, level, claim)
        if claim.sym:
            text = f"the config says symmetric, but the zero points are not all {claim.middle}; they are read as stored"
            found = _asymmetric(where, stored, columns, lanes, claim)
            return found._replace(notes=(Note("conflict", where, text), *found.notes))
    return _asymmetric(where, stored, columns, lanes, claim)


def _symmetric(where: str, level: int, claim: Claim) -> Zeros:
    true = level == claim.middle
    rule = "true" if true else "minus-one"
    if true == claim.true:
        return Zeros(None, rule, ())
    stores = "true zeros (gptq_v2)" if true else "zero - 1 (gptq)"
    text = f"the label says {claim.label}, but every stored zero point is {level}: the file stores {stores}"
    return Zeros(None, rule, (Note("conflict", where, text),))


def _missing(where: str, stored: Tensor, columns: int, claim: Claim) -> Zeros:
    have = stored.shape[-1] if stored.numel() else 0
    level = _constant(stored) if stored.numel() else None
    if claim.sym is False or (stored.numel() and level not in (claim.middle - 1, claim.middle)):
        raise CorruptError(
            where,
            got=f"zero points for {have} of {columns} columns ({columns - have} columns missing)",
            wanted=f"{columns}",
            todo="the packer dropped the others, and an asymmetric module cannot do without; quantise the model again",
        )
    if claim.sym is None and not stored.numel():
        raise CorruptError(where, got="no zero points and no config", wanted="a config that says sym = true")
    text = f"zero points for {have} of {columns} columns; a symmetric module's are {claim.middle}"
    return Zeros(None, "symmetric", (Note("info" if have == 0 else "warning", where, text),))


def _asymmetric(where: str, stored: Tensor, columns: int, lanes: int, claim: Claim) -> Zeros:
    nibbles = stored[..., :columns]
    if claim.true:
        return _plain(nibbles, "true", (), claim)
    count = int((nibbles == claim.top).sum())
    if not count:
        return _plain(nibbles + 1, "minus-one", (), claim)
    if claim.borrows and lanes > 1:
        text = f"{count} stored values of {claim.top} stand for zero = 0 with a borrow from the next ({claim.label})"
        zeros = carried(stored, lanes, claim.bits)[..., :columns]
        return _plain(zeros, "minus-one-carry", (Note("info", where, text),), claim)
    note = _wrap_note(where, nibbles, lanes, count, claim.top)
    return _plain((nibbles + 1) & claim.top, "minus-one", (note,), claim)


def carried(stored: Tensor, lanes: int, bits: int = 4) -> Tensor:
    """Add 1 to every code of each word as one integer: the largest code becomes 0 and carries into the next lane.

    Args:
        stored: uint8 ``[..., C]``, the codes of words in a row.
        lanes: codes in a word; the carry out of the last one is lost, as in integer arithmetic.
        bits: width of a code.
    """
    missing = -stored.shape[-1] % lanes
    padded = torch.nn.functional.pad(stored, (0, missing))
    words = padded.unflatten(-1, (-1, lanes))
    out = torch.empty_like(words)
    carry = torch.zeros_like(words[..., 0], dtype=torch.int16)
    for j in range(lanes):
        lane = words[..., j].to(torch.int16) + 1 + carry
        out[..., j] = lane & ((1 << bits) - 1)
        carry = lane >> bits
    return out.flatten(-2)[..., : stored.shape[-1]]


def _wrap_note(where: str, nibbles: Tensor, lanes: int, count: int, largest: int) -> Note:
    """What stored values of 15 (the largest code) mean when the producer is unknown; see the table above."""
    missing = -nibbles.shape[-1] % lanes
    # padding copies the last real lane, so that a smear reaching the end of a short word still counts as one
    tail = nibbles[..., -1:].expand(*nibbles.shape[:-1], missing)
    words = torch.cat([nibbles, tail], -1).unflatten(-1, (-1, lanes))
    top = words == largest
    started = top.cumsum(-1) > 0
    smeared = (started == top).all(-1) & top.any(-1)  # from the first 15 on, every lane is 15
    if bool((smeared | ~top.any(-1)).all()):
        lost = int((top.sum(-1).clamp(min=1) - 1)[smeared].sum())
        if lost:
            text = (
                f"AutoGPTQ zero underflow: {lost} zero points were lost by the quantiser in {int(smeared.sum())} words"
                " (a zero of 0 overwrote the lanes above it); they are read as 0"
            )
            return Note("warning", where, text)
        text = f"{count} stored values of {largest} stand for zero = 0; none has a lane above it to tell more"
        return Note("info", where, text)
    text = (
        f"ambiguous: {count} stored values of {largest}, and no producer is named; each is read as zero = 0"
        " (a tool that subtracts from whole words would have borrowed from the next lane)"
    )
    return Note("warning", where, text)


def _plain(zeros: Tensor, rule: str, notes: tuple[Note, ...], claim: Claim) -> Zeros:
    """All zero points in the middle is what symmetric means, whatever the config calls it."""
    if bool((zeros == claim.middle).all()):
        return Zeros(None, rule, notes)
    return Zeros(zeros.contiguous(), rule, notes)


def _constant(values: Tensor) -> int | None:
    """The one value of a tensor, None when there are several."""
    first = values[(0,) * values.ndim]
    if not any(values.stride()):  # one code that stands for all
        return int(first)
    return int(first) if bool((values == first).all()) else None
