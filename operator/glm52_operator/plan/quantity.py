"""Resource quantities as numbers: `2048Mi` and `2Gi` are the same amount."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache

# Exponents of any size would be numbers of any length.
_FORM = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]{1,4})?")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def parse_quantity(value: object) -> Decimal | None:
    """The amount, or None for what is no quantity."""
    return _parse(str(value)) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None


@lru_cache(maxsize=4096)
def _parse(text: str) -> Decimal | None:
    """The pods of a cluster spell few amounts, each of them many times."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix in _BINARY:
        return number * (1 << _BINARY[suffix])
    exponent = _DECIMAL.get(suffix, int(suffix[1:]) if suffix[:1] in "eE" and suffix[1:] else 0)
    return number * Decimal(10) ** exponent


def same_quantity(one: object, other: object) -> bool:
    first, second = parse_quantity(one), parse_quantity(other)
    return first is not None and first == second
