"""Typed access to a JSON object of a checkpoint: a refusal names file, field, what was found and expected."""

from __future__ import annotations

import json
import reprlib
import sys
from pathlib import Path
from typing import Any, NoReturn

from glm52_engine.config import ConfigError

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring = 4, 16, 16, 200
"""A value may be megabytes long or a thousand levels deep; what is read of a message is its beginning."""


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file, `what` says in errors what it should be; raises ConfigError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected {what}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error}); expected {what}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: found a JSON {type(raw).__name__}; expected an object: {what}")
    return raw


class Fields:
    """One JSON object; `path` and, for a nested object, `within` name it in errors."""

    def __init__(self, raw: dict[str, Any], path: Path, within: str = "") -> None:
        self.raw = raw
        self._path = path
        self._within = within

    def refuse(self, name: str, found: object, expected: str) -> NoReturn:
        raise ConfigError(f"{self._path}: {self._within}{name}: found {_SHORT.repr(found)}; expected {expected}")

    def get(self, name: str, expected: str) -> Any:
        if name not in self.raw:
            raise ConfigError(f"{self._path}: {self._within}{name}: missing; expected {expected}")
        return self.raw[name]

    def nested(self, name: str, expected: str) -> Fields:
        found = self.get(name, expected)
        if not isinstance(found, dict):
            self.refuse(name, found, expected)
        return Fields(found, self._path, f"{self._within}{name}.")

    def exactly(self, name: str, value: object) -> None:
        found = self.get(name, repr(value))
        # True == 1 in Python: a JSON true must not pass for a count.
        if found != value or isinstance(found, bool) != isinstance(value, bool):
            self.refuse(name, found, repr(value))

    def exactly_if_present(self, name: str, value: object) -> None:
        if self.raw.get(name) is not None:
            self.exactly(name, value)

    def count(self, name: str, *, least: int = 1, most: int = 1 << 31) -> int:
        expected = f"an integer from {least} to {most}"
        found = self.get(name, expected)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            self.refuse(name, found, expected)
        return found

    def number(self, name: str) -> float:
        expected = "a finite number > 0"
        found = self.get(name, expected)
        # JSON as Python reads it has NaN, Infinity, and integers beyond every float.
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= sys.float_info.max:
            self.refuse(name, found, expected)
        return float(found)

    def flag(self, name: str) -> bool:
        found = self.get(name, "true or false")
        if not isinstance(found, bool):
            self.refuse(name, found, "true or false")
        return found
