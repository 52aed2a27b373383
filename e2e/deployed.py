"""One deployment as a test sees and edits it; waits end at a deadline with what was seen last."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from e2e.kube import Failed, Kubectl, Object, condition, until, wait_ready

READY_SECONDS = 600
"""For a rollout of everything on a machine that does other things as well."""


@dataclass(frozen=True)
class Deployed:
    """A GLM52Deployment by its name, and kubectl in its namespace."""

    kube: Kubectl
    name: str

    def edit(self, **spec: Any) -> None:
        """A merge patch of the specification; None takes a field away."""
        self.kube("patch", "glm52", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def resource(self) -> Object | None:
        return self.kube.get("glm52", self.name)

    def status(self) -> Any:
        """Empty while there is none."""
        return (self.resource() or {}).get("status") or {}

    def condition(self, kind: str) -> Object:
        """One condition, or an empty dict."""
        return condition(self.resource(), kind)

    def pods(self, role: str = "") -> dict[str, Object]:
        """Pods by name, those that leave included."""
        selector = f"glm52.dev/name={self.name}" + (f",glm52.dev/role={role}" if role else "")
        return {pod["metadata"]["name"]: pod for pod in self.kube.list("pods", selector)}

    def uids(self, role: str = "") -> dict[str, str]:
        return {name: pod["metadata"]["uid"] for name, pod in self.pods(role).items()}

    def pod(self, name: str) -> Object:
        found = self.kube.get("pod", name)
        if found is None:
            raise Failed(f"there is no pod {name}")
        return found

    def told(self, reason: str) -> list[str]:
        """Notes of the events about the deployment that have this reason."""
        events = self.kube.list("events.events.k8s.io")
        return [e.get("note", "") for e in events if e["regarding"].get("name") == self.name and e["reason"] == reason]

    def outcomes(self, uids: Iterable[str]) -> set[str]:
        """How the drains of these pods ended, as far as status.drains still has them."""
        wanted = set(uids)
        return {d["outcome"] for d in self.status().get("drains", []) if d["uid"] in wanted and d["phase"] == "Ended"}

    def wait(self, timeout: float = READY_SECONDS) -> None:
        """Until it is Ready, as `kubectl wait` says."""
        wait_ready(self.kube, self.name, round(timeout))

    def wait_status(self, what: str, holds: Callable[[Any], object], timeout: float = 120) -> Any:
        """The first status for which that holds."""

        def look() -> Any:
            found = self.status()
            return found if holds(found) else None

        return until(what, look, timeout=timeout, last=self.status)

    def wait_condition(self, kind: str, *, timeout: float = 120, **wanted: str) -> Object:
        """The condition, once it has these fields, for example reason="NoRoom"."""

        def look() -> Object:
            found = self.condition(kind)
            return found if wanted.items() <= found.items() else {}

        return until(f"{kind} has {wanted}", look, timeout=timeout, last=self.status)

    def wait_told(self, reason: str, about: str, timeout: float = 60) -> None:
        """Until an event has this reason and names that in its note."""
        until(
            f"an event {reason} about {about}",
            lambda: any(about in note for note in self.told(reason)),
            timeout=timeout,
            last=lambda: self.told(reason),
        )

    def drained(self, uid: str, timeout: float = 120) -> Object:
        """The entry of a pod in status.drains, once it has ended."""

        def ended() -> Object | None:
            drains = self.status().get("drains", [])
            return next((d for d in drains if d["uid"] == uid and d["phase"] == "Ended"), None)

        found = until(f"the drain of {uid} has ended", ended, timeout=timeout, last=lambda: self.status().get("drains"))
        assert found is not None
        return found


def is_ready(pod: Object) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
