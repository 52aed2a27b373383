"""What is done to pods of replicas that crashed: held when they start again, replaced together, released by an edit.

Nothing here stops a pod that serves. A container that ends is started again by its kubelet; what the operator adds is
how long the engine in it waits before it loads anything, and that the hosts of one replica begin anew together.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from glm52_engine.config import Hold
from glm52_operator import names
from glm52_operator.plan.endings import read_time, told_to_go_at
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
    """The pod goes, and its StatefulSet makes another one. `grace`: seconds for that; None: as many as for a drain."""

    pod: str
    uid: str
    version: str
    why: str
    grace: int | None = None


Action = SetHold | Restart


@dataclass(frozen=True, slots=True)
class Members:
    """The pods of one replica that exist, and how many it has when it is whole.

    `grace`: seconds in which a pod ends that has nothing to drain.
    """

    hosts: int
    pods: Sequence[Pod]
    grace: int


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
        elif members.hosts > 1:
            last = series.incidents[-1] if series is not None and series.incidents else None
            chosen += _with_the_leaving(members, here, last) or _anew(members, here, last)
    return chosen


def _anew(members: Members, here: Sequence[Pod], last: datetime.datetime | None) -> list[Action]:
    """The hosts of a replica that crashed: one alone would come back to peers that know another life of it.

    It serves nobody, and a process that is frozen outlives TERM: the time for a drain would only be waited for.
    """
    if last is None or all(is_ready(pod) for pod in here):
        return []
    why = f"belongs to a replica that crashed at {last:%H:%M:%S}Z: its hosts begin anew"
    return [_restart(pod, why, members.grace) for pod in here if (born := _born(pod)) and born <= last]


def _with_the_leaving(members: Members, here: Sequence[Pod], last: datetime.datetime | None) -> list[Action]:
    """When one host of a replica goes, the others drain with it: no step is possible without it, and its successor
    finds no replica that it could join."""
    went = max((told for pod in members.pods if is_leaving(pod) and (told := told_to_go_at(pod))), default=None)
    if went is None:
        return []
    why = f"belongs to a replica of which a host was told to go at {went:%H:%M:%S}Z: they go together"
    # A process that is older than its replica's crash did not notice it: nothing is drained there either.
    fell = last is not None and any(began < last for pod in members.pods for began in _running_since(pod))
    grace = members.grace if fell else None
    return [_restart(pod, why, grace) for pod in here if (born := _born(pod)) and born <= went]


def _running_since(pod: Pod) -> Iterator[datetime.datetime]:
    for container in pod.get("status", {}).get("containerStatuses") or []:
        began = read_time(((container.get("state") or {}).get("running") or {}).get("startedAt"))
        if began is not None:
            yield began


def _restart(pod: Pod, why: str, grace: int | None = None) -> Restart:
    return Restart(name(pod), _uid(pod), str(pod["metadata"].get("resourceVersion", "")), why, grace)


def _born(pod: Pod) -> datetime.datetime | None:
    return read_time(pod["metadata"].get("creationTimestamp"))


def _latched(pod: Pod) -> bool:
    hold = Hold.decode(_annotation(pod))
    return hold is not None and hold.until is None


def _annotation(pod: Pod) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(names.HOLD, ""))


def _uid(pod: Pod) -> str:
    return str(pod["metadata"]["uid"])
