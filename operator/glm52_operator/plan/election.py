"""Who may act: what a process concludes from a Lease. Pure; times are arguments.

The rules are client-go's, since others read the same objects: a holder renews, and who wants to be one waits until it
has seen no renewal for the lease's whole duration on its own clock, so that clocks that differ do no harm. On top of
that nobody waits for a holder that is known to be gone: one that gave the lease back, oneself before a restart, or one
whose lease ran out long ago by any clock.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from typing import Any

CLOCKS_DIFFER_SECONDS = 60.0
"""How far the clocks of two nodes may lie apart."""

_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. A holder stops before others may begin: `deadline` is below `duration`."""

    duration: float = 15.0
    deadline: float = 10.0
    """Without a renewal for that long the holder ends."""
    renew: float = 4.0
    retry: float = 1.0
    answer: float = 2.0
    """After which a renewal that brings no answer is tried anew, by another connection."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a Lease says."""

    holder: str = ""
    duration: float = 0.0
    renewed: datetime.datetime | None = None
    acquired: str = ""
    transitions: int = 0


def read(lease: dict[str, Any]) -> Record:
    spec = lease.get("spec") or {}
    return Record(
        holder=str(spec.get("holderIdentity") or ""),
        duration=float(spec.get("leaseDurationSeconds") or 0),
        renewed=_parse(spec.get("renewTime")),
        acquired=str(spec.get("acquireTime") or ""),
        transitions=int(spec.get("leaseTransitions") or 0),
    )


def held(me: str, before: Record, timing: Timing, now: datetime.datetime) -> dict[str, Any]:
    """The specification of the lease when `me` takes or renews it."""
    same = before.holder == me
    return {
        "holderIdentity": me,
        "leaseDurationSeconds": math.ceil(timing.duration),
        "acquireTime": before.acquired if same and before.acquired else now.strftime(_TIME),
        "renewTime": now.strftime(_TIME),
        "leaseTransitions": before.transitions + (not same),
    }


def released(before: Record, now: datetime.datetime) -> dict[str, Any]:
    """The specification of a lease that its holder gives back."""
    return {
        # Empty and not absent, as client-go writes it.
        "holderIdentity": "",
        "leaseDurationSeconds": 1,
        "renewTime": now.strftime(_TIME),
        "leaseTransitions": before.transitions,
    }


class Candidate:
    """One process that wants to hold the lease; it remembers when it last saw the lease change."""

    def __init__(self, me: str) -> None:
        self.me = me
        self._version = ""
        self._seen = 0.0

    def wait(self, record: Record, version: str, now: float, wall: datetime.datetime) -> float:
        """Seconds until the lease may be taken; 0: now. `version` is the lease's resource version."""
        if version != self._version:
            self._version, self._seen = version, now
        if record.holder in ("", self.me):
            return 0.0
        if record.renewed is not None:
            over = (wall - record.renewed).total_seconds()
            if over > record.duration + CLOCKS_DIFFER_SECONDS:
                return 0.0
        return max(0.0, self._seen + record.duration - now)


def _parse(text: object) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(str(text))
    except ValueError:
        return None
