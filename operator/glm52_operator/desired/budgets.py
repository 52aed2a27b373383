"""PodDisruptionBudgets: a node drain and a rollout together take no more of a role than a rollout alone may."""

from __future__ import annotations

from glm52_operator import names
from glm52_operator.desired.target import Object, Target, child, role_labels


def build_budgets(target: Target) -> list[Object]:
    """For components of more pods than may be missing: of the others a budget would let every pod go."""
    components: tuple[names.Component, ...] = (*names.ROLES, names.ROUTER)
    return [_budget(target, each) for each in components if target.pods(each) > target.disruptable(each)]


def _budget(target: Target, component: names.Component) -> Object:
    return child(
        target,
        "policy/v1",
        "PodDisruptionBudget",
        names.role(target.name, component),
        role_labels(target, component),
        spec={
            "maxUnavailable": target.disruptable(component),
            # Without it a pod that never gets ready blocks the drain of its node for ever.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": names.selector(target.name, component)},
        },
    )
