"""Which events are written: a repeat joins its series, and an object that never rests does not flood the cluster."""

from __future__ import annotations

import datetime
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

from glm52_operator import names
from glm52_operator.desired.target import Object

NOTE_LIMIT = 1024
"""Bytes of a note that the API takes; reason and action may have 128 each."""

OBJECTS = 4096
SERIES = 16
REASONS = 32
"""What is remembered: deployments, and of each kinds of event and reasons. Beyond it the oldest is forgotten, and told
anew."""

BURST = 20
REFILL_SECONDS = 30.0
"""Event writes that one deployment has for a reason at once, and the time after which it has one more. Were they for
all reasons together, a busy day's rollouts would use them up, and the one event that somebody looks for, why the next
rollout does not get on, would be missing."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a person on call looks for."""

    type: Literal["Normal", "Warning"]
    reason: str
    action: str
    note: str


@dataclass(slots=True)
class _Series:
    name: str
    first: datetime.datetime
    count: int = 0


@dataclass(slots=True)
class _Budget:
    """What may still be written for one reason."""

    refilled: datetime.datetime
    tokens: float = BURST

    def take(self, now: datetime.datetime) -> bool:
        # A clock that was set back must not take tokens away.
        gained = max(0.0, (now - self.refilled).total_seconds()) / REFILL_SECONDS
        self.tokens = min(float(BURST), self.tokens + gained)
        self.refilled = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


@dataclass(slots=True)
class _Teller:
    """One deployment's events."""

    series: OrderedDict[str, _Series] = field(default_factory=OrderedDict)
    budgets: OrderedDict[str, _Budget] = field(default_factory=OrderedDict)

    def may_write(self, reason: str, now: datetime.datetime) -> bool:
        budget = self.budgets.setdefault(reason, _Budget(refilled=now))
        self.budgets.move_to_end(reason)
        while len(self.budgets) > REASONS:
            self.budgets.popitem(last=False)
        return budget.take(now)


class Aggregator:
    """What was told of each deployment since the operator started."""

    def __init__(self, instance: str) -> None:
        self._instance = instance[:128]
        self._tellers: OrderedDict[str, _Teller] = OrderedDict()

    def event(self, resource: Object, notice: Notice, now: datetime.datetime) -> Object | None:
        """The events.k8s.io/v1 object to apply; None: too many, and a repeat is counted in the series' next write."""
        uid = resource["metadata"]["uid"]
        teller = self._tellers.setdefault(uid, _Teller())
        self._tellers.move_to_end(uid)
        while len(self._tellers) > OBJECTS:
            self._tellers.popitem(last=False)
        digest = _digest(notice.type, notice.reason, notice.note)
        series = teller.series.get(digest)
        if series is None:
            if not teller.may_write(notice.reason, now):
                return None
            unique = _digest(uid, digest, now.isoformat())[:16]
            series = teller.series[digest] = _Series(f"{resource['metadata']['name']}.{unique}", now)
            series.count = 1
        else:
            series.count += 1
            if not teller.may_write(notice.reason, now):
                return None
        teller.series.move_to_end(digest)
        while len(teller.series) > SERIES:
            teller.series.popitem(last=False)
        return self._body(resource, notice, series, now)

    def forget(self, uid: str) -> None:
        self._tellers.pop(uid, None)

    def _body(self, resource: Object, notice: Notice, series: _Series, now: datetime.datetime) -> Object:
        """Everything but `series` stays the same in a repeat: the API server refuses a change of it."""
        meta = resource["metadata"]
        body: dict[str, Any] = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"namespace": meta["namespace"], "name": series.name},
            "eventTime": _micro_time(series.first),
            "type": notice.type,
            "reason": notice.reason,
            "action": notice.action,
            "note": _cut(notice.note),
            "regarding": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
            },
            "reportingController": names.MANAGER,
            "reportingInstance": self._instance,
        }
        if series.count > 1:
            body["series"] = {"count": series.count, "lastObservedTime": _micro_time(now)}
        return body


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _micro_time(when: datetime.datetime) -> str:
    return when.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _cut(note: str) -> str:
    raw = note.encode()
    if len(raw) <= NOTE_LIMIT:
        return note
    return raw[: NOTE_LIMIT - 3].decode(errors="ignore") + "…"
