"""Typed reading of a JSON body, field by field: null means absent, a wrong value is a 400 that names its field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from glm52_engine.serve.errors import bad

MAX_BODY_BYTES = 32 << 20
"""A prompt of a million tokens is about 5 MB of text; JSON escapes can multiply it."""

MAX_DEPTH = 64
"""Of arrays and objects in each other. JSON schemas of tools are the deepest thing that anybody means to send; what is
deeper would end in somebody's recursion limit: the template's, the encoder's, or the next server's."""

MAX_VALUES = 2 << 20
"""Commas and brackets, also within strings: 32 MB of empty arrays would take nearly a GiB once they are parsed.
A prompt of a million token ids has half as many."""

_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


def parse_object(raw: bytes, max_depth: int = MAX_DEPTH, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """A request body as an object whose strings are all valid Unicode; raises a 400."""
    value = _parse(raw, "the body", None, max_depth, max_values)
    if not isinstance(value, dict):
        raise bad(f"the body is a JSON {_kind(value)}, expected an object")
    return value


def parse_text(name: str, text: str, param: str) -> Any:
    """What a field holds as a text of JSON, which must not bring in what the body itself may not have: raises a 400
    that names the field."""
    return _parse(text.encode("utf-8", "replace"), f"{name}:", param, MAX_DEPTH, MAX_VALUES)


def _parse(raw: bytes, what: str, param: str | None, max_depth: int, max_values: int) -> Any:
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > max_values:
        raise bad(f"{what} has more than {max_values} commas and brackets", param)
    too_deep = bad(
        f"{what} is not usable JSON: it is nested too deeply, more than {max_depth} arrays and objects", param
    )
    try:
        # Decoded here: json would also take UTF-16 and UTF-32, which the next server does not.
        value = json.loads(raw.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise bad(f"{what} is not UTF-8 ({error.reason} at byte {error.start})", param) from error
    except RecursionError as error:
        raise too_deep from error
    except ValueError as error:
        raise bad(f"{what} is not valid JSON: {error}", param) from error
    if _is_deeper(value, max_depth):
        raise too_deep
    # Half a surrogate pair is legal in JSON and illegal in UTF-8: it would break the tokenizer and the answer.
    return _clean(value) if b"\\u" in raw else value


def _is_deeper(value: Any, limit: int) -> bool:
    """Level by level, without recursion."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limit):
        items = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [item for inner in items for item in inner if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value


def _kind(value: object) -> str:
    names: dict[type, str] = {
        bool: "boolean",
        int: "number",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def _shown(value: object) -> str:
    text = ""
    # Piece by piece: a wrong value may have 30 MB.
    for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        text += piece
        if len(text) > 60:
            return text[:57] + "…"
    return text


class Fields:
    """Each reader takes its field; what nobody took is reported by `rest`."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise wrong(name, value, "a string")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        # bool is an int in Python, not in JSON.
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        words = f"a number {'above' if above_low else 'from'} {low:g} {'up ' if above_low else ''}to {high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(name, value, words)
        if not low <= value <= high or (above_low and value == low) or not math.isfinite(value):
            raise wrong(name, value, words)
        return float(value)

    def integers(self, name: str, *, low: int = 0, high: int = 2**31 - 1, most: int = 1 << 30) -> list[int]:
        value = self.take(name)
        if value is None:
            return []
        fits = isinstance(value, list) and all(type(item) is int and low <= item <= high for item in value)
        if not fits:
            raise wrong(name, value, "an array of token ids")
        if len(value) > most:
            raise bad(f"{name}: found {len(value)} token ids, expected at most {most}", param=name)
        return list(value)

    def object(self, name: str) -> dict[str, Any]:
        value = self.take(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise wrong(name, value, "an object")
        return value

    def rest(self) -> list[str]:
        return sorted(self._left)


def wrong(name: str, value: object, expected: str) -> Exception:
    return bad(f"{name}: found {_shown(value)}, expected {expected}", param=name)
