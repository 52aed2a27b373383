"""What a written status has that the one before it had not: told once, by whichever process wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Entries = list[Mapping[str, Any]]


def new_crashes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Entries:
    known = {entry.get("id") for entry in before.get("crashes") or []}
    return [entry for entry in after.get("crashes") or [] if entry.get("id") not in known]


def new_ends(before: Mapping[str, Any], after: Mapping[str, Any]) -> Entries:
    """Drains that are over, and were not."""
    known = _ended(before)
    return [entry for uid, entry in _ended(after).items() if uid not in known]


def _ended(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {str(entry.get("uid")): entry for entry in status.get("drains") or [] if entry.get("phase") == "Ended"}
