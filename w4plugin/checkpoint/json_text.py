"""JSON that decides something, read strictly: one value a key, text that is text, an object at the top."""

from __future__ import annotations

import json
from typing import Any

from w4plugin.errors import CorruptError


def parse_json(where: str, text: bytes) -> dict[str, Any]:
    """The object in ``text``.

    A key that stands twice would let two readers see two different checkpoints, so it is refused unless both values
    are the same scalar.

    Raises:
        CorruptError: not UTF-8, not JSON, not an object, nested too deep, or a repeated key.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: dict[str, Any] = {}
            for key, value in items:
                if key in seen and (isinstance(value, (dict, list)) or seen[key] != value):
                    raise CorruptError(where, got=f"the key {key!r} twice", wanted="every key once")
                seen[key] = value
        return found

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        decoded = text.decode("utf-8")
        value = json.loads(decoded, object_pairs_hook=pairs, parse_constant=constant)
        if "\\u" in decoded:
            # an escape may spell half a character, which no file name or header can hold
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as fault:
        raise CorruptError(where, got="JSON nested too deep to read", wanted="a JSON object") from fault
    except UnicodeError as fault:
        raise CorruptError(where, got="bytes that are not UTF-8", wanted="a JSON object") from fault
    except ValueError as fault:
        raise CorruptError(where, got=f"text that is not JSON ({fault})", wanted="a JSON object") from fault
    if not isinstance(value, dict):
        raise CorruptError(where, got=f"a JSON {type(value).__name__}", wanted="a JSON object")
    return value
