"""All children of one deployment, in the order in which they are applied."""

from __future__ import annotations

from glm52_operator import names
from glm52_operator.desired.access import build_role, build_role_binding, build_service_account
from glm52_operator.desired.budgets import build_budgets
from glm52_operator.desired.engines import build_stateful_set
from glm52_operator.desired.router import build_router
from glm52_operator.desired.services import build_hosts_services, build_role_service, build_router_service
from glm52_operator.desired.store import build_store
from glm52_operator.desired.target import Object, Target


def build(target: Target) -> list[Object]:
    """What pods mount and run as stands before them; the internal Secret is not here, since it is never applied."""
    return [*_before(target), *build_engines(target), *_after(target)]


def build_engines(target: Target) -> list[Object]:
    """The StatefulSets alone."""
    return [build_stateful_set(target, role) for role in names.ROLES]


def build_others(target: Target) -> list[Object]:
    """All but the StatefulSets."""
    return [*_before(target), *_after(target)]


def _before(target: Target) -> list[Object]:
    return [
        build_service_account(target),
        build_role(target),
        build_role_binding(target),
        *build_hosts_services(target),
        *(build_role_service(target, role) for role in names.ROLES),
        build_router_service(target),
        *build_store(target),
    ]


def _after(target: Target) -> list[Object]:
    return [build_router(target), *build_budgets(target)]
