"""A deployment, its roles and their pods as a tree, with what to do next."""

from __future__ import annotations

from glm52_operator import names
from glm52_operator.ctl.diagnose import diagnose
from glm52_operator.ctl.phase import phase, restarts
from glm52_operator.ctl.snapshot import COMPONENTS, Snapshot
from glm52_operator.ctl.text import age, table
from glm52_operator.desired.target import Object
from glm52_operator.plan import pods
from glm52_operator.plan.resolve import Invalid
from glm52_operator.status.compute import CONDITIONS, url
from glm52_operator.status.workloads import judge

_HEAD = ["NAME", "READY", "STATE", "RESTARTS", "NODE", "FOR"]


def tree(seen: Snapshot) -> str:
    """FOR is a condition's time since it last changed, and a pod's age."""
    rows = [_HEAD, _top(seen)]
    for component in COMPONENTS:
        last = component == COMPONENTS[-1]
        rows.append(_role(seen, component, "└─" if last else "├─"))
        members = seen.pods[component]
        for number, pod in enumerate(members, start=1):
            branch = "└─" if number == len(members) else "├─"
            rows.append(_pod(seen, pod, f"{' ' if last else '│'}  {branch}"))
    return "\n".join([*table(rows, indent=""), "", *_others(seen), *_next(seen)])


def _top(seen: Snapshot) -> list[str]:
    ready = seen.conditions.get("Ready", {})
    state = "Deleting" if seen.leaving else ready.get("reason") or "no word of the operator"
    since = age(ready.get("lastTransitionTime"), seen.now)
    return [f"{seen.namespace}/{seen.name}", ready.get("status", "Unknown"), state, "", "", since]


def _role(seen: Snapshot, component: names.Component, branch: str) -> list[str]:
    said = seen.conditions.get(CONDITIONS[component], {})
    workload = seen.workload(component)
    if workload is None:
        return [
            f"{branch} {component}",
            "?",
            said.get("reason", ""),
            "",
            "",
            age(said.get("lastTransitionTime"), seen.now),
        ]
    reason = said.get("reason") or judge(workload).reason
    since = age(said.get("lastTransitionTime"), seen.now)
    return [f"{branch} {component}", f"{workload.ready}/{workload.wanted}", reason, "", "", since]


def _pod(seen: Snapshot, pod: Object, branch: str) -> list[str]:
    ready = "yes" if pods.is_ready(pod) else "no"
    node = pod.get("spec", {}).get("nodeName", "-")
    born = age(pod["metadata"].get("creationTimestamp"), seen.now)
    return [f"{branch} {pods.name(pod)}", ready, phase(pod, seen.now), str(restarts(pod)), node, born]


def _others(seen: Snapshot) -> list[str]:
    """Conditions that no line of the tree shows, where they say something."""
    shown = {"Ready", *CONDITIONS.values()}
    rows = [
        [kind, c["status"], c["reason"], age(c.get("lastTransitionTime"), seen.now)]
        for kind, c in seen.conditions.items()
        if kind not in shown
    ]
    return [*table(rows, indent=""), ""] if rows else []


def _next(seen: Snapshot) -> list[str]:
    found = diagnose(seen)
    if not found:
        where = f" Requests go to {url(seen.resolved)}." if not isinstance(seen.resolved, Invalid) else ""
        return [f"Next: nothing, it serves.{where}"]
    first = found[0]
    more = f" ({len(found) - 1} more: glm52ctl diagnose {seen.name})" if len(found) > 1 else ""
    return [f"Next: {first.part}: {first.reason}: {first.message}{more}", f"      {first.command}"]
