"""From crashes to what is done about them: wait longer each time, and in the end stop trying.

State is a set that only grows: an end of a container is known by its id, so that looking twice, or with another
operator process, counts nothing twice. What the status keeps of it is all that there is.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from glm52_operator import names
from glm52_operator.api.status import MOST_COUNTED

SAME_INCIDENT = datetime.timedelta(seconds=60)
"""Hosts of one replica fall together: what they tell within this time is one crash of the replica."""


@dataclass(frozen=True, slots=True)
class CrashPolicy:
    """See spec.crashPolicy."""

    backoff_base: float
    backoff_max: float
    max_restarts: int
    reset: datetime.timedelta

    def delay(self, crashes: int) -> float:
        """Seconds before the start that follows the n-th crash: none after the first, then base × 2ⁿ⁻², at most max.

        The first crash of a long life is mostly bad luck, and its place should serve again at once.
        """
        if crashes < 2:
            return 0.0
        return float(min(self.backoff_max, self.backoff_base * 2 ** min(crashes - 2, 32)))


@dataclass(frozen=True, slots=True)
class Crash:
    """One end that counts: `id` as in `Ending`, `pod` where it was."""

    id: str
    pod: str
    time: datetime.datetime


@dataclass(frozen=True, slots=True)
class Series:
    """The crashes of one replica within the reset time, the oldest first."""

    replica: str
    """Name of its leader's pod."""
    basis: str
    """The specification that they count against; see `basis`."""
    crashes: tuple[Crash, ...] = ()
    forgiven: frozenset[str] = frozenset()
    """Ids that an edit of the specification has taken off the account: their pods still show them."""
    latched: bool = False

    @property
    def incidents(self) -> list[datetime.datetime]:
        """When the replica crashed: the time of the last host to tell of it."""
        return [each[-1].time for each in together(c for c in self.crashes if c.id not in self.forgiven)]

    def held_until(self, policy: CrashPolicy) -> datetime.datetime | None:
        """When the replica may start again; None where it may at once, and where it is latched."""
        incidents = self.incidents
        delay = policy.delay(len(incidents))
        return incidents[-1] + datetime.timedelta(seconds=delay) if delay and not self.latched else None


def together(crashes: Iterable[Crash]) -> list[list[Crash]]:
    """What hosts of one replica tell of one crash of it; `crashes`: the oldest first. A host has one end in each."""
    found: list[list[Crash]] = []
    for crash in crashes:
        last = found[-1] if found else []
        if last and crash.time - last[0].time <= SAME_INCIDENT and all(crash.pod != other.pod for other in last):
            last.append(crash)
        else:
            found.append([crash])
    return found


def basis(spec: Mapping[str, Any]) -> str:
    """A hash of everything in a specification but the numbers of replicas: those an autoscaler changes, and it must not
    release by that what waits for a person."""
    components = (*names.ROLES, names.ROUTER)
    parts = {
        key: {k: v for k, v in value.items() if k != "replicas"}
        if key in components and isinstance(value, dict)
        else value
        for key, value in spec.items()
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:10]


def escalate(
    previous: Iterable[Series],
    seen: Iterable[tuple[str, Crash]],
    policy: CrashPolicy,
    *,
    basis: str,
    replicas: Collection[str],
    now: datetime.datetime,
) -> list[Series]:
    """What is to be known from now on, by replica; `seen`: replica and crash, as often as one likes; `replicas`: those
    that are wanted, and those whose pods are still there.

    Any other replica is forgotten, with its latch.
    """
    before = {series.replica: series for series in previous}
    fresh: dict[str, list[Crash]] = {}
    for replica, crash in seen:
        fresh.setdefault(replica, []).append(crash)
    found = (
        _next(before.get(replica, Series(replica, basis)), fresh.get(replica, ()), policy, basis, now)
        for replica in sorted({*before, *fresh} & set(replicas))
    )
    return [series for series in found if series.crashes or series.latched]


def _next(old: Series, seen: Sequence[Crash], policy: CrashPolicy, basis: str, now: datetime.datetime) -> Series:
    edge = now - policy.reset
    known = {crash.id: crash for crash in old.crashes}
    # A node whose clock is ahead must not hold its replica for longer than the policy says; when that time is over, its
    # pod still shows the crash as a new one, and only what is kept of it tells that it is not.
    shown = {crash.id for crash in seen if crash.time > edge}
    for crash in seen:
        known.setdefault(crash.id, Crash(crash.id, crash.pod, min(crash.time, now)))
    kept = sorted(
        (crash for crash in known.values() if crash.time > edge or crash.id in shown),
        key=lambda crash: (crash.time, crash.id),
    )[-MOST_COUNTED:]
    forgiven = old.forgiven | {crash.id for crash in kept if crash.time <= edge}
    latched = old.latched
    if old.basis != basis:
        # What shows by now ended before it, also what nobody had looked at, or what a longer reset time brings back.
        forgiven, latched = forgiven | known.keys(), False
    series = Series(old.replica, basis, tuple(kept), forgiven & {crash.id for crash in kept}, latched)
    return replace(series, latched=latched or len(series.incidents) >= policy.max_restarts)
