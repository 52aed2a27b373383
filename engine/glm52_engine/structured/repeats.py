"""How much text a pattern demands. Counted repetitions within each other (`(a{500}){500}`) are the one thing that the
library unrolls without counting its work: seconds for a single step. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from glm52_engine.structured.errors import GrammarError

MOST_REPEATED = 10_000
"""Characters of the shortest match; a step then takes 10 ms at most."""

# Every part is bounded or ends where it must: a client's pattern must not slow down the look at it.
_TOKEN = re.compile(
    r"(?P<count>\{\s{0,9}(?P<low>\d{0,9})\s{0,9}(?:,\s{0,9}\d{0,9}\s{0,9})?\}\??)"
    r"|(?P<none>[*?]\??)|(?P<one>\+\??)"
    r"|(?P<open>\((?:\?(?:P?<\w{0,99}>|[a-zA-Z-]{0,20}:?))?)|(?P<close>\))|(?P<or>\|)"
    r"|(?P<atom>\\[pPxu]\{[^}]{0,60}\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)|.)",
    re.DOTALL,
)

_PATTERN = re.compile(r"/((?:\\.|[^/\\\n])*)(?:/|\n|\Z|\\)")
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*(?:"|\n|\Z|\\)')


def shortest(pattern: str) -> int:
    """Characters of the shortest match of a regular expression, about; 0 where it cannot be read."""
    # Of each open group: the shortest of its finished alternatives, and what stands in the running one.
    groups: list[tuple[int | None, list[int]]] = [(None, [])]
    for token in _TOKEN.finditer(pattern):
        kind = token.lastgroup if token.lastgroup != "low" else "count"
        best, parts = groups[-1]
        if kind == "open":
            groups.append((None, []))
        elif kind == "or":
            groups[-1] = (_less(best, sum(parts)), [])
        elif kind == "close" and len(groups) > 1:
            groups.pop()
            groups[-1][1].append(_less(best, sum(parts)))
        elif kind in ("count", "none", "one") and parts:
            times = {"none": 0, "one": 1}.get(kind, int(token["low"] or 0))
            parts[-1] *= times
        else:
            parts.append(1)
    best, parts = groups[0]
    return _less(best, sum(parts))


def _less(best: int | None, other: int) -> int:
    return other if best is None else min(best, other)


def check_pattern(pattern: str) -> None:
    """Raises GrammarError."""
    found = shortest(pattern)
    if found > MOST_REPEATED:
        raise GrammarError(f"{_shown(pattern)} repeats up to {found} characters; at most {MOST_REPEATED} are possible")


def check_schema(schema: Any) -> None:
    """Of every `pattern` and `patternProperties` in a JSON schema. Raises GrammarError."""
    for pattern in _patterns(schema):
        check_pattern(pattern)


def check_lark(text: str) -> None:
    """Of a grammar, as if its longest pattern stood within its two greatest repetitions. Raises GrammarError."""
    patterns = _PATTERN.findall(text)
    rest = _STRING.sub(" ", _PATTERN.sub(" ", text))
    counts = sorted((int(number) for number in re.findall(r"[{~]\s{0,9}(\d{1,9})", rest)), reverse=True)
    found = max(map(shortest, patterns), default=1)
    for count in counts[:2]:
        found *= max(count, 1)
    if found > MOST_REPEATED:
        raise GrammarError(f"its repetitions demand up to {found} characters; at most {MOST_REPEATED} are possible")


def _patterns(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get("pattern"), str):
                yield value["pattern"]
            if isinstance(value.get("patternProperties"), Mapping):
                yield from (key for key in value["patternProperties"] if isinstance(key, str))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:57] + "…")
