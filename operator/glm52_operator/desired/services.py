"""Services: one for the traffic of each role (ready pods only), one for the names of several hosts, one of routers."""

from __future__ import annotations

from glm52_engine.config import API_PORT, Role
from glm52_operator import names
from glm52_operator.desired.target import Object, Target, child, role_labels

_PORT: Object = {"name": "http", "port": API_PORT, "protocol": "TCP", "targetPort": "http"}


def build_role_service(target: Target, role: Role) -> Object:
    """The router's source of engine pods; headless, since the router picks pods itself."""
    return child(
        target,
        "v1",
        "Service",
        names.role(target.name, role),
        role_labels(target, role),
        spec={"clusterIP": "None", "selector": names.selector(target.name, role), "ports": [dict(_PORT)]},
    )


def build_hosts_services(target: Target) -> list[Object]:
    """For roles whose replicas have several hosts; nobody asks for the name of a single one."""
    return [_hosts_service(target, role) for role in names.ROLES if target.hosts(role) > 1]


def _hosts_service(target: Target, role: Role) -> Object:
    """Governs the StatefulSet: pods find each other before they are ready."""
    return child(
        target,
        "v1",
        "Service",
        names.hosts(target.name, role),
        role_labels(target, role),
        spec={
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector(target.name, role),
            "ports": [dict(_PORT)],
        },
    )


def build_router_service(target: Target) -> Object:
    service = target.spec.router.service
    port = dict(_PORT)
    if service.node_port is not None:
        port["nodePort"] = service.node_port
    return child(
        target,
        "v1",
        "Service",
        names.role(target.name, "router"),
        role_labels(target, "router"),
        spec={"type": service.type, "selector": names.selector(target.name, "router"), "ports": [port]},
    )
