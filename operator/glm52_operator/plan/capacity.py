"""Room on the nodes: where could the pods that have no node yet run, and what is short where they could not?

The arithmetic is the scheduler's: requests of pods that are not finished count against what a node has allocatable. Our
pods select no nodes and have no affinity that a node could fail, so neither is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from glm52_operator import names
from glm52_operator.desired.engines import build_stateful_set
from glm52_operator.desired.router import build_router
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.quantity import parse_quantity

Amounts = Mapping[str, Decimal]
"""Resource name → amount in its base unit: bytes, cores, pods."""

PODS = "pods"
MEMORY = "memory"
_NONE = Decimal(0)
_FINISHED = {"Succeeded", "Failed"}
_KEEPS_OUT = {"NoSchedule", "NoExecute"}
_COMPONENTS: tuple[names.Component, ...] = (*names.ROLES, names.ROUTER)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes with what is free on them; summed up once, since many deployments ask about one list of pods."""

    nodes: Sequence[Object]
    free: Mapping[str, Amounts]
    """Node → allocatable minus requested."""
    placed: Mapping[str, tuple[str, Amounts]]
    """uid of a pod → its node and its requests."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one pod of a component asks a node for."""

    requests: Amounts
    tolerations: Sequence[Object] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """One component's pods: those that keep their node, and how many need one."""

    component: names.Component
    requests: Amounts
    tolerations: Sequence[Object]
    held: Sequence[Object]
    own: frozenset[str]
    """uids of all its pods."""
    missing: int
    memory: str = ""
    """The sum behind the memory request, written out; none for routers, and where no pod is missing."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why one node cannot take a pod."""

    node: str
    why: Literal["notReady", "cordoned", "taint", "short"]
    what: str = ""
    """The taint's key, or the resource that is short."""
    free: Decimal = _NONE


@dataclass(frozen=True, slots=True)
class Fit:
    """Where the missing pods of one component could run now."""

    demand: Demand
    nodes: int
    fitting: int
    """Nodes that can hold one pod."""
    room: int
    """Pods that all these nodes hold, if no other component took any of it."""
    placed: int
    """Missing pods that have a place when all components are placed."""
    obstacles: Sequence[Obstacle]


def survey(nodes: Sequence[Object], pods: Iterable[Object]) -> Cluster:
    """Sum up all nodes and all pods, whole or as `slim_node` and `slim_pod` leave them."""
    placed = {
        _uid(pod): (_node_of(pod), pod_requests(pod["spec"])) for pod in pods if _node_of(pod) and not _is_finished(pod)
    }
    free = {_name(node): _amounts(node.get("status", {}).get("allocatable")) for node in nodes}
    for node, requests in placed.values():
        _take(free, node, requests)
    return Cluster(nodes, free, placed)


def needs(workloads: Mapping[names.Component, Object]) -> dict[names.Component, Need]:
    """What a pod of each StatefulSet or Deployment asks for."""
    specs = {component: workload["spec"]["template"]["spec"] for component, workload in workloads.items()}
    return {
        component: Need(pod_requests(spec), tuple(spec.get("tolerations", ()))) for component, spec in specs.items()
    }


def demands(
    target: Target,
    pods: Mapping[names.Component, Sequence[Object]],
    needed: Mapping[names.Component, Need] | None = None,
) -> list[Demand]:
    """What the target needs beyond the nodes that its pods have already. `needed`: where it was worked out before."""
    if needed is None:
        built: dict[names.Component, Object] = {role: build_stateful_set(target, role) for role in names.ROLES}
        needed = needs({**built, names.ROUTER: build_router(target)})
    return [_demand(target, component, needed[component], pods.get(component, ())) for component in _COMPONENTS]


def _demand(target: Target, component: names.Component, need: Need, pods: Sequence[Object]) -> Demand:
    requests = need.requests
    alive = [pod for pod in pods if not _is_finished(pod) and "deletionTimestamp" not in pod["metadata"]]
    held = [pod for pod in alive if _node_of(pod) and _covers(pod_requests(pod["spec"]), requests)]
    # A rolling update of routers makes one more than is wanted.
    waiting = sum(1 for pod in alive if not _node_of(pod))
    missing = max(target.pods(component) - len(held), waiting, 0)
    return Demand(
        component=component,
        requests=requests,
        tolerations=need.tolerations,
        held=held,
        own=frozenset(_uid(pod) for pod in pods),
        missing=missing,
        memory=target.memory(component).explain() if missing and component != names.ROUTER else "",
    )


def fits(demanded: Sequence[Demand], cluster: Cluster) -> list[Fit]:
    """One Fit for each component that misses pods.

    Pods of the deployment that leave, or that an update replaces by larger ones, count as room for their successors.
    """
    free = _free_for(demanded, cluster)
    left = {node: dict(amounts) for node, amounts in free.items()}
    found = [_fit(demand, cluster.nodes, free) for demand in demanded if demand.missing]
    # The largest first, and into the fullest node that takes it: what is small finds room in what is left.
    placed = {
        demand.component: _place(demand, cluster.nodes, left)
        for demand in sorted(demanded, key=lambda demand: demand.requests.get(MEMORY, _NONE), reverse=True)
        if demand.missing
    }
    return [
        Fit(fit.demand, fit.nodes, fit.fitting, fit.room, placed[fit.demand.component], fit.obstacles) for fit in found
    ]


def _fit(demand: Demand, nodes: Sequence[Object], free: Mapping[str, Amounts]) -> Fit:
    obstacles, counts = [], []
    for node in nodes:
        obstacle = _obstacle(demand, node, free[_name(node)])
        if obstacle is None:
            counts.append(_count(demand.requests, free[_name(node)]))
        else:
            obstacles.append(obstacle)
    return Fit(demand, len(nodes), len(counts), sum(counts), 0, obstacles)


def _place(demand: Demand, nodes: Sequence[Object], left: dict[str, dict[str, Decimal]]) -> int:
    """Put as many of the missing pods as fit on the nodes; what they take is gone from `left`."""
    missing = demand.missing
    for node in sorted(nodes, key=lambda node: (left[_name(node)].get(MEMORY, _NONE), _name(node))):
        free = left[_name(node)]
        if missing and _obstacle(demand, node, free) is None:
            taken = min(missing, _count(demand.requests, free))
            for resource, amount in demand.requests.items():
                free[resource] -= taken * amount
            missing -= taken
    return demand.missing - missing


def _obstacle(demand: Demand, node: Object, free: Amounts) -> Obstacle | None:
    name, spec = _name(node), node.get("spec", {})
    conditions = node.get("status", {}).get("conditions", [])
    if not any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
        return Obstacle(name, "notReady")
    if spec.get("unschedulable"):
        return Obstacle(name, "cordoned")
    for taint in spec.get("taints") or ():
        if taint.get("effect") in _KEEPS_OUT and not any(_tolerates(one, taint) for one in demand.tolerations):
            return Obstacle(name, "taint", str(taint["key"]))
    # Memory is what our pods are large in: it is named where several things are short.
    for resource in sorted(demand.requests, key=lambda resource: (resource != MEMORY, resource)):
        have = free.get(resource, _NONE)
        if have < demand.requests[resource]:
            return Obstacle(name, "short", resource, max(have, _NONE))
    return None


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return bool(toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""))


def _count(requests: Amounts, free: Amounts) -> int:
    return min(int(free.get(resource, _NONE) // amount) for resource, amount in requests.items())


def _covers(has: Amounts, wanted: Amounts) -> bool:
    return all(has.get(resource, _NONE) >= amount for resource, amount in wanted.items())


def _free_for(demanded: Sequence[Demand], cluster: Cluster) -> dict[str, dict[str, Decimal]]:
    """What is free for this deployment: its pods count as they are known now, and only those that keep their node."""
    free = {node: dict(amounts) for node, amounts in cluster.free.items()}
    for demand in demanded:
        for uid in demand.own & cluster.placed.keys():
            _take(free, *cluster.placed[uid], sign=-1)
        for pod in demand.held:
            _take(free, _node_of(pod), pod_requests(pod["spec"]))
    return free


def _take(free: Mapping[str, dict[str, Decimal]], node: str, requests: Amounts, *, sign: int = 1) -> None:
    """Count a pod against its node, if that is among the nodes."""
    if node in free:
        for resource, amount in requests.items():
            free[node][resource] = free[node].get(resource, _NONE) - sign * amount


def pod_requests(spec: Object) -> dict[str, Decimal]:
    """What a pod asks a node for; only what is more than nothing, and itself as one of the node's pods.

    Init containers run one after the other before the rest, except those that are restarted always: they stay.
    """
    running: dict[str, Decimal] = {}
    peak: dict[str, Decimal] = {}
    for container in spec.get("initContainers") or ():
        asked = _requests(container)
        if container.get("restartPolicy") == "Always":
            running = _sum(running, asked)
            asked = {}
        peak = _most(peak, _sum(running, asked))
    for container in spec.get("containers") or ():
        running = _sum(running, _requests(container))
    # Requests of the pod as a whole replace those of its containers.
    total = {**_most(peak, running), **_requests(spec)}
    total = _sum(total, _amounts(spec.get("overhead")))
    return {**{resource: amount for resource, amount in total.items() if amount > 0}, PODS: Decimal(1)}


def _requests(holder: Object) -> dict[str, Decimal]:
    return _amounts((holder.get("resources") or {}).get("requests"))


def _amounts(quantities: Mapping[str, Any] | None) -> dict[str, Decimal]:
    return {resource: parse_quantity(value) or _NONE for resource, value in (quantities or {}).items()}


def _sum(one: Amounts, other: Amounts) -> dict[str, Decimal]:
    return {key: one.get(key, _NONE) + other.get(key, _NONE) for key in {**one, **other}}


def _most(one: Amounts, other: Amounts) -> dict[str, Decimal]:
    return {key: max(one.get(key, _NONE), other.get(key, _NONE)) for key in {**one, **other}}


def _name(node: Object) -> str:
    return str(node["metadata"]["name"])


def _uid(pod: Object) -> str:
    return str(pod["metadata"].get("uid", ""))


def _node_of(pod: Object) -> str:
    return str(pod["spec"].get("nodeName") or "")


def _is_finished(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in _FINISHED


def slim_node(node: Object) -> Object:
    """What is read here of a node; its list of images alone is larger than that."""
    spec, status = node.get("spec", {}), node.get("status", {})
    return {
        "metadata": {"name": node["metadata"]["name"]},
        "spec": {key: spec[key] for key in ("unschedulable", "taints") if key in spec},
        "status": {
            "allocatable": status.get("allocatable", {}),
            "conditions": [c for c in status.get("conditions", []) if c["type"] == "Ready"],
        },
    }


def slim_pod(pod: Object) -> Object:
    """What is read here of a pod: a cluster has many, and they are kept for some seconds."""
    spec = pod["spec"]
    kept = {key: spec[key] for key in ("nodeName", "overhead", "resources") if key in spec}
    for group in ("initContainers", "containers"):
        kept[group] = [
            {key: container[key] for key in ("resources", "restartPolicy") if key in container}
            for container in spec.get(group) or ()
        ]
    return {
        "metadata": {"uid": pod["metadata"].get("uid", "")},
        "spec": kept,
        "status": {"phase": pod.get("status", {}).get("phase", "")},
    }
