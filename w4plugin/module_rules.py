"""What a quantisation config says about single modules, in every spelling that producers use.

| key | producer | pattern | effect |
|---|---|---|---|
| ``dynamic`` | GPTQModel, AutoRound | regex, anchored at the start; first match wins | ``-:`` skip, else override |
| ``extra_config`` | AutoRound | exact name, regex, or dotted suffix | override; bits >= 16 means not quantised |
| ``modules_to_not_convert`` | AutoAWQ | substring | skip |
| ``ignore`` | compressed-tensors | exact name or ``re:`` regex | skip |
| ``config_groups`` | compressed-tensors | class name, exact name or ``re:`` regex | override |
| ``modules_in_block_to_quantize`` | optimum, GPTQModel | substring, inside a block only | others are skipped |
| ``block_name_to_quantize`` | AutoRound | prefix | others are skipped |
| ``lm_head`` | GPTQModel, AutoRound | the head | skip or quantise |

Rules are hints. The tensors decide; :mod:`w4plugin.formats.cross_check` reports where the two differ. Names are matched
as the checkpoint spells them, never renamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any, Literal

from w4plugin import name_pattern
from w4plugin.errors import CorruptError, UnsafeError

Match = Literal["regex", "search", "exact", "substring", "prefix", "class", "head"]
Action = Literal["skip", "set", "only"]

PATIENCE = 60.0
"""Seconds that the patterns of one config may take in all; those of the largest real models take about one."""

UNQUANTISED_BITS = 16
"""AutoRound writes ``bits: 16`` (or 32) for a module that stays a plain weight."""

_IN_BLOCK = re.compile(r"\.\d+\.")
_REGEX_SIGNS = re.compile(r"[*+?^$\[\](){}|\\]")


@dataclass(frozen=True)
class Rule:
    """One entry of one of the keys above.

    Attributes:
        key: the config key it stood under.
        text: the entry as spelled there.
        action: "skip" the module, "set" values for it, or quantise "only" what matches.
        match: how ``pattern`` is compared with a module's name.
        bits, group_size, sym, desc_act: overrides, None where the entry says nothing. group_size -1 is one group.
    """

    key: str
    text: str
    action: Action
    match: Match
    pattern: str
    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return name_pattern.compiled(str(self), self.pattern, anywhere=self.match == "search")

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"

    def matches(self, name: str) -> bool:
        """Whether the rule speaks of the module ``name``.

        Raises:
            CorruptError: its pattern is no regular expression.
            UnsafeError: its pattern could take for ever on this name.
        """
        if self.match in ("regex", "search"):
            name_pattern.require_short(str(self), name)
        match self.match:
            case "regex":
                return self._regex.match(name) is not None
            case "search":
                return self._regex.search(name) is not None or name.endswith("." + self.pattern)
            case "exact":
                return name == self.pattern or name.endswith("." + self.pattern)
            case "substring":
                return self.pattern in name
            case "prefix":
                return name == self.pattern or name.startswith(self.pattern + ".")
            case "head":
                return name.rpartition(".")[2] == "lm_head"
            case "class":  # the class of a module is not in the file; "Linear" means every module that can be packed
                return True


@dataclass(frozen=True)
class Expected:
    """What the rules say about one module.

    Attributes:
        quantized: True or False when a rule says so, None when none does.
        bits, group_size, sym, desc_act: of that module; the config's general values where no rule overrides them.
        rule: the rule that decided, as "key: entry"; empty when none did.
    """

    quantized: bool | None
    bits: int | None
    group_size: int | None
    sym: bool | None
    desc_act: bool | None
    rule: str = ""


@dataclass(frozen=True)
class RuleBook:
    """The rules of one config, in the order in which they are asked; the first that speaks of a module wins."""

    rules: tuple[Rule, ...] = ()

    @cached_property
    def _by_name(self) -> dict[str, int]:
        """Index of the first rule for each plain name: configs of large MoE models list thousands of names."""
        found: dict[str, int] = {}
        for i, rule in enumerate(self.rules):
            if rule.match == "exact" and rule.action != "only":
                found.setdefault(rule.pattern, i)
        return found

    @cached_property
    def _patterns(self) -> tuple[tuple[int, Rule], ...]:
        return tuple((i, r) for i, r in enumerate(self.rules) if r.match != "exact" and r.action != "only")

    @cached_property
    def _only(self) -> tuple[Rule, ...]:
        return tuple(r for r in self.rules if r.action == "only")

    @cached_property
    def _only_names(self) -> dict[str, Rule]:
        return {r.pattern: r for r in self._only}

    def deciding(self, name: str) -> Rule | None:
        """The first "skip" or "set" rule that speaks of the module ``name``."""
        hits = [self._by_name[part] for part in _suffixes(name) if part in self._by_name]
        hits += next(([i] for i, rule in self._patterns if self._hit(rule, name)), [])
        return self.rules[min(hits)] if hits else None

    def hits_any(self, rule: Rule, names: Iterable[str]) -> bool:
        """Whether one of the rules speaks of one of ``names``."""
        return any(self._hit(rule, name) for name in names)

    def _hit(self, rule: Rule, name: str) -> bool:
        """``rule.matches(name)``, on the clock."""
        start = perf_counter()
        hit = rule.matches(name)
        self._clock[0] += perf_counter() - start
        if self._clock[0] > PATIENCE:
            raise UnsafeError(
                str(rule),
                got=f"patterns that have taken {self._clock[0]:.0f} seconds",
                wanted=f"at most {PATIENCE:.0f} for all names",
                todo="Remove what is slow from the config: the tensors decide.",
            )
        return hit

    @cached_property
    def _clock(self) -> list[float]:
        """Seconds spent in patterns so far."""
        return [0.0]

    def listed(self, name: str) -> Rule | None:
        """The "only" rule that names the module ``name``."""
        for part in _suffixes(name):
            if part in self._only_names:
                return self._only_names[part]
        return next((r for r in self._only if self._hit(r, name)), None)

    def expect(self, name: str, general: Expected) -> Expected:
        """What the rules say about one module; ``general`` holds the config's values for every module."""
        rule = self.deciding(name)
        if rule is not None and rule.action == "skip":
            return replace(general, quantized=False, rule=str(rule))
        found = general
        if rule is not None:
            found = Expected(
                quantized=general.quantized if rule.match == "class" else True,
                bits=general.bits if rule.bits is None else rule.bits,
                group_size=general.group_size if rule.group_size is None else rule.group_size,
                sym=general.sym if rule.sym is None else rule.sym,
                desc_act=general.desc_act if rule.desc_act is None else rule.desc_act,
                rule=str(rule),
            )
        if found.quantized is not None or not self._only:
            return found
        # names of modules_in_block_to_quantize are relative to a block: the list is silent about what stands outside
        if self._only[0].match == "substring" and not _IN_BLOCK.search(name):
            return found
        hit = self.listed(name)
        if hit is None:
            return replace(found, quantized=False, rule=f"{self._only[0].key}: not listed")
        return replace(found, quantized=True, rule=str(hit))


def _suffixes(name: str) -> Iterator[str]:
    """The name, and what follows each of its dots."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def parse(config: Mapping[str, Any]) -> RuleBook:
    """All rules of one quantisation config, in the order in which they are asked.

    Raises:
        CorruptError: a key holds something other than the lists and tables its producer writes.
    """
    found = (
        *_dynamic(config),
        *_extra_config(config),
        *_skip_lists(config),
        *_config_groups(config),
        *_lm_head(config),
        *_include_lists(config),
    )
    return RuleBook(found)


def _dynamic(config: Mapping[str, Any]) -> Iterator[Rule]:
    for text, values in _table(config, "dynamic").items():
        skip = text.startswith("-:")
        pattern = text[2:] if text.startswith(("-:", "+:")) else text
        if skip or values is False:
            yield Rule("dynamic", text, "skip", "regex", pattern)
            continue
        values = _mapping(f"dynamic: {text}", values)
        yield Rule("dynamic", text, "set", "regex", pattern, **overrides(f"dynamic: {text}", values))


def _extra_config(config: Mapping[str, Any]) -> Iterator[Rule]:
    for text, values in _table(config, "extra_config").items():
        where = f"extra_config: {text}"
        given = overrides(where, _mapping(where, values))
        how: Match = "search" if _REGEX_SIGNS.search(text) else "exact"
        if (given["bits"] or 0) >= UNQUANTISED_BITS:
            yield Rule("extra_config", text, "skip", how, text)
        else:
            yield Rule("extra_config", text, "set", how, text, **given)


def _skip_lists(config: Mapping[str, Any]) -> Iterator[Rule]:
    for text in _strings(config, "modules_to_not_convert"):
        yield Rule("modules_to_not_convert", text, "skip", "substring", text)
    for text in _strings(config, "ignore"):
        how: Match = "regex" if text.startswith("re:") else "exact"
        yield Rule("ignore", text, "skip", how, text.removeprefix("re:"))


def _config_groups(config: Mapping[str, Any]) -> list[Rule]:
    """Its readers prefer a name to a regex and a regex to a class, whatever the order of the groups."""
    found: list[Rule] = []
    for group, scheme in _table(config, "config_groups").items():
        where = f"config_groups: {group}"
        scheme = _mapping(where, scheme)
        weights = _mapping(f"{where}.weights", scheme.get("weights") or {})
        given = overrides(where, weights)
        if weights.get("strategy") == "channel":
            given["group_size"] = -1
        for target in _strings(scheme, "targets"):
            how: Match = "regex" if target.startswith("re:") else "class" if target[:1].isupper() else "exact"
            found.append(Rule("config_groups", f"{group} ({target})", "set", how, target.removeprefix("re:"), **given))
    order: list[Match] = ["exact", "regex", "class"]
    return sorted(found, key=lambda rule: order.index(rule.match))


def _lm_head(config: Mapping[str, Any]) -> Iterator[Rule]:
    head = config.get("lm_head")
    if isinstance(head, bool):
        yield Rule("lm_head", str(head).lower(), "set" if head else "skip", "head", "lm_head")


def _include_lists(config: Mapping[str, Any]) -> Iterator[Rule]:
    for text in _strings(config, "modules_in_block_to_quantize"):
        yield Rule("modules_in_block_to_quantize", text, "only", "substring", text)
    for key in ("block_name_to_quantize", "to_quant_block_names"):
        for text in _strings(config, key):
            for name in text.split(","):
                yield Rule(key, name.strip(), "only", "prefix", name.strip())


def overrides(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """bits, group_size, sym and desc_act of one table, under any of their spellings; None where it says nothing."""
    actorder = values.get("actorder")
    desc_act = flag(where, values, "desc_act")
    if desc_act is None and actorder is not None:
        desc_act = actorder is True or str(actorder).lower() in ("group", "dynamic")
    zero_point = flag(where, values, "zero_point")
    sym = flag(where, values, "sym", "symmetric")
    return {
        "bits": number(where, values, "bits", "w_bit", "wbits", "num_bits"),
        "group_size": size(where, values),
        "sym": sym if sym is not None or zero_point is None else not zero_point,
        "desc_act": desc_act,
    }


def size(where: str, values: Mapping[str, Any]) -> int | None:
    """The group size, -1 for one group, None when not stated."""
    found = number(where, values, "group_size", "q_group_size", "groupsize")
    if found is not None and found != -1 and found < 1:
        raise CorruptError(f"{where}: group_size", got=str(found), wanted="-1 or at least 1")
    return found


def number(where: str, values: Mapping[str, Any], *keys: str) -> int | None:
    """The first of ``keys`` that is stated, as an integer; AutoGPTQ's file metadata spells numbers as strings."""
    for key in keys:
        value = values.get(key)
        if value is None:
            continue
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value.strip()):
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CorruptError(f"{where}: {key}", got=repr(value), wanted="an integer")
        return value
    return None


def flag(where: str, values: Mapping[str, Any], *keys: str) -> bool | None:
    """The first of ``keys`` that is stated, as a truth value."""
    for key in keys:
        value = values.get(key)
        if value is None:
            continue
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            value = value.strip().lower() == "true"
        if not isinstance(value, bool):
            raise CorruptError(f"{where}: {key}", got=repr(value), wanted="true or false")
        return value
    return None


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CorruptError(where, got=type(value).__name__, wanted="a table of names and values")
    return value


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return _mapping(key, config.get(key) or {})


def _strings(config: Mapping[str, Any], key: str) -> Iterator[str]:
    """Strings of a list, of a list of lists, or the one string that stands where a list should."""
    pending: list[Any] = [config.get(key)]
    while pending:
        value = pending.pop(0)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | tuple):
            pending[:0] = value
        elif value is not None:
            raise CorruptError(key, got=repr(value)[:80], wanted="a list of names")
