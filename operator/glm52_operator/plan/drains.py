"""Pods that leave: how far each is, and how it ended. Pods are known by their uid, since names come again."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from glm52_engine.config import Outcome
from glm52_operator.plan.endings import CRASHES, Ending, deadline, endings, told_to_go_at
from glm52_operator.plan.pods import Pod, is_leaving, name

KILL_MARGIN = datetime.timedelta(seconds=30)
"""After the grace period the kubelet kills, waits for the dead and unmounts; one that takes longer hangs."""

LATE_NEWS = datetime.timedelta(seconds=5)
"""Events of a pod and of its successor come in any order: for so long the news of its end may be on their way."""

KEPT = 10
"""Ended drains that are kept, the newest."""


class Phase(enum.StrEnum):
    DRAINING = "Draining"
    """Running requests finish."""
    TERMINATING = "Terminating"
    """The drain is over, or there is nothing left that could drain: memory is given back, volumes are unmounted."""
    STUCK = "StuckTerminating"
    """The grace period is over, and the pod is still there."""
    ENDED = "Ended"


class DrainOutcome(enum.StrEnum):
    DRAINED = "Drained"
    TIMED_OUT = "DrainTimedOut"
    """The window was over first: what still ran was cut off."""
    KILLED = "Killed"
    """Ended by the kubelet, or by the kernel, before it had ended by itself."""
    CRASHED = "Crashed"
    UNKNOWN = "Unknown"
    """The pod was gone before anybody saw how it ended: deleted by force, or together with its node."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What a pod said of itself. `in_flight`: requests, and prompts that it holds for peers."""

    in_flight: int
    stopped: bool = False
    """Its drain is over."""


@dataclass(frozen=True, slots=True)
class Drain:
    pod: str
    uid: str
    node: str
    phase: Phase
    started: datetime.datetime
    deadline: datetime.datetime
    in_flight: int | None = None
    outcome: DrainOutcome | None = None
    ended: datetime.datetime | None = None
    cut_off: int = 0
    """Requests that did not finish."""


def advance(
    previous: Iterable[Drain],
    pods: Iterable[Pod],
    departed: Iterable[Pod],
    heard: Mapping[str, Heard],
    now: datetime.datetime,
) -> list[Drain]:
    """Those under way, then the newest that ended. `departed`: states of pods that are gone, of one perhaps several;
    `heard`: by uid.

    The same seen again changes nothing.
    """
    before = {drain.uid: drain for drain in previous}
    found: dict[str, Drain] = {}
    here = set()
    for pod in pods:
        uid = pod["metadata"]["uid"]
        here.add(uid)
        # One that is told of is told of to its end, also where a node's clock puts that before the deletion.
        if is_leaving(pod) and (uid in before or _concerns(pod, now)):
            found[uid] = _under_way(pod, before.get(uid), heard.get(uid), now)
    for uid, pod in last_states(departed).items():
        known = before.get(uid)
        if uid not in here and (_is_open(known) if known else _drains(pod)):
            found[uid] = _ended(pod, known, now)
    for uid, drain in before.items():
        if uid not in here and uid not in found:
            found[uid] = drain if drain.phase is Phase.ENDED else _gone(drain, now)
    return _kept(found.values(), now)


def last_states(departed: Iterable[Pod]) -> dict[str, Pod]:
    """By uid the state that counts of each pod that is gone: the latest one, but rather one that shows how it ended.

    A list and an event may each bring one, in any order. Taken one after the other, what the first led to would be
    history to the second, and the next pass would tell otherwise of the same.
    """
    found: dict[str, Pod] = {}
    for pod in departed:
        known = found.get(pod["metadata"]["uid"])
        if known is None or _last(pod) is not None or _last(known) is None:
            found[pod["metadata"]["uid"]] = pod
    return found


def _is_open(drain: Drain) -> bool:
    """Whether something can still be learnt of it: news of a pod's end may come after those of its absence."""
    return drain.phase is not Phase.ENDED or drain.outcome is DrainOutcome.UNKNOWN


def _kept(drains: Iterable[Drain], now: datetime.datetime) -> list[Drain]:
    # Pods of one name may end within a second: by name alone their order would be that in which they were looked at.
    drains = sorted(drains, key=lambda d: (d.pod, d.uid))
    under_way = sorted((d for d in drains if d.phase is not Phase.ENDED), key=lambda d: d.deadline)
    ended = sorted((d for d in reversed(drains) if d.phase is Phase.ENDED), key=lambda d: d.ended or now, reverse=True)
    return [*under_way, *ended[:KEPT]]


def _concerns(pod: Pod, now: datetime.datetime) -> bool:
    """Whether a pod that leaves is worth telling: it drains, or it does not get away."""
    until = deadline(pod)
    overdue = until is not None and now > until + KILL_MARGIN and bool(pod.get("spec", {}).get("nodeName"))
    return overdue or _drains(pod)


def _drains(pod: Pod) -> bool:
    """Whether something runs in it, or did until it was told to go; one that is broken just goes."""
    containers = pod.get("status", {}).get("containerStatuses") or []
    return any("running" in (c.get("state") or {}) for c in containers) or any(end.asked for end in endings(pod))


def _under_way(pod: Pod, known: Drain | None, heard: Heard | None, now: datetime.datetime) -> Drain:
    # One that was taken for gone, as a list that is older than its event shows it, has not ended.
    drain = replace(known, outcome=None, cut_off=0, ended=None) if known else _begun(pod, now)
    last = _last(pod)
    if last is not None:
        outcome, cut_off = _outcome(last)
        drain = replace(drain, outcome=outcome, cut_off=cut_off, in_flight=None)
    else:
        # A second deletion may shorten the grace period; the kubelet's own, of a pod that has ended, shortens nothing.
        drain = replace(drain, deadline=deadline(pod) or drain.deadline)
        drain = replace(drain, in_flight=heard.in_flight) if heard is not None else drain
    if now > drain.deadline + KILL_MARGIN:
        return replace(drain, phase=Phase.STUCK)
    over = last is not None or (heard is not None and heard.stopped)
    return replace(drain, phase=Phase.TERMINATING if over else Phase.DRAINING)


def _ended(pod: Pod, known: Drain | None, now: datetime.datetime) -> Drain:
    drain, last = known or _begun(pod, now), _last(pod)
    outcome, cut_off = _outcome(last) if last else (drain.outcome or DrainOutcome.UNKNOWN, drain.cut_off)
    return replace(drain, phase=Phase.ENDED, outcome=outcome, cut_off=cut_off, in_flight=None, ended=drain.ended or now)


def _gone(drain: Drain, now: datetime.datetime) -> Drain:
    """A pod that is not there any more, and of which nothing was heard."""
    since = drain.ended or now
    late = drain.outcome is None and now - since < LATE_NEWS
    return replace(
        drain,
        phase=Phase.TERMINATING if late else Phase.ENDED,
        outcome=None if late else drain.outcome or DrainOutcome.UNKNOWN,
        ended=since,
        in_flight=None,
    )


def _begun(pod: Pod, now: datetime.datetime) -> Drain:
    return Drain(
        pod=name(pod),
        uid=pod["metadata"]["uid"],
        node=pod.get("spec", {}).get("nodeName", ""),
        phase=Phase.DRAINING,
        started=told_to_go_at(pod) or now,
        deadline=deadline(pod) or now,
    )


def _last(pod: Pod) -> Ending | None:
    """The end of the pod's last container, once none runs any more."""
    containers = pod.get("status", {}).get("containerStatuses") or []
    if not containers or not all("terminated" in (container.get("state") or {}) for container in containers):
        return None
    return max(endings(pod), key=lambda ending: ending.time, default=None)


def _outcome(last: Ending) -> tuple[DrainOutcome, int]:
    """How it ended, and how many requests were cut off as far as the engine could say."""
    words = last.words
    if words is None or last.reason in ("OOMKilled", "ContainerStatusUnknown"):
        # An engine that is told to go before it can write its last words leaves with 0 all the same.
        return (DrainOutcome.DRAINED if last.exit_code == 0 else DrainOutcome.KILLED), 0
    if words.outcome in CRASHES:
        return DrainOutcome.CRASHED, words.in_flight
    timed_out = words.outcome is Outcome.DRAIN_TIMED_OUT
    return (DrainOutcome.TIMED_OUT if timed_out else DrainOutcome.DRAINED), words.in_flight


def askable(pods: Iterable[Pod]) -> dict[str, str]:
    """uid → address of the pods that can be asked how far their drain is."""
    return {
        pod["metadata"]["uid"]: pod["status"]["podIP"]
        for pod in pods
        if is_leaving(pod) and pod.get("status", {}).get("podIP") and _last(pod) is None and _drains(pod)
    }
