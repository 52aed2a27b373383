"""The whole status of one deployment."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from glm52_engine.config import API_PORT, Role
from glm52_engine.sizing import gib
from glm52_operator import names
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.failures import Failure
from glm52_operator.plan.resolve import Invalid
from glm52_operator.plan.rollout import Plan, leaders, plan_for
from glm52_operator.status.conditions import Verdict, merge
from glm52_operator.status.ends import Ends
from glm52_operator.status.schedulable import UNOBSERVED
from glm52_operator.status.workloads import Workload, judge

_TITLES: dict[names.Component, str] = {"prefill": "prefill replicas", "decode": "decode replicas", "router": "routers"}
CONDITIONS: dict[names.Component, str] = {"prefill": "PrefillReady", "decode": "DecodeReady", "router": "RouterReady"}
_QUIET = {"AllReady", "ScaledToZero"}
PASSING = {"Applying", "Starting", "NotReady", "RollingOut", "Draining"}
"""Reasons that pass by themselves, if nothing is wrong."""
CHOSEN = {"Paused", "Suspended"}
"""Reasons that somebody wants."""
_BUDGETS = "PodDisruptionBudget"


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything about one deployment's children that its status is made of."""

    workloads: Mapping[names.Component, Object | None]
    pods: Mapping[names.Component, Sequence[Object]]
    failures: Sequence[Failure] = field(default=())
    events: Mapping[names.Component, Sequence[str]] = field(default_factory=dict)
    schedulable: Verdict = UNOBSERVED
    held: Mapping[Role, str] = field(default_factory=dict)
    """Role → why the API server lets none of its pods go now."""


def compute(
    resource: Object,
    resolved: Target | Invalid,
    observed: Observed,
    ends: Ends | None = None,
    *,
    now: datetime.datetime,
) -> dict[str, Any]:
    """The status to write; equal to what stands there when nothing changed. `ends`: None where nobody looked."""
    generation = int(resource["metadata"].get("generation", 1))
    previous = resource.get("status", {})
    parts = {} if isinstance(resolved, Invalid) else workloads(resolved, observed)
    verdicts = (
        _unresolved(resolved, previous) if isinstance(resolved, Invalid) else _verdicts(resolved, observed, parts)
    )
    if ends is not None:
        verdicts = {**verdicts, **ends.verdicts()}
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "conditions": merge(verdicts, previous.get("conditions", []), generation=generation, now=now),
    }
    if isinstance(resolved, Invalid):
        # Children are left as they are, and so is what is said about them.
        kept = ("url", "upToDate", "hostRam", "prefill", "decode", "drains", "crashes", "restarts")
        return {**status, **{key: previous[key] for key in kept if key in previous}}
    status["url"] = url(resolved)
    status["upToDate"] = _up_to_date(parts.values())
    status["hostRam"] = ", ".join(f"{role} {gib(resolved.memory(role).per_host)}" for role in names.ROLES)
    for role in names.ROLES:
        status[role] = _role_status(resolved, role, parts[role])
    return {**status, **(ends.fields() if ends is not None else {})}


def url(target: Target) -> str:
    return f"http://{names.role(target.name, 'router')}.{target.namespace}.svc:{API_PORT}"


def is_settled(status: Mapping[str, Any]) -> bool:
    """Nothing moves and nothing is wrong: only an event can change that."""
    ready = next((c for c in status["conditions"] if c["type"] == "Ready"), None)
    return ready is not None and (ready["status"] == "True" or ready["reason"] in ("Suspended", "ScaledToZero"))


def workloads(target: Target, observed: Observed) -> dict[names.Component, Workload]:
    """The parts of the deployment, ready to be judged."""
    rollout = plan_for(target, observed.workloads, observed.pods)
    progress = {
        role: replace(found, waits=observed.held[role]) if role in observed.held else found
        for role, found in rollout.progress.items()
    }
    rollout = replace(rollout, progress=progress)
    return {component: _workload(component, target, observed, rollout) for component in _TITLES}


def _workload(component: names.Component, target: Target, observed: Observed, rollout: Plan) -> Workload:
    found = observed.workloads.get(component)
    role: Role | None = None if component == "router" else component
    return Workload(
        kind="Deployment" if component == "router" else "StatefulSet",
        name=names.role(target.name, component),
        title=_TITLES[component],
        wanted=target.replicas(component),
        observed=found,
        pods=observed.pods.get(component, ()),
        failures=[failure for failure in observed.failures if _concerns(failure, component, target.name)],
        events=[*observed.events.get(component, ()), *_replica_failures(found)],
        view=rollout.views[role] if role else None,
        progress=rollout.progress[role] if role else None,
        paused=target.spec.rollout.paused,
        suspended=target.spec.suspend,
    )


def _replica_failures(workload: Object | None) -> list[str]:
    """A Deployment says by itself why it cannot make pods; of a StatefulSet only its events tell."""
    conditions = (workload or {}).get("status", {}).get("conditions", [])
    return [c.get("message", "") for c in conditions if c["type"] == "ReplicaFailure" and c["status"] == "True"]


def _concerns(failure: Failure, component: names.Component, name: str) -> bool:
    """Whether a refused object keeps this workload from serving; budgets keep none, shared objects keep all."""
    if failure.kind == _BUDGETS:
        return False
    shared = failure.name in (names.internal_secret(name), name)
    own = failure.name == names.role(name, component) or (
        component != "router" and failure.name == names.hosts(name, component)
    )
    return shared or own


def _verdicts(target: Target, observed: Observed, parts: Mapping[names.Component, Workload]) -> dict[str, Verdict]:
    roles = {CONDITIONS[c]: judge(part) for c, part in parts.items()}
    refused = next((failure for failure in observed.failures if failure.config), None)
    config = (
        Verdict(True, "Valid", "The specification can be applied.")
        if refused is None
        else Verdict(False, refused.reason, refused.message)
    )
    verdicts = {"ConfigValid": config, **roles}
    unmet = [verdict for verdict in verdicts.values() if not verdict.holds]
    failed = min(unmet, key=_urgency, default=None)
    ready = (
        Verdict(True, "Serving", f"Serving {target.spec.model.name} at {url(target)}.")
        if failed is None
        else Verdict(False, failed.reason, failed.message)
    )
    # No part of Ready: pods that run need no room.
    aspects = {"Schedulable": observed.schedulable, "Progressing": _progressing(roles, observed.failures)}
    return {**verdicts, **aspects, "Ready": ready}


def _urgency(verdict: Verdict) -> int:
    """What a person has to solve comes before what passes by itself, and what is wanted so comes last."""
    return 2 if verdict.reason == "Suspended" else int(verdict.reason in PASSING)


def _progressing(roles: Mapping[str, Verdict], failures: Sequence[Failure]) -> Verdict:
    if failures:
        return Verdict(False, failures[0].reason, failures[0].message)
    stuck = next((v for v in roles.values() if v.reason not in _QUIET | PASSING | CHOSEN), None)
    if stuck is not None:
        return Verdict(False, stuck.reason, f"Waits for this to be solved: {stuck.message}")
    moving = next((v for v in roles.values() if v.reason in PASSING), None)
    if moving is not None:
        return Verdict(True, moving.reason, moving.message)
    paused = next((v for v in roles.values() if v.reason in CHOSEN), None)
    if paused is not None:
        return Verdict(False, paused.reason, paused.message)
    return Verdict(False, "Complete", "Everything is as specified.")


def _unresolved(invalid: Invalid, previous: Mapping[str, Any]) -> dict[str, Verdict]:
    running = ", ".join(
        f"{role} {previous[role]['ready']}" for role in names.ROLES if previous.get(role, {}).get("ready")
    )
    left = f"Pods of the last valid specification are left as they are ({running})." if running else "Nothing was made."
    unknown = Verdict(None, "ConfigInvalid", f"Not looked at while ConfigValid is False. {left}")
    return {
        "ConfigValid": Verdict(False, invalid.reason, invalid.message),
        **dict.fromkeys((*CONDITIONS.values(), "Schedulable"), unknown),
        "Progressing": Verdict(False, invalid.reason, invalid.message),
        "Ready": Verdict(False, invalid.reason, invalid.message),
    }


def _up_to_date(workloads: Any) -> str:
    each = list(workloads)
    return f"{sum(min(w.updated, w.wanted) for w in each)}/{sum(w.wanted for w in each)}"


def _role_status(target: Target, role: Role, workload: Workload) -> dict[str, Any]:
    memory = target.memory(role)
    return {
        "replicas": workload.exist,
        "readyReplicas": workload.ready,
        "updatedReplicas": workload.updated,
        "selector": leaders(target, role),
        "ready": f"{workload.ready}/{workload.wanted}",
        "memory": {
            "perHost": gib(memory.per_host),
            "hostPools": gib(memory.host_pools),
            **({"store": gib(memory.store)} if memory.store else {}),
            "weights": gib(memory.weights),
            "sharedMemory": gib(memory.shared_memory),
            "overhead": gib(memory.overhead),
            "explanation": memory.explain(),
        },
    }
