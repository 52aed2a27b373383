"""Objects as the API server would hand them out, for the operator's unit tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from glm52_operator import names
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.resolve import resolve
from glm52_operator.reconcile.kinds import Kind
from glm52_operator.reconcile.store import Key, Store

IMAGE = "engine:test"
UID = "00000000-0000-0000-0000-000000000001"


def resource(name: str = "chat", generation: int = 1, uid: str = UID, **spec: Any) -> Object:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": uid,
            "generation": generation,
            "resourceVersion": "10",
        },
        "spec": {"model": {"preset": "tiny"}, **spec},
    }


def target(name: str = "chat", **spec: Any) -> Target:
    found = resolve(resource(name, **spec), IMAGE)
    assert isinstance(found, Target), found
    return found


def listed(store: Store, kind: Kind, namespace: str | None, objects: Iterable[Object], version: str) -> set[Key]:
    """A list as the operator takes it in; the deployments concerned."""
    with store.listing(kind, namespace) as listing:
        for obj in objects:
            listing.take(obj)
        return listing.end(version)


def pod(
    name: str,
    *,
    role: str = "decode",
    ready: bool = False,
    revision: str = "r1",
    leaving: bool = False,
    deployment: str = "chat",
    node: str | None = None,
    **status: Any,
) -> Object:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}, *status.pop("conditions", [])]
    meta: Object = {
        "name": name,
        "namespace": "ns",
        "uid": f"uid-{name}",
        "labels": {
            **names.selector(deployment, role),  # type: ignore[arg-type]
            "controller-revision-hash": revision,
        },
    }
    if leaving:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    memory = {"memory": "4Gi"}
    containers = [{"name": "engine", "resources": {"requests": {"cpu": "250m", **memory}, "limits": memory}}]
    spec: Object = {"containers": containers}
    if node or ready:
        spec["nodeName"] = node or "worker"
    return {"metadata": meta, "spec": spec, "status": {"conditions": conditions, **status}}


def node(
    name: str,
    memory: str,
    *,
    cpu: str = "8",
    pods: str = "110",
    ready: bool = True,
    cordoned: bool = False,
    taints: list[Object] | None = None,
) -> Object:
    spec: Object = {"podCIDR": "10.244.0.0/24"}
    spec |= {"unschedulable": True} if cordoned else {}
    spec |= {"taints": taints} if taints else {}
    return {
        "metadata": {"name": name, "namespace": "", "labels": {"kubernetes.io/hostname": name}},
        "spec": spec,
        "status": {
            "allocatable": {"memory": memory, "cpu": cpu, "pods": pods},
            "conditions": [
                {"type": "MemoryPressure", "status": "False"},
                {"type": "Ready", "status": "True" if ready else "Unknown"},
            ],
            "images": [{"names": ["large"]}],
        },
    }


def stateful_set(
    replicas: int = 1,
    *,
    ready: int | None = None,
    updated: int | None = None,
    generation: int = 1,
    observed: int | None = None,
    current: str = "r1",
    update: str = "r1",
) -> Object:
    return {
        "metadata": {"name": "chat-decode", "namespace": "ns", "uid": "sts", "generation": generation},
        "status": {
            "observedGeneration": generation if observed is None else observed,
            "replicas": replicas,
            "readyReplicas": replicas if ready is None else ready,
            "updatedReplicas": replicas if updated is None else updated,
            "currentRevision": current,
            "updateRevision": update,
        },
    }


def router(replicas: int = 1, **status: Any) -> Object:
    return {
        "metadata": {"name": "chat-router", "namespace": "ns", "uid": "deploy", "generation": 1},
        "status": {
            "observedGeneration": 1,
            "replicas": replicas,
            "readyReplicas": replicas,
            "updatedReplicas": replicas,
            **status,
        },
    }
