"""How far a pod is, in a few words."""

from __future__ import annotations

import datetime
from typing import Any

from glm52_operator.ctl.text import age
from glm52_operator.desired.target import Object
from glm52_operator.plan import pods
from glm52_operator.status.pods import diagnose


def phase(pod: Object, now: datetime.datetime) -> str:
    """What a pod does now, with the time that a start has taken and may take."""
    if pods.is_leaving(pod):
        return "leaves: finishes its requests first"
    problem = diagnose(pod)
    if problem is not None:
        return problem.reason
    if pods.is_ready(pod):
        return "ready"
    if not pod.get("spec", {}).get("nodeName"):
        return "waits for the scheduler"
    status = pod.get("status", {})
    for container in status.get("initContainerStatuses", []):
        if running := container.get("state", {}).get("running"):
            return f"{container['name']} runs for {age(running.get('startedAt'), now)}"
    if pods.has_started(pod):
        return "started, readiness probe says no"
    for container in status.get("containerStatuses", []):
        if (running := container.get("state", {}).get("running")) is not None:
            return f"starts for {age(running.get('startedAt'), now)}{_budget(pod)}"
    return "containers are being made (image, volumes)"


def _budget(pod: Object) -> str:
    """After which time the kubelet restarts a container that has not started."""
    containers = pod.get("spec", {}).get("containers", [])
    probe = containers[0].get("startupProbe", {}) if containers else {}
    seconds = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
    return f" of at most {seconds}s" if probe else ""


def restarts(pod: Object) -> int:
    status: dict[str, Any] = pod.get("status", {})
    every = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    return sum(container.get("restartCount", 0) for container in every)
