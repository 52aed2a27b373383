"""Conditions in the usual form: who may change which of their fields, and when."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MESSAGE_LIMIT = 4096
"""The API allows 32 KiB; a message that long helps nobody and is stored with every version of the object."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said about one aspect; `None` for unknown."""

    holds: bool | None
    reason: str
    message: str

    @property
    def status(self) -> str:
        return {True: "True", False: "False", None: "Unknown"}[self.holds]


def merge(
    verdicts: Mapping[str, Verdict],
    previous: Iterable[Mapping[str, Any]],
    *,
    generation: int,
    now: datetime.datetime,
) -> list[dict[str, Any]]:
    """Conditions in the order given; lastTransitionTime stays where it was until the status flips."""
    before = {condition["type"]: condition for condition in previous}
    result = []
    for kind, verdict in verdicts.items():
        old = before.get(kind)
        kept = old is not None and old["status"] == verdict.status
        result.append(
            {
                "type": kind,
                "status": verdict.status,
                "reason": verdict.reason,
                "message": _cut(verdict.message),
                "lastTransitionTime": old["lastTransitionTime"] if old is not None and kept else timestamp(now),
                "observedGeneration": generation,
            }
        )
    return result


def _cut(message: str) -> str:
    return message if len(message) <= MESSAGE_LIMIT else message[: MESSAGE_LIMIT - 1] + "…"


def timestamp(now: datetime.datetime) -> str:
    """As the API writes times."""
    return now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
