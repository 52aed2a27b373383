"""PodDisruptionBudgets: a node drain takes one pod of a role at a time."""

from __future__ import annotations

from glm52_operator import names
from glm52_operator.desired.target import Object, Target, child, role_labels


def build_budget(target: Target, component: names.Component) -> Object:
    return child(
        target,
        "policy/v1",
        "PodDisruptionBudget",
        names.role(target.name, component),
        role_labels(target, component),
        spec={
            "maxUnavailable": 1,
            # Without it a pod that never gets ready blocks the drain of its node for ever.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": names.selector(target.name, component)},
        },
    )
