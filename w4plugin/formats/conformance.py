"""What every format must do, as checks that a new one runs against itself.

A format's author writes a sample maker: from a :class:`random.Random` it packs a random module with the producer's own
rules and says what the bits mean. :func:`check` then runs everything:

* the headers are recognised, with the right K, N and group size;
* reading gives exactly the sample's codes, zero points, scales and groups, twice the same, and changes no input;
* rows of the module read as a shard equal the rows of the whole, where the sample can be cut;
* what ``write`` makes is recognised by what ``config`` says, and reads back the same, byte for byte when written again;
* a damaged module raises an error of :mod:`w4plugin.errors` or reads as some weight, and never anything else; damage
  that no weight can have, such as a missing tensor or a scale that is not finite, always raises.

A failed check raises :class:`~w4plugin.errors.MismatchError` with both values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from w4plugin.errors import MismatchError, W4Error
from w4plugin.formats.format import Candidate, Decoded, Format, Layer, Module, RowShard, TensorHeader
from w4plugin.packing import unpack
from w4plugin.quant_config import QuantConfig
from w4plugin.tensor import W4Tensor

DTYPES: Mapping[torch.dtype, str] = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bool: "BOOL",
}
"""safetensors' spelling of each dtype."""

MODULE = "model.layers.0.mlp.down_proj"


@dataclass(frozen=True, eq=False)
class Sample:
    """One packed module and what it means.

    Attributes:
        tensors: by suffix, as the producer would store them.
        config: the value of ``quantization_config`` that belongs to them.
        q: uint8 ``[K, N]`` codes.
        z: uint8 ``[G, N]`` true zero points.
        s: ``[G, N]`` scales in the stored dtype.
        g: int ``[K]`` group of each row.
        group_size: what the census must find; K for one group.
        rows: cuts the stored tensors to the rows of a shard, None when the layout cannot be cut.
        required: suffixes without which the module makes no sense.
        whole: those of them that no column may be missing from (a symmetric module may lack zero points).
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    q: Tensor
    z: Tensor
    s: Tensor
    g: Tensor
    group_size: int
    rows: Callable[[int, int], Mapping[str, Tensor]] | None = None
    required: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()


SampleMaker = Callable[[Random], Sample]


def check(fmt: Format, make: SampleMaker, random: Random, *, damages: int = 8) -> None:
    """Run every check on one random sample.

    Args:
        fmt: the format.
        make: packs a random module.
        random: source of all choices, so that a failure can be repeated.
        damages: how many random damages to try.

    Raises:
        MismatchError: a check failed.
    """
    sample = make(random)
    module, decoded = check_read(fmt, sample)
    if sample.rows is not None:
        check_rows(fmt, sample, module)
    if fmt.write is not None and fmt.config is not None:
        check_write(fmt, decoded.weight)
    check_required(fmt, sample)
    for _ in range(damages):
        check_damage(fmt, sample, random)


def headers(tensors: Mapping[str, Tensor]) -> dict[str, TensorHeader]:
    """What a file of these tensors would say about them."""
    return {name: TensorHeader(DTYPES.get(t.dtype, "C64"), tuple(t.shape)) for name, t in tensors.items()}


def detect(fmt: Format, tensors: Mapping[str, Tensor], config: QuantConfig) -> Module | None:
    """The module that the headers show, None when they are not this format's."""
    found = fmt.detect(Candidate(MODULE, headers(tensors), config))
    if found is None:
        return None
    names = {suffix: f"{MODULE}.{suffix}" for suffix in tensors}
    return Module(MODULE, fmt.name, found.bits, found.K, found.N, found.group_size, names, found.experts)


def check_read(fmt: Format, sample: Sample) -> tuple[Module, Decoded]:
    """Headers and data of an undamaged sample."""
    config = QuantConfig.from_dict(sample.config)
    module = detect(fmt, sample.tensors, config)
    if module is None:
        raise _mismatch(fmt, "headers that are not recognised", str(headers(sample.tensors)))
    K, N = sample.q.shape
    _equal(fmt, "bits, K, N", (module.bits, module.K, module.N), (4, K, N))
    if module.group_size is not None:
        _equal(fmt, "group_size", module.group_size, sample.group_size)
    before = {name: t.clone() for name, t in sample.tensors.items()}
    decoded = fmt.read(module, sample.tensors, config, None)
    again = fmt.read(module, sample.tensors, config, None)
    _same_weight(fmt, "a second reading", again.weight, decoded.weight)
    for name, t in before.items():
        _equal_tensor(fmt, f"{name} after reading", sample.tensors[name], t)
    weight = decoded.weight
    _equal_tensor(fmt, "codes", unpack(weight.qweight, -2), sample.q)
    _equal_tensor(fmt, "zero points", weight.full_zeros(), sample.z)
    _equal_tensor(fmt, "scales", weight.scales, sample.s)
    _equal_tensor(fmt, "groups", weight.groups(), sample.g.long())
    return module, decoded


def check_rows(fmt: Format, sample: Sample, module: Module) -> None:
    """Two shards of rows, cut at a multiple of eight and not of the group size where there is one."""
    assert sample.rows is not None
    config = QuantConfig.from_dict(sample.config)
    K = sample.q.shape[0]
    middle = max(8, K // 2 // 8 * 8)
    whole = (sample.q - sample.z[sample.g.long()].to(torch.int16)) * sample.s[sample.g.long()].to(torch.float64)
    for first, last in ((0, middle), (middle, K)):
        if first == last:
            continue
        part = fmt.read(module, sample.rows(first, last), config, RowShard(first, K))
        _equal_tensor(fmt, f"rows {first}:{last} of a shard", part.weight.dequantize(torch.float64), whole[first:last])


def check_write(fmt: Format, weight: W4Tensor) -> None:
    """What is written reads back, through the config that is written beside it."""
    assert fmt.write is not None
    assert fmt.config is not None
    try:
        tensors = fmt.write(weight)
        config = QuantConfig.from_dict(fmt.config([Layer.of(MODULE, weight)], []))
    except W4Error:  # a format may refuse what it cannot hold; it must not approximate
        return
    module = detect(fmt, tensors, config)
    if module is None:
        raise _mismatch(fmt, "its own output, which it does not recognise", str(headers(tensors)))
    decoded = fmt.read(module, tensors, config, None)
    _same_weight(fmt, "a round trip", decoded.weight, weight)
    conflicts = [note for note in decoded.notes if note.level != "info"]
    _equal(fmt, "notes on its own output", conflicts, [])
    for name, t in fmt.write(decoded.weight).items():
        _equal_tensor(fmt, f"{name} written again", t, tensors[name])


def check_required(fmt: Format, sample: Sample) -> None:
    """Damage that no weight can have must be an error."""
    for suffix in sorted(sample.required):
        without = {name: t for name, t in sample.tensors.items() if name != suffix}
        _must_fail(fmt, sample, without, f"no {suffix}")
    for suffix, t in sample.tensors.items():
        if t.is_floating_point() and suffix in sample.required:
            for value in (float("nan"), float("inf")):
                broken = t.clone()
                broken.view(-1)[0] = value
                _must_fail(fmt, sample, {**sample.tensors, suffix: broken}, f"{value} in {suffix}")
        if suffix in sample.whole:
            short, empty = t[..., :-1].contiguous(), t.new_empty((0, *t.shape[1:]))
            _must_fail(fmt, sample, {**sample.tensors, suffix: short}, f"a column missing from {suffix}")
            _must_fail(fmt, sample, {**sample.tensors, suffix: empty}, f"no rows in {suffix}")


def check_damage(fmt: Format, sample: Sample, random: Random) -> None:
    """Random damage: an error of ours, or some weight; anything else fails."""
    config = QuantConfig.from_dict(sample.config)
    damaged = dict(sample.tensors)
    for _ in range(random.randint(1, 2)):
        suffix = random.choice(sorted(damaged))
        damaged[suffix] = random.choice(DAMAGES)(damaged[suffix], random)
    whole = detect(fmt, sample.tensors, config)
    assert whole is not None
    for found in (whole, _detected(fmt, damaged, config)):
        if found is None:
            continue
        try:
            fmt.read(found, damaged, config, None)
        except W4Error:
            continue
        except Exception as error:  # the point of the check is that nothing else escapes
            what = f"{type(error).__name__}: {error}"
            raise _mismatch(fmt, what, "an error of w4plugin.errors", f"{headers(damaged)}") from error


def _detected(fmt: Format, tensors: Mapping[str, Tensor], config: QuantConfig) -> Module | None:
    try:
        return detect(fmt, tensors, config)
    except W4Error:
        return None
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise _mismatch(fmt, what, "an error of w4plugin.errors", f"{headers(tensors)}") from error


def _must_fail(fmt: Format, sample: Sample, tensors: Mapping[str, Tensor], damage: str) -> None:
    config = QuantConfig.from_dict(sample.config)
    module = detect(fmt, sample.tensors, config)
    assert module is not None
    try:
        fmt.read(module, tensors, config, None)
    except W4Error:
        return
    raise _mismatch(fmt, f"a weight in spite of {damage}", "an error")


Damage = Callable[[Tensor, Random], Tensor]


def _cut(t: Tensor, random: Random) -> Tensor:
    dim = random.randrange(max(1, t.ndim))
    return t if t.ndim == 0 or t.shape[dim] == 0 else t.narrow(dim, 0, random.randrange(t.shape[dim])).contiguous()


def _grown(t: Tensor, random: Random) -> Tensor:
    dim = random.randrange(max(1, t.ndim))
    return torch.cat([t, t], dim) if t.ndim else t


def _turned(t: Tensor, random: Random) -> Tensor:
    return t.mT.contiguous() if t.ndim >= 2 else t.unsqueeze(random.randrange(t.ndim + 1))


def _flat(t: Tensor, random: Random) -> Tensor:
    return t.flatten()


def _scalar(t: Tensor, random: Random) -> Tensor:
    return t.flatten()[0] if t.numel() else t


def _retyped(t: Tensor, random: Random) -> Tensor:
    chosen = random.choice([d for d in DTYPES if d not in (torch.uint16, torch.uint32, torch.uint64)])
    return t.to(torch.float64).nan_to_num().clamp(-100, 100).to(chosen) if random.random() < 0.5 else t.to(chosen)


def _noise(t: Tensor, random: Random) -> Tensor:
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    if t.is_floating_point():
        return (torch.randn(t.shape, generator=generator) * 10.0 ** random.randint(-9, 9)).to(t.dtype)
    return torch.randint(-(2**31), 2**31, t.shape, generator=generator).to(t.dtype)


def _poked(t: Tensor, random: Random) -> Tensor:
    if not t.numel():
        return t
    out = t.clone()
    floats = (float("nan"), float("inf"), -1.0, 0.0, 6e4)
    value: Any = random.choice(floats) if t.is_floating_point() else random.choice((-1, 0, 1, 15, 127))
    out.view(-1)[random.randrange(t.numel())] = value
    return out


DAMAGES: tuple[Damage, ...] = (_cut, _grown, _turned, _flat, _scalar, _retyped, _noise, _poked)


def _same_weight(fmt: Format, what: str, got: W4Tensor, wanted: W4Tensor) -> None:
    _equal_tensor(fmt, f"{what}: codes", got.qweight, wanted.qweight)
    _equal_tensor(fmt, f"{what}: zero points", got.full_zeros(), wanted.full_zeros())
    _equal_tensor(fmt, f"{what}: scales", got.scales, wanted.scales)
    _equal_tensor(fmt, f"{what}: groups", got.groups(), wanted.groups())


def _equal_tensor(fmt: Format, what: str, got: Tensor, wanted: Tensor) -> None:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise _mismatch(fmt, f"{what} {got.dtype} {list(got.shape)}", f"{wanted.dtype} {list(wanted.shape)}")
    if not torch.equal(_bits(got), _bits(wanted)):
        where = (_bits(got) != _bits(wanted)).nonzero()
        at = tuple(where[0].tolist())
        raise _mismatch(
            fmt, f"{what}: {got[at].item()} at {list(at)}", f"{wanted[at].item()} ({len(where)} values differ)"
        )


def _bits(t: Tensor) -> Tensor:
    """Floats by their bits, so that NaN equals itself and -0 does not equal 0."""
    size: Iterable[tuple[int, torch.dtype]] = ((2, torch.int16), (4, torch.int32), (8, torch.int64))
    return t.contiguous().view(dict(size)[t.element_size()]) if t.is_floating_point() else t


def _equal(fmt: Format, what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise _mismatch(fmt, f"{what} {got}", str(wanted))


def _mismatch(fmt: Format, got: str, wanted: str, todo: str = "") -> MismatchError:
    return MismatchError(f"format {fmt.name}", got=got, wanted=wanted, todo=todo)
