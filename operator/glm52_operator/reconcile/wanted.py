"""What a specification asks for, worked out once for all the passes that follow one edit.

An edit brings a handful of passes within a second: its own, and one for each answer of a controller or a pod. Only the
deployments that were looked at last are kept: all of them would be most of the operator's memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from glm52_operator import names
from glm52_operator.desired.children import build_engines, build_others
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.capacity import Need, needs
from glm52_operator.plan.changes import stamp
from glm52_operator.plan.resolve import Invalid, resolve

KEPT = 16


class Wanted:
    """The children of one target, stamped; each part is built when it is asked for. Nobody alters them."""

    def __init__(self, target: Target) -> None:
        self.target = target

    @cached_property
    def engines(self) -> Sequence[Object]:
        """The StatefulSets, which are applied before the rest is even built: a scale waits for nothing else."""
        return [stamp(child) for child in build_engines(self.target)]

    @cached_property
    def others(self) -> Sequence[Object]:
        return [stamp(child) for child in build_others(self.target)]

    @cached_property
    def needs(self) -> dict[names.Component, Need]:
        workloads = {child["metadata"]["name"]: child for child in (*self.engines, *self.others) if _has_pods(child)}
        roles: tuple[names.Component, ...] = (*names.ROLES, names.ROUTER)
        return needs({role: workloads[names.role(self.target.name, role)] for role in roles})


def _has_pods(child: Object) -> bool:
    return child["kind"] in ("StatefulSet", "Deployment")


@dataclass(slots=True)
class Resolver:
    """Reads specifications; one that was read lately is not read again."""

    default_image: str | None
    _recent: OrderedDict[str, tuple[Object, Wanted]] = field(default_factory=OrderedDict)
    """uid → its specification and what it asks for."""

    def resolve(self, resource: Object) -> Wanted | Invalid:
        uid, spec = resource["metadata"]["uid"], resource.get("spec", {})
        known = self._recent.get(uid)
        if known is not None and known[0] == spec:
            self._recent.move_to_end(uid)
            return known[1]
        found = resolve(resource, self.default_image)
        if isinstance(found, Invalid):
            self._recent.pop(uid, None)
            return found
        wanted = Wanted(found)
        self._recent[uid] = (spec, wanted)
        while len(self._recent) > KEPT:
            self._recent.popitem(last=False)
        return wanted

    def forget(self, uid: str) -> None:
        self._recent.pop(uid, None)
