"""What a pod says of itself, read without a clock."""

from __future__ import annotations

from typing import Any

Pod = dict[str, Any]


def name(pod: Pod) -> str:
    return str(pod["metadata"]["name"])


def is_ready(pod: Pod) -> bool:
    return ready_condition(pod).get("status") == "True"


def ready_condition(pod: Pod) -> dict[str, Any]:
    """Empty before the kubelet has said anything."""
    conditions = pod.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == "Ready"), {})


def has_started(pod: Pod) -> bool:
    """The startup probe has passed: what is missing is readiness."""
    containers = pod.get("status", {}).get("containerStatuses", [])
    return bool(containers) and all(container.get("started") for container in containers)


def is_leaving(pod: Pod) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def is_pending(pod: Pod) -> bool:
    """None of its containers has ever run."""
    return bool(pod.get("status", {}).get("phase") == "Pending")
