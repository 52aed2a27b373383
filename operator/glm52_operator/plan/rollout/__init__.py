"""Rollouts: which replicas are replaced next, decided from what the cluster shows and from nothing else."""

from glm52_operator.plan.rollout.planner import Plan, Policy, Progress, Replacement, plan, plan_for
from glm52_operator.plan.rollout.preview import preview
from glm52_operator.plan.rollout.replicas import REVISION, Host, Replica, RoleView, State, leaders, view

__all__ = [
    "REVISION",
    "Host",
    "Plan",
    "Policy",
    "Progress",
    "Replacement",
    "Replica",
    "RoleView",
    "State",
    "leaders",
    "plan",
    "plan_for",
    "preview",
    "view",
]
