"""Regular expressions that a checkpoint's config brings, run so that none of them can hang.

Python's matcher tries the ways in which a pattern can fit one after another, and hostile patterns have more ways than
anyone can wait for: ``(a+)+b`` has ``2**n`` on n letters. So the ways are counted before a pattern is compiled: k
repeats cut a name of 256 characters in ``comb(256 + k, k)`` ways, an optional thing doubles them, n alternatives
multiply them by n. Repeating what has a choice in itself would raise them to a power; no name needs it, and it is
refused.

What may pass has up to five repeats (real configs: two or three, as in ``.*layers\\.\\d+\\.mlp\\..*``) and takes less
than a minute on the worst of names; :class:`~w4plugin.module_rules.RuleBook` bounds the sum over names and patterns.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from w4plugin.errors import CorruptError, UnsafeError

LONGEST_NAME = 256
"""Characters; the longest module names of real models have about 120."""

LONGEST_PATTERN = 10_000
"""Characters; configs that list names as alternatives reach thousands."""

MOST_WAYS = 2**35
MOST_COMBINATIONS = 2**16
"""Of alternatives and optional things alone, each of which costs the matcher more than a place in a repeat."""

LARGEST = 10_000
"""Characters that a pattern may grow to when its counted repeats are written out."""

DEEPEST = 20
FEW = 8
"""A repeat of at most this many different lengths counts as alternatives."""

_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:[:=!>]|<[=!]|P<\w+>|i\)|.?))?|\)|\|"
    r"|(?:[*+?]|\{\d+,?\d*\}|\{,\d+\})[?+]?|.",
    re.DOTALL,
)
_KNOWN_GROUPS = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|P<\w+>))?")


@dataclass(frozen=True)
class _Cost:
    """What a part of a pattern costs: its free repeats, log2 of its alternatives, its size written out."""

    repeats: int = 0
    choices: float = 0.0
    size: int = 0

    def then(self, other: _Cost) -> _Cost:
        return _Cost(self.repeats + other.repeats, self.choices + other.choices, self.size + other.size)

    def worst(self, other: _Cost) -> _Cost:
        return _Cost(max(self.repeats, other.repeats), max(self.choices, other.choices), self.size + other.size)


class _Group:
    """A group while it is read: its finished alternatives, the current one, and the thing a quantifier would repeat."""

    def __init__(self) -> None:
        self.finished, self.alternatives = _Cost(), 1
        self.before, self.last = _Cost(), _Cost()

    def add(self, cost: _Cost) -> None:
        self.before, self.last = self.before.then(self.last), cost

    def alternative(self) -> None:
        self.finished, self.alternatives = self.finished.worst(self.before.then(self.last)), self.alternatives + 1
        self.before, self.last = _Cost(), _Cost()

    def total(self) -> _Cost:
        worst = self.finished.worst(self.before.then(self.last))
        return _Cost(worst.repeats, worst.choices + math.log2(self.alternatives), worst.size + 1)


def compiled(where: str, pattern: str, *, anywhere: bool = False) -> re.Pattern[str]:
    """The pattern, when matching it against a name takes a bounded time.

    Args:
        where: the config entry it stands in, for messages.
        pattern: as the config spells it, without ``re:`` or ``-:``.
        anywhere: it will be searched for, not matched at the start; which costs as much as one more repeat.

    Raises:
        CorruptError: no regular expression.
        UnsafeError: one that could take for ever.
    """
    where = where if len(where) <= 100 else f"{where[:100]}..."
    if len(pattern) > LONGEST_PATTERN:
        raise _unsafe(where, f"a pattern of {len(pattern)} characters", f"at most {LONGEST_PATTERN}")
    cost = _cost(where, pattern)
    repeats = cost.repeats + anywhere
    ways = math.log2(math.comb(LONGEST_NAME + repeats, repeats)) + cost.choices
    if 2**ways > MOST_WAYS or 2**cost.choices > MOST_COMBINATIONS:
        raise _unsafe(where, f"a pattern that can fit in 2**{ways:.0f} ways", "five repeats and few alternatives")
    if cost.size > LARGEST:
        raise _unsafe(where, f"a pattern of {cost.size} characters when written out", f"at most {LARGEST}")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise CorruptError(where, got=f"an invalid regular expression ({error})", wanted="a Python regex") from error


def require_short(where: str, name: str) -> None:
    """Refuse to run patterns on a name of more than :data:`LONGEST_NAME` characters."""
    if len(name) > LONGEST_NAME:
        raise _unsafe(where, f"a name of {len(name)} characters ({name[:40]}...)", f"at most {LONGEST_NAME}")


def _cost(where: str, pattern: str) -> _Cost:
    tokens = _TOKEN.findall(pattern)
    while tokens and tokens[-1] == "$":
        tokens.pop()
    if tokens[-2:] == [".", "*"]:  # fits whatever is left, in one way
        del tokens[-2:]
    groups = [_Group()]
    for token in tokens:
        if token == "(?i)":
            continue
        if token[0] == "(":
            if not _KNOWN_GROUPS.fullmatch(token):
                raise _unsafe(where, f"the construct {token}...", "groups and lookarounds")
            if len(groups) > DEEPEST:
                raise _unsafe(where, f"groups more than {DEEPEST} deep", "fewer")
            groups.append(_Group())
        elif token == ")":
            if len(groups) > 1:  # one too many is for re.compile to tell
                cost = groups.pop().total()
                groups[-1].add(cost)
        elif token == "|":
            groups[-1].alternative()
        elif token[0] in "*+?" or (token[0] == "{" and len(token) > 1):
            groups[-1].last = _repeated(where, groups[-1].last, token)
        else:
            groups[-1].add(_Cost(size=1))
    while len(groups) > 1:  # one too few as well
        cost = groups.pop().total()
        groups[-1].add(cost)
    return groups[0].total()


def _repeated(where: str, thing: _Cost, token: str) -> _Cost:
    """The cost of a thing with a quantifier behind it."""
    low, high = _counts(token)
    if (thing.repeats or thing.choices) and (high is None or high > 1):
        raise _unsafe(where, f"a repeat ({token}) of what has repeats or alternatives in itself", "plain repeats")
    size = thing.size * max(low if high is None else high, 1)
    lengths = math.inf if high is None else max(high - low, 0) + 1
    if lengths > FEW:
        return _Cost(thing.repeats + 1, thing.choices, size)
    return _Cost(thing.repeats, thing.choices + math.log2(lengths), size)


def _counts(token: str) -> tuple[int, int | None]:
    """The least and the most times of a quantifier, None for no limit."""
    if token[0] in "*+?":
        return int(token[0] == "+"), 1 if token[0] == "?" else None
    low, comma, high = token.rstrip("?+").strip("{}").partition(",")
    return int(low or 0), int(high) if high else None if comma else int(low)


def _unsafe(where: str, got: str, wanted: str) -> UnsafeError:
    todo = "It could take for ever: remove it from the config; the tensors decide without it."
    return UnsafeError(where, got=got, wanted=wanted, todo=todo)
