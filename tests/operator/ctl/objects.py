"""Sets of objects as a cluster shows them, for the tests of what the tool says about them."""

from __future__ import annotations

import datetime
from typing import Any

from glm52_operator import names
from glm52_operator.ctl.snapshot import COMPONENTS, Snapshot, snapshot
from glm52_operator.desired.target import Object
from tests.operator.builders import pod, resource, router, stateful_set

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
BEFORE = "2026-01-02T03:01:05Z"


def condition(kind: str, status: str, reason: str, message: str = "") -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": BEFORE,
        "observedGeneration": 1,
    }


SERVING = [
    condition("ConfigValid", "True", "Valid"),
    condition("PrefillReady", "True", "AllReady"),
    condition("DecodeReady", "True", "AllReady"),
    condition("RouterReady", "True", "AllReady"),
    condition("Progressing", "False", "Complete"),
    condition("Ready", "True", "Serving"),
]
NOT_READY = [*SERVING[:-1], condition("Ready", "False", "Starting")]


def ready_pod(component: str, **changes: Any) -> Object:
    return pod(f"chat-{component}-0", role=component, ready=True, **changes)


def seen(
    *changed: Object, conditions: list[Object] | None = None, workloads: dict[str, Any] | None = None, **top: Any
) -> Snapshot:
    """A deployment that serves, with the pods of `changed` in place of the ready ones of their role."""
    said = {"observedGeneration": 1, "conditions": SERVING if conditions is None else conditions}
    deployment = {**resource(), "status": said, **top}
    roles = {obj["metadata"]["labels"][names.ROLE] for obj in changed}
    pods = [*changed, *(ready_pod(component) for component in COMPONENTS if component not in roles)]
    ready = {c: int(c not in roles) for c in COMPONENTS}
    each: dict[Any, Any] = {
        "prefill": stateful_set(ready=ready["prefill"]),
        "decode": stateful_set(ready=ready["decode"]),
        "router": router(readyReplicas=ready["router"]),
        **(workloads or {}),
    }
    return snapshot(deployment, each, pods, now=NOW)


def container(name: str = "engine", /, **state: Any) -> dict[str, Any]:
    return {"name": name, "image": "engine:test", "ready": False, "restartCount": 0, **state}


def waiting(reason: str, restarts: int = 0, /, **last: Any) -> dict[str, Any]:
    more = {"lastState": {"terminated": last}} if last else {}
    return container(state={"waiting": {"reason": reason}}, **more) | {"restartCount": restarts}
