"""The kinds that the operator reads and writes, and their addresses in the API."""

from __future__ import annotations

from dataclasses import dataclass

from glm52_operator import names


@dataclass(frozen=True, slots=True)
class Kind:
    group: str
    version: str
    kind: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """The way RBAC names it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str | None, name: str | None = None) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if namespace is not None else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name is not None else "")


DEPLOYMENT_RESOURCE = Kind(names.GROUP, names.VERSION, names.KIND, names.PLURAL)
POD = Kind("", "v1", "Pod", "pods")
NODE = Kind("", "v1", "Node", "nodes")
SECRET = Kind("", "v1", "Secret", "secrets")
EVENT = Kind("", "v1", "Event", "events")
"""Read: why a controller made no pods."""
EVENT_V1 = Kind("events.k8s.io", "v1", "Event", "events")
"""Written."""
REVIEW = Kind("authorization.k8s.io", "v1", "SelfSubjectRulesReview", "selfsubjectrulesreviews")
"""A question, though it is asked by a create."""
BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")

CHILDREN: tuple[Kind, ...] = (
    Kind("", "v1", "ServiceAccount", "serviceaccounts"),
    Kind("rbac.authorization.k8s.io", "v1", "Role", "roles"),
    Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings"),
    Kind("", "v1", "Service", "services"),
    Kind("apps", "v1", "StatefulSet", "statefulsets"),
    Kind("apps", "v1", "Deployment", "deployments"),
    BUDGET,
)
"""Kinds that are applied and pruned."""

WATCHED: tuple[Kind, ...] = (DEPLOYMENT_RESOURCE, *CHILDREN, POD)

BY_KIND: dict[str, Kind] = {kind.kind: kind for kind in (*WATCHED, SECRET)}
