"""Which children that are wanted no longer are still used by what runs."""

from __future__ import annotations

from collections.abc import Iterable

from glm52_operator import names
from glm52_operator.desired.target import Object, Target


def is_used(child: Object, target: Target, pods: Iterable[Object]) -> bool:
    """Hosts of a replica find each other by a Service; those of an older revision do so until the last one leaves."""
    meta = child["metadata"]
    roles = [role for role in names.ROLES if meta["name"] == names.hosts(target.name, role)]
    if child["kind"] != "Service" or not roles:
        return False
    return any(pod["metadata"]["labels"].get(names.ROLE) in roles and _has_others(pod) for pod in pods)


def _has_others(pod: Object) -> bool:
    """Whether the pod is one of several hosts: it was started with their number."""
    return any("--hosts" in (container.get("args") or ()) for container in pod["spec"].get("containers") or ())
