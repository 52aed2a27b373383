"""The tables of docs/metrics.md, which the tests of engine and operator hold against what /metrics says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = tuple[str, str, str]
"""Name, type, labels."""

_TABLE = Path(__file__).parents[1] / "docs/metrics.md"
_CELLS = 5


def documented() -> dict[str, set[Row]]:
    """By part: the pods of a deployment, a prefill pod's part of the store, decode's HiSparse, its paths from prefill
    pods once they are measured, and the operator."""
    parts = ("prefill", "decode", "store", "hiSparse", "paths", "router", "operator")
    rows: dict[str, set[Row]] = {part: set() for part in parts}
    for line in _TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `") or len(cells) != _CELLS:
            continue
        name, kind, labels, tellers, _ = cells
        for part in tellers.split(", "):
            rows[part].add((name.strip(" `"), kind, labels.replace("`", "")))
    return rows


def served(families: Iterable[Any]) -> set[Row]:
    """The same of what was read from /metrics."""
    rows = set()
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        rows.add((name, family.type, ", ".join(sorted(labels))))
    return rows
