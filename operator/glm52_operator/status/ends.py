"""What ended and what is ending in one deployment: crashes, restarts and drains, from the last status and the pods."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm52_engine.sizing import stop_seconds
from glm52_operator import names
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.drains import Drain, Heard, advance, last_states
from glm52_operator.plan.endings import endings
from glm52_operator.plan.escalation import Crash, CrashPolicy, Series, basis, escalate
from glm52_operator.plan.restarts import Members
from glm52_operator.plan.rollout.replicas import ordinal_of
from glm52_operator.status.conditions import Verdict
from glm52_operator.status.crashes import degraded, keep_evidence, read_series, write_series
from glm52_operator.status.drains import draining, read_drains, stalled, write_drains

Pods = Mapping[names.Component, Sequence[Object]]


@dataclass(frozen=True, slots=True)
class Ends:
    policy: CrashPolicy
    crashes: Sequence[Mapping[str, Any]] = field(default=())
    restarts: Sequence[Series] = field(default=())
    drains: Sequence[Drain] = field(default=())

    def fields(self) -> dict[str, Any]:
        """Of the status; a list that would be empty is left out."""
        found = {
            "drains": write_drains(self.drains),
            "crashes": [dict(entry) for entry in self.crashes],
            "restarts": write_series(self.restarts, self.policy),
        }
        return {key: value for key, value in found.items() if value}

    def verdicts(self) -> dict[str, Verdict]:
        """The conditions; an alarm stands there only while it is True."""
        alarms = {
            "Degraded": degraded(self.restarts, self.crashes, self.policy),
            "Stalled": stalled(self.drains),
        }
        return {"Draining": draining(self.drains), **{kind: alarm for kind, alarm in alarms.items() if alarm}}


def crash_policy(target: Target) -> CrashPolicy:
    own = target.spec.crash_policy
    return CrashPolicy(
        backoff_base=own.backoff_base_seconds,
        backoff_max=own.backoff_max_seconds,
        max_restarts=own.max_restarts,
        reset=datetime.timedelta(seconds=own.reset_seconds),
    )


def observe(
    resource: Object,
    target: Target,
    pods: Pods,
    departed: Sequence[Object],
    heard: Mapping[str, Heard],
    now: datetime.datetime,
) -> Ends:
    """`departed`: last states of pods that are gone; `heard`: by uid, what pods that leave say of themselves."""
    previous, policy = resource.get("status", {}), crash_policy(target)
    # As exact as what is written, or the same would look like news when it is read again.
    now = now.replace(microsecond=0)
    here = [pod for members in pods.values() for pod in members]
    ended = ({pod["metadata"]["uid"]: pod for pod in here} | last_states(departed)).values()
    seen = [(replica_of(pod, target), ending) for pod in ended for ending in endings(pod)]
    crashed = [(replica, Crash(e.id, e.pod, e.time)) for replica, e in seen if e.is_crash]
    # A replica that is scaled away and back while its pods drain is the same one: were it forgotten in between, what an
    # edit has taken off its account would be read from its pods as new.
    known = {*replicas(target, pods), *(replica_of(pod, target) for pod in here), names.role(target.name, names.ROUTER)}
    restarts = escalate(
        read_series(previous.get("restarts") or []),
        crashed,
        policy,
        basis=basis(resource.get("spec", {})),
        replicas=known,
        now=now,
    )
    return Ends(
        policy=policy,
        crashes=keep_evidence(previous.get("crashes") or [], [ending for _, ending in seen], restarts),
        restarts=restarts,
        drains=advance(read_drains(previous.get("drains") or []), here, departed, heard, now),
    )


def replica_of(pod: Object, target: Target) -> str:
    """The name that a pod's crashes are counted under: its replica's leader; all routers are one."""
    role = (pod["metadata"].get("labels") or {}).get(names.ROLE)
    for engine in names.ROLES:
        workload = names.role(target.name, engine)
        number = ordinal_of(pod["metadata"]["name"], workload)
        if role == engine and number is not None:
            hosts = target.hosts(engine)
            return f"{workload}-{number // hosts * hosts}"
    return names.role(target.name, names.ROUTER)


def replicas(target: Target, pods: Pods) -> dict[str, Members]:
    """Every engine replica that is wanted, by the name of its leader's pod."""
    found: dict[str, Members] = {}
    for role in names.ROLES:
        hosts, workload = target.hosts(role), names.role(target.name, role)
        by_replica: dict[str, list[Object]] = {}
        for pod in pods.get(role, ()):
            by_replica.setdefault(replica_of(pod, target), []).append(pod)
        grace = stop_seconds(target.role_config(role))
        leaders = (f"{workload}-{number * hosts}" for number in range(target.wanted(role)))
        found |= {leader: Members(hosts, by_replica.get(leader, ()), grace) for leader in leaders}
    return found
