"""What every benchmark's result has in common."""

from __future__ import annotations

from typing import Any


def reached(name: str, value: Any, unit: str, target: Any, holds: bool) -> dict[str, Any]:
    """An entry of a result's `reach`: a figure, what it should be, and whether it is."""
    return {"name": name, "value": value, "unit": unit, "target": target, "holds": holds}
