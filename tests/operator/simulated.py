"""Two StatefulSets and their pods in memory: what controllers and kubelets do to them, one small step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from glm52_engine.config import Role
from glm52_operator import names
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.rollout import Plan, Replacement, State, plan_for
from tests.operator.builders import target

CHAT = target()


@dataclass(frozen=True)
class Revision:
    """A template; `kv` is what its KV can be exchanged with, and a broken one never starts."""

    name: str
    kv: str
    broken: bool = False


@dataclass
class SimPod:
    revision: Revision
    uid: int
    started: bool = False
    ready: bool = False
    leaving: bool = False


@dataclass
class SimSet:
    """One role: the StatefulSet controller's view of it is the truth."""

    role: Role
    replicas: int
    revision: Revision
    hosts: int = 1
    seen: bool = True
    """Whether its controller has acted on the newest template."""
    pods: dict[int, SimPod] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return names.role(CHAT.name, self.role)


@dataclass
class SimCluster:
    sets: dict[Role, SimSet]
    max_unavailable: int = 1
    paused: bool = False
    made: int = 0

    @classmethod
    def running(cls, prefill: int, decode: int, *, hosts: int = 1, kv: str = "a", **more: Any) -> SimCluster:
        """Everything serves at one revision."""
        first = Revision("r0", kv)
        cluster = cls({"prefill": SimSet("prefill", prefill, first), "decode": SimSet("decode", decode, first)}, **more)
        cluster.sets["decode"].hosts = hosts
        cluster.make()
        cluster.settle()
        return cluster

    # What others do.

    def make(self) -> None:
        """The StatefulSet controllers: pods beyond the scale leave, missing ones are made of the newest template."""
        for each in self.sets.values():
            wanted = each.replicas * each.hosts
            for ordinal, pod in each.pods.items():
                pod.leaving |= ordinal >= wanted
            for ordinal in set(range(wanted)) - each.pods.keys():
                self.made += 1
                each.pods[ordinal] = SimPod(each.revision, self.made)

    def advance(self, role: Role, ordinal: int) -> None:
        """One pod gets one step further in its life."""
        pods = self.sets[role].pods
        pod = pods[ordinal]
        if pod.leaving:
            del pods[ordinal]
        elif pod.started:
            pod.ready = True
        else:
            pod.started = not pod.revision.broken

    def settle(self) -> None:
        """Everything that can become ready is."""
        for _ in range(2):
            for role, each in self.sets.items():
                for ordinal in list(each.pods):
                    self.advance(role, ordinal)

    def turn(self) -> None:
        """Everybody but the operator does all there is to do."""
        for each in self.sets.values():
            each.pods = {ordinal: pod for ordinal, pod in each.pods.items() if not pod.leaving}
        self.make()
        self.settle()

    def edit(self, revision: Revision, *roles: Role) -> None:
        for role in roles or self.sets:
            self.sets[role].revision = revision

    # What the operator sees and does.

    def target(self) -> Target:
        spec = CHAT.spec.model_copy(
            update={
                "prefill": CHAT.spec.prefill.model_copy(update={"replicas": self.sets["prefill"].replicas}),
                "decode": CHAT.spec.decode.model_copy(
                    update={
                        "replicas": self.sets["decode"].replicas,
                        "hosts_per_replica": self.sets["decode"].hosts,
                    }
                ),
                "rollout": CHAT.spec.rollout.model_copy(
                    update={"max_unavailable": self.max_unavailable, "paused": self.paused}
                ),
            }
        )
        return replace(CHAT, spec=spec)

    def plan(self) -> Plan:
        workloads: dict[names.Component, Object | None] = {role: _workload(each) for role, each in self.sets.items()}
        return plan_for(self.target(), workloads, {role: list(_pods(each)) for role, each in self.sets.items()})

    def carry_out(self, replacement: Replacement, *, hosts: int | None = None) -> None:
        """Send off the hosts of a replacement, or only the first of them, as an operator that dies in between."""
        each = self.sets[replacement.role]
        for host in replacement.hosts[:hosts]:
            pod = each.pods[replacement.replica * each.hosts + host.host]
            assert host.uid == str(pod.uid)
            pod.leaving = True

    def step(self) -> Plan:
        """One pass of the operator."""
        found = self.plan()
        for replacement in found.replacements:
            self.carry_out(replacement)
        return found

    def run(self, rounds: int = 200) -> int:
        """Until nothing is left to replace and everything serves; the rounds that it took."""
        for number in range(rounds):
            found = self.step()
            if not found.replacements and self.is_done():
                return number
            self.turn()
        raise AssertionError(f"not done after {rounds} rounds: {self.plan().progress}")

    # What a test asks.

    def replicas(self, role: Role) -> Iterator[tuple[State, str | None]]:
        """State and KV of each replica that is wanted."""
        for replica in self.plan().views[role].replicas:
            yield replica.state, replica.kv

    def serving(self, role: Role) -> list[str | None]:
        return [kv for state, kv in self.replicas(role) if state is State.SERVING]

    def pairs(self) -> set[str | None]:
        return set(self.serving("prefill")) & set(self.serving("decode"))

    def is_done(self) -> bool:
        return all(
            pod.revision == each.revision and pod.ready and not pod.leaving
            for each in self.sets.values()
            for pod in each.pods.values()
        ) and all(len(each.pods) == each.replicas * each.hosts for each in self.sets.values())


def _workload(each: SimSet) -> Object:
    return {
        "metadata": {"name": each.name, "namespace": "ns", "generation": 1},
        "spec": {"template": {"metadata": {"labels": {names.KV: each.revision.kv}}}},
        "status": {"observedGeneration": int(each.seen), "updateRevision": each.revision.name},
    }


def _pods(each: SimSet) -> Iterator[Object]:
    for ordinal, pod in each.pods.items():
        meta: Object = {
            "name": f"{each.name}-{ordinal}",
            "namespace": "ns",
            "uid": str(pod.uid),
            "resourceVersion": "1",
            "labels": {"controller-revision-hash": pod.revision.name, names.KV: pod.revision.kv},
        }
        if pod.leaving:
            meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        ready = {
            "type": "Ready",
            "status": "True" if pod.ready else "False",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        containers = [{"name": "engine", "started": pod.started}]
        yield {"metadata": meta, "status": {"conditions": [ready], "containerStatuses": containers}}
