"""One namespace of the cluster, in the words that tests of deployments use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from e2e.controlplane.client import Object
from e2e.controlplane.cluster import PATIENCE, Cluster
from e2e.kube import condition

T = TypeVar("T")

CHILD_KINDS = (
    "ConfigMap",
    "Secret",
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "Service",
    "PodDisruptionBudget",
    "StatefulSet",
    "Deployment",
)


def deployment(name: str = "chat", **spec: Any) -> Object:
    """A small GLM52Deployment; `spec` fields replace the ones here."""
    return {
        "apiVersion": "glm52.dev/v1alpha1",
        "kind": "GLM52Deployment",
        "metadata": {"name": name},
        "spec": {"model": {"preset": "tiny"}, "drain": {"windowSeconds": 5}, **spec},
    }


class Space:
    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def apply(self, *objects: Object) -> Object:
        return self.cluster.apply(
            *({**obj, "metadata": {**obj["metadata"], "namespace": self.name}} for obj in objects), force="true"
        )

    def patch(self, kind: str, name: str, change: Object, subresource: str | None = None) -> Object:
        return self.cluster.patch(kind, self.name, name, change, subresource)

    def edit(self, name: str, **spec: Any) -> Object:
        """Change fields of a deployment's specification; returns it as it then is."""
        return self.patch("GLM52Deployment", name, {"spec": spec})

    def scale(self, name: str, replicas: int) -> Object:
        """As `kubectl scale` and autoscalers do."""
        return self.patch("GLM52Deployment", name, {"spec": {"replicas": replicas}}, "scale")

    def delete(self, kind: str, name: str, cascade: str = "Background") -> None:
        self.cluster.delete(kind, self.name, name, cascade)

    def get(self, kind: str, name: str) -> Object | None:
        """The API server's own answer."""
        return self.cluster.get(kind, self.name, name)

    def seen(self, kind: str, name: str) -> Object | None:
        """What the watches know: costs nothing, for probes."""
        return self.cluster.seen(kind, self.name, name)

    def all_seen(self, kind: str, name: str | None = None) -> list[Object]:
        """Objects of a kind; with `name` those of one deployment."""
        found = self.cluster.all_seen(kind, self.name)
        return [o for o in found if name is None or o["metadata"].get("labels", {}).get("glm52.dev/name") == name]

    def pods(self, name: str, role: str | None = None) -> dict[str, Object]:
        """Pods of a deployment by name."""
        return {
            pod["metadata"]["name"]: pod
            for pod in self.all_seen("Pod", name)
            if role in (None, pod["metadata"]["labels"].get("glm52.dev/role"))
        }

    def children(self, name: str) -> dict[str, Object]:
        """`Kind/name` → object, everything that the operator makes for a deployment."""
        return {f"{kind}/{obj['metadata']['name']}": obj for kind in CHILD_KINDS for obj in self.all_seen(kind, name)}

    def until(
        self,
        what: str,
        probe: Callable[[], T | None],
        timeout: float = PATIENCE,
        last: Callable[[], object] | None = None,
    ) -> T:
        return self.cluster.until(what, probe, timeout, last)

    def condition(self, name: str, kind: str) -> Object:
        """A condition that speaks of the newest specification, or an empty dict."""
        found = self.seen("GLM52Deployment", name)
        current = condition(found, kind)
        fits = found and current.get("observedGeneration") == found["metadata"]["generation"]
        return current if fits else {}

    def until_condition(
        self, name: str, kind: str, *, reason: str | None = None, status: str | None = None, timeout: float = PATIENCE
    ) -> Object:
        """The condition of the newest specification once it has this reason or status."""

        def probe() -> Object | None:
            found = self.condition(name, kind)
            fits = found and reason in (None, found["reason"]) and status in (None, found["status"])
            return found if fits else None

        return self.until(
            f"{kind} of {name} is {status or ''} {reason or ''}".rstrip(),
            probe,
            timeout,
            lambda: (self.seen("GLM52Deployment", name) or {}).get("status"),
        )

    def until_ready(self, name: str, generation: int = 0, timeout: float = PATIENCE) -> Object:
        """The deployment once it is Ready for its newest specification, and at least for `generation`."""

        def probe() -> Object | None:
            found = self.seen("GLM52Deployment", name)
            new = found is not None and found["metadata"]["generation"] >= generation
            return found if new and self.condition(name, "Ready").get("status") == "True" else None

        return self.until(
            f"{name} is Ready", probe, timeout, lambda: (self.seen("GLM52Deployment", name) or {}).get("status")
        )
