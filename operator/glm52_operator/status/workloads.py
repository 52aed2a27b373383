"""Is a role, or the router, serving what was asked for? Counts alone do not say so: generation and revision do too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from glm52_operator.desired.target import Object
from glm52_operator.plan.failures import Failure
from glm52_operator.plan.pods import has_started, is_leaving, is_ready, name
from glm52_operator.plan.rollout import REVISION, Progress, RoleView, State
from glm52_operator.status.conditions import Verdict
from glm52_operator.status.pods import worst


@dataclass(frozen=True, slots=True)
class Workload:
    """One StatefulSet or Deployment as wanted and as observed."""

    kind: str
    name: str
    title: str
    wanted: int
    """Replicas."""
    observed: Object | None
    pods: Sequence[Object]
    failures: Sequence[Failure] = field(default=())
    """What the API server refused of the objects that this workload needs."""
    events: Sequence[str] = field(default=())
    """Why its controller could not make pods."""
    view: RoleView | None = None
    """Its pods as replicas; a router has none, its pods are its replicas."""
    progress: Progress | None = None
    """How far its rollout is."""
    paused: bool = False
    suspended: bool = False

    def count(self, which: str) -> int:
        """Of pods, as its controller counts them."""
        return int((self.observed or {}).get("status", {}).get(which, 0))

    @property
    def exist(self) -> int:
        """Whole replicas that exist."""
        return self.count("replicas") // self.hosts

    @property
    def ready(self) -> int:
        if self.view is None or self.hosts == 1:
            return self.count("readyReplicas")
        return sum(replica.state is State.SERVING for replica in self.view.replicas)

    @property
    def updated(self) -> int:
        """Replicas of the newest revision; none while our last change was refused or not yet seen by the controller."""
        if not self.seen or self.failures:
            return 0
        return self.count("updatedReplicas") if self.progress is None or self.hosts == 1 else self.progress.newest

    @property
    def hosts(self) -> int:
        """Pods of one replica."""
        return self.view.hosts if self.view is not None else 1

    @property
    def seen(self) -> bool:
        """Whether the controller has acted on what we applied last; its counts speak about something older before."""
        if self.observed is None:
            return False
        generation = int(self.observed["metadata"].get("generation", 0))
        return self.count("observedGeneration") >= generation

    @property
    def one_revision(self) -> bool:
        """Whether every pod is of the newest revision.

        A StatefulSet whose pods are not updated by its controller never moves currentRevision: the pods are asked.
        """
        revision = (self.observed or {}).get("status", {}).get("updateRevision")
        if self.kind != "StatefulSet":
            return True
        return all(pod["metadata"].get("labels", {}).get(REVISION) == revision for pod in self.pods)


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
    problem = worst(workload.pods)
    if problem is not None:
        return Verdict(False, problem.reason, f"{counts}. {problem.message}")
    moving = _moving(workload, counts)
    if moving is not None:
        return moving
    if workload.suspended:
        return Verdict(False, "Suspended", "Nothing runs, since suspend is true. Set it to false to serve again.")
    if workload.wanted == 0:
        text = f"0 {workload.title} are wanted: no request can be served. Scale up to serve."
        return Verdict(False, "ScaledToZero", text)
    return Verdict(True, "AllReady", f"{counts}, all on the newest revision.")


def _moving(workload: Workload, counts: str) -> Verdict | None:
    """The states that pass by themselves, if nothing is wrong."""
    leaving = sorted(name(pod) for pod in workload.pods if is_leaving(pod))
    if workload.exist < workload.wanted and workload.events:
        return Verdict(
            False,
            "PodsRefused",
            f"{counts}. {workload.kind} {workload.name} cannot make its pods: {workload.events[-1]}",
        )
    if not workload.one_revision or workload.updated < workload.wanted <= workload.exist:
        return _rolling(workload, counts)
    if leaving or workload.exist > workload.wanted:
        names = f" ({', '.join(leaving)})" if leaving else ""
        return Verdict(False, "Draining", f"{counts}. Pods that leave finish their requests first{names}.")
    if workload.ready != workload.wanted or workload.exist < workload.wanted:
        waiting = sorted((pod for pod in workload.pods if not is_ready(pod)), key=name)
        started = ", ".join(name(pod) for pod in waiting if has_started(pod))
        if started:
            text = f"Pods run, and their readiness probe says no: {started}. See kubectl logs for what they wait for."
            return Verdict(False, "NotReady", f"{counts}. {text}")
        names = f": {', '.join(map(name, waiting))}" if waiting else ""
        return Verdict(False, "Starting", f"{counts}. Pods are starting{names}. See kubectl logs for how far they are.")
    return None


def _rolling(workload: Workload, counts: str) -> Verdict:
    newest = f"{min(workload.updated, workload.wanted)}/{workload.wanted} are of the newest revision"
    progress = workload.progress
    if workload.paused:
        text = f"{newest}; the others stay until rollout.paused is false. A pod that goes comes back as the newest."
        return Verdict(False, "Paused", f"{counts}. {text}")
    if progress is None or not progress.outdated:
        last = f": {progress.absent}" if progress is not None and progress.absent else ""
        return Verdict(False, "RollingOut", f"{counts}. {newest}, the others are being replaced{last}.")
    next_one = progress.outdated[0]
    waits = f"{next_one} is next and waits: {progress.waits.rstrip('.')}" if progress.waits else f"{next_one} is next"
    return Verdict(False, "RollingOut", f"{counts}. {newest}. {waits}.")
