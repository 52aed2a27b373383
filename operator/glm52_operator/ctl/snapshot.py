"""One deployment and what belongs to it, as observed at one moment."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from glm52_operator import names
from glm52_operator.ctl import shape
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.resolve import Invalid, resolve
from glm52_operator.status.compute import Observed, workloads
from glm52_operator.status.workloads import Workload

COMPONENTS: tuple[names.Component, ...] = (*names.ROLES, names.ROUTER)

_SOME_IMAGE = "the operator's"
"""Which image a deployment without one gets only its operator knows, and no decision here depends on it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Objects in the shape that `shape` gives them."""

    resource: Object
    resolved: Target | Invalid
    workloads: Mapping[names.Component, Object | None]
    pods: Mapping[names.Component, list[Object]]
    now: datetime.datetime
    conditions: Mapping[str, Object] = field(default_factory=dict)
    """What the operator said of the newest generation; empty where it said nothing of it yet."""

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.resource["metadata"]["namespace"])

    @property
    def leaving(self) -> bool:
        return "deletionTimestamp" in self.resource["metadata"]

    @property
    def generation(self) -> int:
        return int(self.resource["metadata"].get("generation", 1))

    @property
    def observed_generation(self) -> int | None:
        """The generation that the operator acted on last."""
        return self.resource.get("status", {}).get("observedGeneration")  # type: ignore[no-any-return]

    @property
    def said_ready(self) -> bool:
        return self.conditions.get("Ready", {}).get("status") == "True"

    def workload(self, component: names.Component) -> Workload | None:
        """What the operator's own status is made of; None for a specification that it cannot read."""
        if isinstance(self.resolved, Invalid):
            return None
        return workloads(self.resolved, Observed(self.workloads, self.pods))[component]


def snapshot(
    resource: object,
    workloads: Mapping[names.Component, object],
    pods: Iterable[object],
    *,
    now: datetime.datetime,
) -> Snapshot:
    """Observed objects, whatever they hold, as a Snapshot."""
    found = shape.deployment(resource)
    by_role: dict[names.Component, list[Object]] = {component: [] for component in COMPONENTS}
    for pod in map(shape.pod, pods):
        role = pod["metadata"]["labels"].get(names.ROLE)
        if role in by_role:
            by_role[role].append(pod)
    for members in by_role.values():
        members.sort(key=lambda pod: pod["metadata"]["name"])
    said = found.get("status", {})
    newest = said.get("observedGeneration") == found["metadata"].get("generation", 1)
    return Snapshot(
        resource=found,
        resolved=resolve(found, _SOME_IMAGE),
        workloads={
            component: None if observed is None else shape.workload(observed)
            for component, observed in ((c, workloads.get(c)) for c in COMPONENTS)
        },
        pods=by_role,
        now=now,
        conditions={c["type"]: c for c in said.get("conditions", [])} if newest else {},
    )
