"""The router's identity: it may watch the EndpointSlices of its namespace and nothing else."""

from __future__ import annotations

from glm52_operator import names
from glm52_operator.desired.target import Object, Target, child, role_labels

RBAC = "rbac.authorization.k8s.io"


def build_service_account(target: Target) -> Object:
    return child(
        target,
        "v1",
        "ServiceAccount",
        names.role(target.name, "router"),
        role_labels(target, "router"),
        # The router's pods ask for the token themselves; any other pod that names the account gets none.
        automountServiceAccountToken=False,
    )


def build_role(target: Target) -> Object:
    return child(
        target,
        f"{RBAC}/v1",
        "Role",
        names.role(target.name, "router"),
        role_labels(target, "router"),
        rules=[
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
        ],
    )


def build_role_binding(target: Target) -> Object:
    name = names.role(target.name, "router")
    return child(
        target,
        f"{RBAC}/v1",
        "RoleBinding",
        name,
        role_labels(target, "router"),
        roleRef={"apiGroup": RBAC, "kind": "Role", "name": name},
        subjects=[{"kind": "ServiceAccount", "name": name, "namespace": target.namespace}],
    )
