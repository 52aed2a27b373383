"""Which pods form which replica, and what can be said of it: everything that a rollout is decided from.

A StatefulSet numbers its pods; `hostsPerReplica` neighbours in that order are the hosts of one replica, and the first
of them is its leader.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from glm52_engine.config import Role
from glm52_operator import names
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan import pods

REVISION = "controller-revision-hash"
"""Label that the StatefulSet controller gives a pod: the template that it was made from."""

POD_INDEX = "apps.kubernetes.io/pod-index"
"""Label with a pod's number in its StatefulSet."""


class State(enum.Enum):
    SERVING = "serving"
    FALTERING = "faltering"
    """Every host runs, and not every one is ready: it may come back by itself."""
    DOWN = "down"
    """A host is missing, leaves, or has not started: nothing is lost by replacing it."""


@dataclass(frozen=True, slots=True)
class Host:
    """One pod."""

    name: str
    uid: str
    version: str
    """resourceVersion: a pod that changed since it was looked at is not deleted."""
    host: int
    """Place in its replica; 0 is the leader."""
    revision: str
    kv: str
    ready: bool
    started: bool
    leaving: bool
    since: str
    """When its readiness last changed, as the API writes times; empty if never."""
    grace: int = 30
    """Seconds that it gets to go."""


@dataclass(frozen=True, slots=True)
class Replica:
    index: int
    size: int
    """Hosts that it consists of."""
    hosts: tuple[Host, ...] = ()
    """Those that exist, in order."""

    @property
    def state(self) -> State:
        if len(self.hosts) < self.size or any(h.leaving or not (h.ready or h.started) for h in self.hosts):
            return State.DOWN
        return State.SERVING if all(host.ready for host in self.hosts) else State.FALTERING

    @property
    def kv(self) -> str | None:
        """What its KV can be exchanged with; None where it has no leader."""
        return next((host.kv for host in self.hosts if host.host == 0), None)

    def is_of(self, revision: str) -> bool:
        """Whether it is whole, and of that revision only."""
        return len(self.hosts) == self.size and all(host.revision == revision for host in self.hosts)

    def outdated(self, revision: str) -> tuple[Host, ...]:
        """Hosts to replace: one that leaves is on its way, and its successor is of the newest revision."""
        return tuple(host for host in self.hosts if host.revision != revision and not host.leaving)


@dataclass(frozen=True, slots=True)
class RoleView:
    """One role as observed."""

    role: Role
    workload: str
    """Name of its StatefulSet."""
    revision: str | None
    """What its controller makes pods of; None while it has not acted on what was applied last."""
    kv: str
    """Of that revision."""
    replicas: tuple[Replica, ...]
    """As many as are wanted, whether they exist or not."""
    hosts: int = 1
    """Pods of one replica."""

    def names_of(self, replica: Replica) -> list[str]:
        """Names of all its pods, also of those that do not exist."""
        return [f"{self.workload}-{replica.index * replica.size + host}" for host in range(replica.size)]


def view(role: Role, target: Target, workload: Object | None, members: Sequence[Object]) -> RoleView:
    """Read a role's StatefulSet and pods; pods beyond the replicas that are wanted are left out."""
    size, wanted, name = target.hosts(role), target.replicas(role), names.role(target.name, role)
    by_replica: dict[int, list[Host]] = {}
    for pod in members:
        ordinal = ordinal_of(pods.name(pod), name)
        if ordinal is not None and ordinal < wanted * size:
            by_replica.setdefault(ordinal // size, []).append(_host(pod, ordinal % size))
    return RoleView(
        role=role,
        workload=name,
        revision=newest_revision(workload),
        kv=_labels((workload or {}).get("spec", {}).get("template", {})).get(names.KV, ""),
        replicas=tuple(
            Replica(index, size, tuple(sorted(by_replica.get(index, ()), key=lambda host: host.host)))
            for index in range(wanted)
        ),
        hosts=size,
    )


def leaders(target: Target, component: names.Component) -> str:
    """Label selector that matches one pod of each replica, as autoscalers count them.

    Pods carry their number as a label of the StatefulSet controller: no label of ours has to reach a pod in time.
    """
    every = names.selector_text(target.name, component)
    size = target.hosts(component)
    if size == 1:
        return every
    first = ",".join(str(index * size) for index in range(max(1, target.replicas(component))))
    return f"{every},{POD_INDEX} in ({first})"


def ordinal_of(pod: str, workload: str) -> int | None:
    """A pod's number in its StatefulSet; None for a pod of another name, which somebody else made."""
    number = pod.removeprefix(f"{workload}-")
    return int(number) if number != pod and number.isascii() and number.isdigit() else None


def newest_revision(workload: Object | None) -> str | None:
    """The revision of the pods that a StatefulSet makes now, once its controller has seen the last apply."""
    if workload is None:
        return None
    status = workload.get("status", {})
    seen = int(status.get("observedGeneration", 0)) >= int(workload["metadata"].get("generation", 0))
    return str(status["updateRevision"]) if seen and status.get("updateRevision") else None


def _host(pod: Object, host: int) -> Host:
    meta, labels = pod["metadata"], _labels(pod)
    return Host(
        name=pods.name(pod),
        uid=str(meta.get("uid", "")),
        version=str(meta.get("resourceVersion", "")),
        host=host,
        revision=labels.get(REVISION, ""),
        kv=labels.get(names.KV, ""),
        ready=pods.is_ready(pod),
        started=pods.has_started(pod),
        leaving=pods.is_leaving(pod),
        since=str(pods.ready_condition(pod).get("lastTransitionTime") or ""),
        grace=int(pod.get("spec", {}).get("terminationGracePeriodSeconds") or 30),
    )


def _labels(obj: Object) -> dict[str, str]:
    return obj.get("metadata", {}).get("labels") or {}
