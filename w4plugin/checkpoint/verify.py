"""Proof that two checkpoints hold the same weights, or that one is consistent in itself.

For every packed module the integer codes, true zero points, scales and groups of both sides are worked out by
:mod:`w4plugin.reference`, which shares no code with the readers and writers, and compared by equality; then the
dequantised weights, bit for bit. Every other tensor is compared byte for byte. A tensor that neither side accounts for
is a failure, and so is a bit that no meaning reads: what the report of a w4plugin output says about its tensors' hashes
must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from w4plugin.checkpoint import bounded, comparison, output
from w4plugin.checkpoint.checkpoint import Checkpoint
from w4plugin.checkpoint.comparison import Findings
from w4plugin.checkpoint.staging import REPORT
from w4plugin.checkpoint.weight_files import read_json
from w4plugin.errors import CorruptError
from w4plugin.formats.format import Module

PACKED_SUFFIXES = frozenset(
    {"qweight", "qzeros", "g_idx", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape",
     "scaled_zeros", "B", "s"}
)  # fmt: skip
"""Last parts of names that only packed modules have; one that belongs to no module would be lost on loading.
``scales`` is missing on purpose: AWQ's scaled activations carry one of their own."""


SPREAD = 3
"""Memory that a comparison costs, as a multiple of the bytes of both sides: as read, and as decoded."""


def verify(
    model: str | Path | Checkpoint,
    other: str | Path | Checkpoint | None = None,
    *,
    workers: int | None = None,
    begin: Callable[[int], None] = lambda total: None,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Compare two checkpoints, or check one.

    Args:
        model: the source, a folder or hub id.
        other: what was made of it; None checks ``model`` alone.
        workers: modules at the same time.
        begin, progress: called with bytes to read and bytes read.

    Returns:
        The report, whose ``ok`` says whether everything is equal; see ``report.schema.json``.

    Raises:
        CorruptError, UnsupportedError: a checkpoint cannot be read at all.
    """
    one = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
    two = other if isinstance(other, Checkpoint) or other is None else Checkpoint.open(other)
    found = Findings()
    tasks = list(_alone(one, found) if two is None else _compare(one, two, found))
    begin(sum(size for size, _ in tasks))

    def told(size: int, task: Callable[[], None]) -> bounded.Task:
        def work() -> None:
            task()
            progress(size)

        return SPREAD * size, work

    bounded.run((told(size, task) for size, task in tasks), workers)
    notes = [*one.notes, *one.census.notes, *(() if two is None else (*two.notes, *two.census.notes))]
    return {
        "command": "verify",
        "w4plugin": output.version(),
        "ok": not found.mismatches,
        "source": output.source(one),
        "other": None if two is None else output.source(two),
        "modules": found.modules,
        "plain_tensors": found.plain,
        "mismatches": [{"tensor": name, "what": what} for name, what in sorted(set(found.mismatches))],
        "share_of_bound": found.furthest,
        "notes": [output.note(n) for n in dict.fromkeys(notes)],
    }


Task = tuple[int, Callable[[], None]]


def _alone(one: Checkpoint, found: Findings) -> Iterator[Task]:
    """Every module: the reader against the reference. Every tensor: its recorded hash, where there is a report."""
    hashes = _recorded(one, found)
    for module in one.census.modules:
        found.modules += 1
        yield _size(one, module), partial(comparison.check_module, one, module, hashes, found)
    for module in one.census.other_width:
        for name in module.tensors.values():
            found.plain += 1
            yield one.nbytes(name), partial(comparison.check_plain, one, name, hashes, found)
    for name in one.census.plain:
        found.plain += 1
        _require_owner(name, found)
        yield one.nbytes(name), partial(comparison.check_plain, one, name, hashes, found)


def _compare(one: Checkpoint, two: Checkpoint, found: Findings) -> Iterator[Task]:
    """Every module and tensor of ``one`` against its counterpart, then what ``two`` has beyond that."""
    hashes = _recorded(two, found)
    packed = {module.name: module for module in two.census.modules}
    left = set(two.headers)
    for module in one.census.modules:
        found.modules += 1
        partner = packed.get(module.name)
        weight = f"{module.name}.weight"
        if partner is not None:
            left -= set(partner.tensors.values())
            size = _size(one, module) + _size(two, partner)
            yield size, partial(comparison.compare_packed, (one, module), (two, partner), hashes, found)
        elif weight in two.headers:
            left -= {weight, f"{module.name}.bias"}
            yield (
                _size(one, module),
                partial(comparison.compare_made_plain, (one, module), (two, weight), hashes, found),
            )
        else:
            found.differ(module.name, "no such module in the other checkpoint")
    for module in one.census.other_width:
        weight = f"{module.name}.weight"
        if weight in two.headers:
            found.modules += 1
            left -= {weight, f"{module.name}.bias"}
            yield _size(one, module), partial(comparison.compare_wide, (one, module), (two, weight), hashes, found)
        else:
            for name in module.tensors.values():
                found.plain += 1
                left.discard(name)
                yield one.nbytes(name), partial(comparison.compare_plain, one, two, name, hashes, found)
    for name in one.census.plain:
        found.plain += 1
        _require_owner(name, found)
        left.discard(name)
        yield one.nbytes(name), partial(comparison.compare_plain, one, two, name, hashes, found)
    for name in sorted(left):
        found.differ(name, "not in the source: nothing there accounts for it")


def _size(checkpoint: Checkpoint, module: Module) -> int:
    return sum(checkpoint.nbytes(name) for name in module.tensors.values())


def _require_owner(name: str, found: Findings) -> None:
    if name.rpartition(".")[2] in PACKED_SUFFIXES:
        found.differ(name, "belongs to no packed module: loaders would drop it")


def _recorded(checkpoint: Checkpoint, found: Findings) -> dict[str, str]:
    """Hashes by tensor, as the report beside an output of this project has them; nothing for other checkpoints."""
    if REPORT not in checkpoint.source.names():
        return {}
    hashes = read_json(checkpoint.source, REPORT).get("tensors")
    if not isinstance(hashes, dict) or not all(isinstance(v, str) for v in hashes.values()):
        raise CorruptError(REPORT, got="no table of tensor hashes", wanted="the report that w4plugin wrote")
    for name in hashes.keys() ^ checkpoint.headers.keys():
        found.differ(name, f"not in both {REPORT} and the weights")
    return hashes
