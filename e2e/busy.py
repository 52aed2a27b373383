"""The deployment that is kept busy while things are done to it: two of everything, so that one may be missing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from e2e.kube import Kubectl, Object, until
from e2e.manifests import deployment
from e2e.traffic import Answer, Failure

NAME = "busy"
PORT = 30083
READY_SECONDS = 600
"""For a rollout of everything on a machine that does other things as well."""


def manifest() -> Object:
    return deployment(
        NAME,
        prefill={"replicas": 2},
        decode={"replicas": 2},
        router={"replicas": 2, "service": {"type": "NodePort", "nodePort": PORT}},
        drain={"windowSeconds": 20},
        crashPolicy={"backoffBaseSeconds": 1, "backoffMaxSeconds": 5},
    )


def edit(kube: Kubectl, **spec: Any) -> None:
    """A merge patch of the specification; None takes a field away."""
    kube("patch", "glm52", NAME, "--type=merge", "-p", json.dumps({"spec": spec}))


def status(kube: Kubectl) -> Any:
    """The deployment's status; empty while there is none."""
    return (kube.get("glm52", NAME) or {}).get("status") or {}


def pods(kube: Kubectl, role: str = "") -> dict[str, Object]:
    """Pods by name, those that leave included."""
    selector = f"glm52.dev/name={NAME}" + (f",glm52.dev/role={role}" if role else "")
    return {pod["metadata"]["name"]: pod for pod in kube.list("pods", selector)}


def uids(kube: Kubectl, role: str = "") -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in pods(kube, role).items()}


def pod(kube: Kubectl, name: str) -> Object:
    found = kube.get("pod", name)
    assert found is not None, f"there is no pod {name}"
    return found


def is_ready(each: Object) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in each["status"].get("conditions", []))


def told(kube: Kubectl, reason: str) -> list[str]:
    """Notes of the events about the deployment that have this reason."""
    events = kube.list("events.events.k8s.io")
    return [e.get("note", "") for e in events if e["regarding"].get("name") == NAME and e["reason"] == reason]


def wait_told(kube: Kubectl, reason: str, about: str, timeout: float = 60) -> None:
    """Until an event has this reason and names that in its note."""
    until(
        f"an event {reason} about {about}",
        lambda: any(about in note for note in told(kube, reason)),
        timeout=timeout,
        last=lambda: told(kube, reason),
    )


def drained(kube: Kubectl, uid: str, timeout: float = 120) -> Object:
    """The entry of a pod in status.drains, once it has ended."""

    def ended() -> Object | None:
        return next((d for d in status(kube).get("drains", []) if d["uid"] == uid and d["phase"] == "Ended"), None)

    found = until(f"the drain of {uid} has ended", ended, timeout=timeout, last=lambda: status(kube).get("drains"))
    assert found is not None
    return found


def legs_of(kube: Kubectl, answers: Iterable[Answer]) -> dict[str, list[str]]:
    """Request id → what the routers logged of the legs that failed under it."""
    wanted = {answer.id for answer in answers}
    found: dict[str, list[str]] = {number: [] for number in wanted}
    for router in pods(kube, "router"):
        for line in kube("logs", router, "--tail=-1").stdout.splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("request_id") in wanted and entry.get("level") == "WARNING":
                found[entry["request_id"]].append(line)
    return found


def blamed_on(kube: Kubectl, victim: Object, failed: list[Answer]) -> None:
    """Fails unless every failed request ran on that pod, and failed as a client can understand."""
    address = f"//{victim['status']['podIP']}:"
    legs = legs_of(kube, failed)
    for answer in failed:
        assert answer.failure is not Failure.WRONG, f"{answer.id}: {answer.error}"
        assert any(address in line for line in legs[answer.id]), f"{answer.id}: {answer.error}; {legs[answer.id]}"
