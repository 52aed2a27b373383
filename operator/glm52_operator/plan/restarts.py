"""What is done to pods of replicas that crashed: held when they start again, replaced together, released by an edit.

Nothing here stops a pod that serves. A container that ends is started again by its kubelet; what the operator adds is
how long the engine in it waits before it loads anything, and that the hosts of one replica begin anew together.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from glm52_engine.config import Hold
from glm52_operator import names
from glm52_operator.plan.endings import read_time
from glm52_operator.plan.escalation import CrashPolicy, Series
from glm52_operator.plan.pods import Pod, is_leaving, is_ready, name


@dataclass(frozen=True, slots=True)
class SetHold:
    """The annotation `names.HOLD` of a pod becomes this."""

    pod: str
    uid: str
    hold: str


@dataclass(frozen=True, slots=True)
class Restart:
    """The pod goes, and its StatefulSet makes another one."""

    pod: str
    uid: str
    version: str
    why: str


Action = SetHold | Restart


@dataclass(frozen=True, slots=True)
class Members:
    """The pods of one replica that exist, and how many it has when it is whole."""

    hosts: int
    pods: Sequence[Pod]


def hold_of(series: Series, policy: CrashPolicy, now: datetime.datetime) -> Hold | None:
    """What the next start of a replica's containers has to wait for."""
    count = len(series.incidents)
    why = f"crashed {count} times within {policy.reset.total_seconds():.0f} s"
    if series.latched:
        return Hold(why=why)
    until = series.held_until(policy)
    return Hold(until=until, why=why) if until is not None and until > now else None


def actions(
    found: Iterable[Series],
    replicas: Mapping[str, Members],
    policy: CrashPolicy,
    now: datetime.datetime,
) -> list[Action]:
    """What to do now; `replicas`: the pods of every wanted replica, by the name of its leader's pod.

    Routers are not in it: they load nothing, and without them nothing is served.
    """
    by_replica = {series.replica: series for series in found}
    chosen: list[Action] = []
    for replica, members in replicas.items():
        series = by_replica.get(replica)
        here = [pod for pod in members.pods if not is_leaving(pod)]
        hold = hold_of(series, policy, now) if series else None
        released = [pod for pod in here if _latched(pod) and not (series and series.latched)]
        if released:
            why = "is not held any more, since the specification was changed"
            chosen += [_restart(pod, why) for pod in released]
        elif hold is not None:
            text = hold.encode()
            chosen += [SetHold(name(pod), _uid(pod), text) for pod in here if _annotation(pod) != text]
        elif series is not None and members.hosts > 1:
            chosen += _together(series, here)
    return chosen


def _together(series: Series, pods: Sequence[Pod]) -> list[Action]:
    """The hosts of a replica that crashed: one alone would come back to peers that know another life of it."""
    last = series.incidents[-1] if series.incidents else None
    if last is None or all(is_ready(pod) for pod in pods):
        return []
    old = [pod for pod in pods if (born := read_time(pod["metadata"].get("creationTimestamp"))) and born <= last]
    return [
        _restart(pod, f"belongs to a replica that crashed at {last:%H:%M:%S}Z: its hosts begin anew") for pod in old
    ]


def _restart(pod: Pod, why: str) -> Restart:
    return Restart(name(pod), _uid(pod), str(pod["metadata"].get("resourceVersion", "")), why)


def _latched(pod: Pod) -> bool:
    hold = Hold.decode(_annotation(pod))
    return hold is not None and hold.until is None


def _annotation(pod: Pod) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(names.HOLD, ""))


def _uid(pod: Pod) -> str:
    return str(pod["metadata"]["uid"])
