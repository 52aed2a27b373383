"""Is a role, or the router, serving what was asked for? Counts alone do not say so: generation and revision do too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from glm52_operator.desired.target import Object
from glm52_operator.plan.failures import Failure
from glm52_operator.status import pods
from glm52_operator.status.conditions import Verdict

REVISION_LABEL = {"StatefulSet": "controller-revision-hash"}


@dataclass(frozen=True, slots=True)
class Workload:
    """One StatefulSet or Deployment as wanted and as observed."""

    kind: str
    name: str
    title: str
    wanted: int
    observed: Object | None
    pods: Sequence[Object]
    failures: Sequence[Failure] = field(default=())
    """What the API server refused of the objects that this workload needs."""
    events: Sequence[str] = field(default=())
    """Why its controller could not make pods."""

    def count(self, which: str) -> int:
        return int((self.observed or {}).get("status", {}).get(which, 0))

    @property
    def ready(self) -> int:
        return self.count("readyReplicas")

    @property
    def updated(self) -> int:
        """Pods of the newest revision; none while our last change was refused or not yet seen by the controller."""
        return self.count("updatedReplicas") if self.seen and not self.failures else 0

    @property
    def seen(self) -> bool:
        """Whether the controller has acted on what we applied last; its counts speak about something older before."""
        if self.observed is None:
            return False
        generation = int(self.observed["metadata"].get("generation", 0))
        return self.count("observedGeneration") >= generation

    @property
    def one_revision(self) -> bool:
        status = (self.observed or {}).get("status", {})
        if self.kind != "StatefulSet":
            return True
        revision = status.get("updateRevision")
        if revision != status.get("currentRevision"):
            return False
        label = REVISION_LABEL[self.kind]
        return all(pod["metadata"].get("labels", {}).get(label) == revision for pod in self.pods)


def judge(workload: Workload) -> Verdict:
    """The condition of one workload."""
    counts = f"{workload.ready}/{workload.wanted} {workload.title} ready"
    if workload.failures:
        first = workload.failures[0]
        return Verdict(False, first.reason, f"{counts}. {first.message}")
    if not workload.seen:
        return Verdict(
            False,
            "Applying",
            f"{counts}. {workload.kind} {workload.name} was applied and its controller has not acted on it yet. If "
            "this lasts, "
            "look at kube-controller-manager.",
        )
    problem = pods.worst(workload.pods)
    if problem is not None:
        return Verdict(False, problem.reason, f"{counts}. {problem.message}")
    moving = _moving(workload, counts)
    if moving is not None:
        return moving
    if workload.wanted == 0:
        text = f"0 {workload.title} are wanted: no request can be served. Scale up to serve."
        return Verdict(False, "ScaledToZero", text)
    return Verdict(True, "AllReady", f"{counts}, all on the newest revision.")


def _moving(workload: Workload, counts: str) -> Verdict | None:
    """The states that pass by themselves, if nothing is wrong."""
    exist = workload.count("replicas")
    leaving = sorted(pods.name(pod) for pod in workload.pods if pods.is_leaving(pod))
    if exist < workload.wanted and workload.events:
        return Verdict(
            False,
            "PodsRefused",
            f"{counts}. {workload.kind} {workload.name} cannot make its pods: {workload.events[-1]}",
        )
    if not workload.one_revision or workload.updated < workload.wanted <= exist:
        newest = f"{workload.updated}/{workload.wanted} are of the newest revision, the others are replaced one by one"
        return Verdict(False, "RollingOut", f"{counts}. {newest}.")
    if leaving or exist > workload.wanted:
        names = f" ({', '.join(leaving)})" if leaving else ""
        return Verdict(False, "Draining", f"{counts}. Pods that leave finish their requests first{names}.")
    if workload.ready < workload.wanted or exist < workload.wanted:
        waiting = sorted((pod for pod in workload.pods if not pods.is_ready(pod)), key=pods.name)
        started = ", ".join(pods.name(pod) for pod in waiting if pods.has_started(pod))
        if started:
            text = f"Pods run, and their readiness probe says no: {started}. See kubectl logs for what they wait for."
            return Verdict(False, "NotReady", f"{counts}. {text}")
        names = f": {', '.join(map(pods.name, waiting))}" if waiting else ""
        return Verdict(False, "Starting", f"{counts}. Pods are starting{names}. See kubectl logs for how far they are.")
    return None
