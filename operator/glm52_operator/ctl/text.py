"""Plain text for terminals: aligned columns, ages, and nothing that a terminal would obey."""

from __future__ import annotations

import datetime
from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows of equal length as aligned lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def clean(text: str) -> str:
    """Printable text: a termination message may hold escape sequences, and YAML characters that no encoding takes."""
    return "".join(c if c == "\n" or c.isprintable() else "�" for c in text)


def moment(value: object) -> datetime.datetime | None:
    """A timestamp of the API; None for anything else."""
    if not isinstance(value, str):
        return None
    try:
        found = datetime.datetime.fromisoformat(value)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def age(since: object, now: datetime.datetime) -> str:
    """`45s`, `3m`, `5h`, `2d`; `-` where there is no time to count from."""
    began = moment(since)
    if began is None:
        return "-"
    try:
        seconds = max(0, int((now - began).total_seconds()))
    except OverflowError:
        return "-"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        # As kubectl does: two of a unit before it is used, so that 90 seconds are not called one minute.
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
