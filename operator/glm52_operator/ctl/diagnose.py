"""Why is a deployment not Ready? Findings in the order of cause, each with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from glm52_operator import names
from glm52_operator.ctl.phase import phase
from glm52_operator.ctl.snapshot import COMPONENTS, Snapshot
from glm52_operator.plan import pods
from glm52_operator.plan.resolve import Invalid
from glm52_operator.status.compute import CONDITIONS, PASSING
from glm52_operator.status.conditions import Verdict
from glm52_operator.status.pods import diagnose as problem_of
from glm52_operator.status.workloads import judge

_CAUSES: tuple[tuple[str, ...], ...] = (
    ("Deleting", "OperatorSilent", "OperatorBehind", "NotMade"),
    (
        "InvalidSpec",
        "NameTooLong",
        "ImageMissing",
        "ImmutableField",
        "Refused",
        "ConfigRefused",
        "ScaledToZero",
        "Suspended",
        "Paused",
    ),
    ("Forbidden", "QuotaExceeded", "NameTaken", "NamespaceTerminating", "WaitingForDeletion", "PodsRefused"),
    ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable", "ContainerConfigError"),
    ("NoRoom", "Unschedulable", "SchedulingGated"),
    ("StuckTerminating", "CrashLoop", "OutOfMemory", "Wedged", "Crashed", "Evicted"),
    ("Applying", "Starting"),
    ("NotReady", "RollingOut", "Draining"),
)
"""From what explains the rest to what passes by itself once the rest is solved."""

_UNKNOWN_CAUSE = 5
_ROUTER_WAITS = len(_CAUSES)

_DESCRIBE_POD = "kubectl -n {ns} describe pod {pod}"
_PREVIOUS = "kubectl -n {ns} logs {pod} --all-containers --previous"
_LOGS = "kubectl -n {ns} logs {pod} --all-containers --tail=50"

_LOOK = {
    "Deleting": "kubectl -n {ns} get pods -l glm52.dev/name={name}",
    "OperatorSilent": "kubectl -n glm52-system logs deploy/glm52-operator",
    "OperatorBehind": "kubectl -n glm52-system logs deploy/glm52-operator",
    "NotMade": "kubectl -n glm52-system logs deploy/glm52-operator",
    "ConfigRefused": _LOGS,
    "ScaledToZero": "kubectl -n {ns} edit glm52 {name}",
    "Suspended": "kubectl -n {ns} edit glm52 {name}",
    "Paused": "kubectl -n {ns} edit glm52 {name}",
    "PodsRefused": "kubectl -n {ns} get events --field-selector reason=FailedCreate",
    "ImagePullBackOff": _DESCRIBE_POD,
    "ContainerConfigError": _DESCRIBE_POD,
    "NoRoom": "kubectl describe nodes",
    "Unschedulable": "kubectl describe nodes",
    "StuckTerminating": "kubectl -n {ns} get glm52 {name} -o jsonpath='{{.status.drains}}'",
    "CrashLoop": "kubectl -n {ns} get glm52 {name} -o jsonpath='{{.status.crashes}}'",
    "OutOfMemory": _PREVIOUS,
    "Wedged": _PREVIOUS,
    "Crashed": _PREVIOUS,
    "Evicted": _DESCRIBE_POD,
    "Applying": "kubectl -n kube-system get pods",
    "Starting": _LOGS,
    "NotReady": _LOGS,
    "RollingOut": "kubectl -n {ns} get pods -l glm52.dev/name={name} -w",
    "Draining": "kubectl -n {ns} get pods -l glm52.dev/name={name} -w",
}
"""Reason → the command that shows more."""

_LOOK_ELSE = "kubectl -n {ns} describe glm52 {name}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that keeps a deployment from being Ready."""

    part: str
    reason: str
    message: str
    """What is the case, and what to do."""
    command: str
    """What shows more."""
    rank: int


def is_ready(seen: Snapshot) -> bool:
    """Ready in the operator's words about the newest generation, and in the live objects."""
    return seen.said_ready and not diagnose(seen)


def diagnose(seen: Snapshot) -> list[Finding]:
    """Everything found, first causes first; empty for a deployment that serves."""
    found = [*_operator(seen), *_specification(seen), *_nodes(seen)]
    for component in COMPONENTS:
        found += _component(seen, component)
    told = {finding.reason for finding in found}
    found += [finding for finding in _alarms(seen) if finding.reason not in told]
    if not found and not seen.said_ready:
        ready = seen.conditions.get("Ready", {})
        found = [_finding(seen, "operator", ready.get("reason") or "OperatorBehind", _SETTLING)]
    return sorted(found, key=lambda finding: finding.rank)


_SETTLING = (
    "Every part serves, and the operator has not said Ready yet. If this lasts more than a minute, look at its log."
)


def _finding(seen: Snapshot, part: str, reason: str, message: str, pod: str | None = None) -> Finding:
    command = _LOOK.get(reason, _LOOK_ELSE)
    if pod is None and "{pod}" in command:
        command = _LOOK_ELSE
    rank = next((n for n, reasons in enumerate(_CAUSES) if reason in reasons), _UNKNOWN_CAUSE)
    if part == names.ROUTER and reason in PASSING:
        rank = _ROUTER_WAITS
    return Finding(part, reason, message, command.format(ns=seen.namespace, name=seen.name, pod=pod), rank)


def _operator(seen: Snapshot) -> Iterator[Finding]:
    if seen.leaving:
        text = "The deployment is being deleted; its pods finish their requests first. Nothing is made for it any more."
        yield _finding(seen, "deployment", "Deleting", text)
    elif seen.observed_generation is None:
        text = (
            f"There is no status: the operator does not run, or it may not watch namespace {seen.namespace}. Start it, "
            "or add the namespace to the chart's watchNamespaces."
        )
        yield _finding(seen, "operator", "OperatorSilent", text)
    elif seen.observed_generation != seen.generation:
        text = (
            f"The status speaks of generation {seen.observed_generation}, the object is at {seen.generation}: the "
            "operator has not acted on the last edit. If this lasts more than a few seconds, it does not run."
        )
        yield _finding(seen, "operator", "OperatorBehind", text)


def _specification(seen: Snapshot) -> Iterator[Finding]:
    said = seen.conditions.get("ConfigValid", {})
    if isinstance(seen.resolved, Invalid):
        yield _finding(seen, "specification", seen.resolved.reason, seen.resolved.message)
    elif said.get("status") == "False":
        yield _finding(seen, "specification", said["reason"], said["message"])


def _nodes(seen: Snapshot) -> Iterator[Finding]:
    said = seen.conditions.get("Schedulable", {})
    if said.get("status") == "False" and not (seen.leaving or seen.said_ready):
        yield _finding(seen, "nodes", said["reason"], said["message"])


def _alarms(seen: Snapshot) -> Iterator[Finding]:
    for kind in ("Stalled", "Degraded"):
        said = seen.conditions.get(kind, {})
        if said.get("status") == "True" and not (seen.leaving or seen.said_ready):
            yield _finding(seen, "replicas", said["reason"], said["message"])


def _component(seen: Snapshot, component: names.Component) -> list[Finding]:
    found = _pod_problems(seen, component)
    workload = seen.workload(component)
    if found or workload is None or seen.leaving:
        return found
    said = seen.conditions.get(CONDITIONS[component], {})
    verdict = judge(workload)
    if said.get("status") == "False" and said["reason"] not in PASSING and _explains(verdict, said["reason"]):
        # What the API server refused, and a StatefulSet that cannot make pods, only the operator has seen.
        return [_finding(seen, component, said["reason"], said["message"])]
    if verdict.holds:
        return []
    if workload.observed is None:
        text = f"{workload.kind} {workload.name} does not exist. If this lasts, the operator's log says why."
        return [_finding(seen, component, "NotMade", text)]
    waiting = [pod for pod in seen.pods[component] if not pods.is_ready(pod)]
    phases = "; ".join(f"{pods.name(pod)}: {phase(pod, seen.now)}" for pod in waiting)
    text = f"{verdict.message} ({phases})" if phases else verdict.message
    if component == names.ROUTER and verdict.reason in PASSING:
        text += " A router is ready once one prefill and one decode pod are."
    first = pods.name(waiting[0]) if waiting else None
    return [_finding(seen, component, verdict.reason, text, first)]


def _explains(live: Verdict, reason: str) -> bool:
    """Whether the operator's older word says more than the live objects: not where those serve or say it themselves."""
    return not live.holds and live.reason != reason


def _pod_problems(seen: Snapshot, component: names.Component) -> list[Finding]:
    """One finding a reason, however many pods have it."""
    by_reason: dict[str, list[tuple[str, str]]] = {}
    for pod in seen.pods[component]:
        problem = problem_of(pod)
        if problem is not None:
            by_reason.setdefault(problem.reason, []).append((pods.name(pod), problem.message))
    return [_grouped(seen, component, reason, hit) for reason, hit in by_reason.items()]


def _grouped(seen: Snapshot, component: names.Component, reason: str, hit: Sequence[tuple[str, str]]) -> Finding:
    name, message = hit[0]
    others = ", ".join(other for other, _ in hit[1:4]) + (", …" if len(hit) > 4 else "")
    text = f"{message} The same: {others}." if others else message
    return _finding(seen, component, reason, text, name)


def report(seen: Snapshot) -> str:
    """The findings as text."""
    found = diagnose(seen)
    what = f"{names.KIND} {seen.name} in namespace {seen.namespace}"
    if not found:
        return f"{what} is Ready."
    lines = [f"{what} is not Ready. Causes, first things first:"]
    for number, finding in enumerate(found, start=1):
        lines += [f"{number}. {finding.part}: {finding.reason}", f"   {finding.message}", f"   see: {finding.command}"]
    return "\n".join(lines)
