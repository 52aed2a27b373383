"""Ends of containers, as the kubelet reports them: when, why, and whether anybody had asked for it."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from glm52_engine.config import Outcome, Termination
from glm52_operator.plan.pods import Pod, is_leaving, name

REVISION_LABELS = ("controller-revision-hash", "pod-template-hash")

CRASHES = frozenset({Outcome.CRASHED, Outcome.WEDGED})

HOST_LOST = "HostLost"
"""Reason of a host that ended since another host of its replica had: that one's own end, if there is one, says more."""

MESSAGE_LIMIT = 1500
"""Characters of evidence that one crash leaves in the status; ten of them are stored with every version of it."""

DEFAULT_GRACE_SECONDS = 30
"""The API server's."""

CLOCKS = datetime.timedelta(seconds=5)
"""By how much a node's clock may be behind the API server's before the end of a pod that was told to go looks like one
that came first."""

IN_TRANSPORT = (
    "in the KV transport (NIXL, UCX), which nothing can catch; over TCP that happens when a decode pod is killed while "
    "it reads from this one"
)
"""What is said of a native end within a call of NIXL."""

_NIXL = "/nixl_cu13/"

_AT_TERM = frozenset({Outcome.DRAINED, Outcome.DRAIN_TIMED_OUT})
"""How an engine ends that was asked to."""

_SHUTDOWN = frozenset({"Terminated", "NodeShutdown", "Shutdown"})
"""What kubelets call pods that they ended because their node was shut down in order."""


@dataclass(frozen=True, slots=True)
class Ending:
    """One container's end, or the loss of its node."""

    id: str
    """The same whenever and by whichever operator process it is looked at, and of no other end."""
    pod: str
    uid: str
    node: str
    revision: str
    time: datetime.datetime
    reason: str
    message: str
    asked: bool
    """Whether the pod had been told to go, or its node, when the container ended."""
    exit_code: int | None = None
    words: Termination | None = None
    """What an engine said itself."""

    @property
    def is_crash(self) -> bool:
        """An end that nobody asked for. A refused configuration is none: starting again cannot help it; nor is a drain
        for the sake of another host of the replica that was told to go."""
        if self.words is not None and self.words.outcome is Outcome.CONFIG_REFUSED:
            return False
        if self.words is not None and self.words.outcome in _AT_TERM and self.words.consequence:
            return False
        # A rank that fails during a drain failed all the same.
        return not self.asked or (self.words is not None and self.words.outcome in CRASHES)


def endings(pod: Pod) -> list[Ending]:
    """Every end that the pod still shows, the oldest first; a container shows its last two at most."""
    found = [_ending(pod, container, ended) for container, ended in _terminated(pod)]
    lost = _node_lost(pod)
    return sorted([*found, *([lost] if lost else [])], key=lambda ending: (ending.time, ending.id))


def told_to_go_at(pod: Pod) -> datetime.datetime | None:
    """When the deletion was asked for, or the earliest time that may have been; deletionTimestamp itself is when its
    grace period is over."""
    until = deadline(pod)
    if until is None:
        return None
    grace = pod["metadata"].get("deletionGracePeriodSeconds")
    if not grace:
        # None: we told it ourselves a moment ago, and the API server's version of it has not come yet. 0: the kubelet
        # asks for the removal of a pod that has ended, seconds after that, and the API server puts this time in the
        # place of the one before. Taken for the first deletion, it would make a crash of every drain.
        grace = pod.get("spec", {}).get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
    return until - datetime.timedelta(seconds=int(grace))


def deadline(pod: Pod) -> datetime.datetime | None:
    """When the grace period of a pod that leaves is over."""
    return read_time(pod["metadata"].get("deletionTimestamp"))


def read_time(text: str | None) -> datetime.datetime | None:
    """A time as the API writes it; None for none, and for what is no time."""
    try:
        found = datetime.datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return found.replace(tzinfo=datetime.UTC) if found is not None and found.tzinfo is None else found


def _terminated(pod: Pod) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    status = pod.get("status", {})
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or []:
            for state in ("lastState", "state"):
                ended = (container.get(state) or {}).get("terminated")
                # An init container is meant to end.
                if not ended or (kind == "initContainerStatuses" and ended.get("exitCode") == 0):
                    continue
                if state == "lastState" or not _never_began(container, ended):
                    yield container, ended


def _never_began(container: dict[str, Any], ended: dict[str, Any]) -> bool:
    """When a pod goes, its kubelet writes 137 also of containers that never ran, as where their image is nowhere.

    Of one that ran and was lost it counts the restart, and keeps the end as the last one.
    """
    begun = container.get("restartCount") or container.get("lastState") or ended.get("containerID")
    return ended.get("reason") == "ContainerStatusUnknown" and not begun


def _ending(pod: Pod, container: dict[str, Any], ended: dict[str, Any]) -> Ending:
    words = Termination.decode(str(ended.get("message") or "").strip())
    meta, status = pod["metadata"], pod.get("status", {})
    time = read_time(ended.get("finishedAt")) or _born(pod)
    told = told_to_go_at(pod)
    code = ended.get("exitCode")
    # The kubelet rounds down to whole seconds, as the API server does. Only an end that TERM can have brought may be
    # early: what was killed before somebody deleted its pod was not asked.
    gently = words.outcome in _AT_TERM if words is not None else code in (0, 128 + signal.SIGTERM)
    told = told - CLOCKS if told is not None and gently else told
    asked = (told is not None and time >= told) or str(status.get("reason")) in _SHUTDOWN
    # containerID is missing where the kubelet lost sight of the container. The count of restarts would not do: it says
    # how many there were, and not which one ended.
    which = str(ended.get("containerID") or ended.get("finishedAt"))
    return Ending(
        id=_digest(meta["uid"], container["name"], which),
        pod=name(pod),
        uid=meta["uid"],
        node=pod.get("spec", {}).get("nodeName", ""),
        revision=_revision(pod),
        time=time,
        reason=_reason(status, ended, words),
        message=_message(status, container, ended, words),
        asked=asked,
        exit_code=int(code) if code is not None else None,
        words=words,
    )


def _node_lost(pod: Pod) -> Ending | None:
    """A node that went silent: its kubelet cannot say how the containers ended, and perhaps they did not."""
    for condition in pod.get("status", {}).get("conditions") or []:
        lost = condition.get("type") == "DisruptionTarget" and condition.get("status") == "True"
        if lost and condition.get("reason") == "DeletionByTaintManager" and is_leaving(pod):
            node = pod.get("spec", {}).get("nodeName", "")
            return Ending(
                id=_digest(pod["metadata"]["uid"], "node"),
                pod=name(pod),
                uid=pod["metadata"]["uid"],
                node=node,
                revision=_revision(pod),
                time=read_time(condition.get("lastTransitionTime")) or _born(pod),
                reason="NodeLost",
                message=f"node {node} went silent or may not run the pod: {condition.get('message', '')}",
                asked=False,
            )
    return None


def _reason(status: dict[str, Any], ended: dict[str, Any], words: Termination | None) -> str:
    if status.get("phase") == "Failed" and status.get("reason"):
        return str(status["reason"])
    if ended.get("reason") in ("OOMKilled", "ContainerStatusUnknown"):
        return str(ended["reason"])
    code = int(ended.get("exitCode") or 0)
    if words is not None and words.outcome is Outcome.CRASHED and words.consequence:
        return HOST_LOST
    if words is not None and words.outcome not in _AT_TERM:
        return words.outcome.value
    if code == 0 or words is not None:
        return "EndedUnasked"
    return "Killed" if _signal(code) else "Crashed"


def _message(
    status: dict[str, Any], container: dict[str, Any], ended: dict[str, Any], words: Termination | None
) -> str:
    code = int(ended.get("exitCode") or 0)
    text = str(ended.get("message") or "").strip()
    if words is not None:
        first, lines = words.message, words.log
    else:
        lines = tuple(text.splitlines())
        first = _signal(code) or f"exit code {code}"
        if _signal(code) and _in_transport(lines):
            first += f" {IN_TRANSPORT}"
    if status.get("phase") == "Failed" and status.get("message"):
        first = f"{status['message']} ({first})"
    elif ended.get("reason") == "OOMKilled":
        first = f"killed at its memory limit ({first})"
    elif code == 0 or (words is not None and words.outcome is Outcome.DRAINED):
        first += "; nobody had told the pod to go: a probe failed, or somebody sent it TERM"
    kept = f"container {container['name']}: {first}"[:MESSAGE_LIMIT]
    # The last lines say most; what does not fit is the oldest.
    tail: list[str] = []
    for line in reversed(lines):
        if len(kept) + sum(len(each) + 1 for each in tail) + len(line) + 1 > MESSAGE_LIMIT:
            break
        tail.insert(0, line)
    return "\n".join([kept, *tail])


def _signal(code: int) -> str:
    """Exit codes above 128 are how a shell, and the kubelet, tell of a signal."""
    try:
        return f"killed by {signal.Signals(code - 128).name}" if code > 128 else ""
    except ValueError:
        return ""


def _in_transport(lines: Sequence[str]) -> bool:
    """Whether the thread that a signal ended was within NIXL, by the stack that Python leaves of it. Stacks of other
    threads, which follow where an engine leaves them, do not count: NIXL is among them whoever falls."""
    stack = itertools.dropwhile(lambda line: not line.startswith(("Stack (", "Current thread ")), lines)
    return any(_NIXL in line for line in itertools.takewhile(str.strip, stack))


def _revision(pod: Pod) -> str:
    labels = pod["metadata"].get("labels") or {}
    return next((labels[label] for label in REVISION_LABELS if label in labels), "")


def _born(pod: Pod) -> datetime.datetime:
    return read_time(pod["metadata"].get("creationTimestamp")) or datetime.datetime.fromtimestamp(0, datetime.UTC)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]
