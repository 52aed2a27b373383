"""What the operator must be allowed to do, and what of it the API server's own answer says it is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm52_operator import names


@dataclass(frozen=True, slots=True)
class Need:
    """Verbs on one resource (`glm52deployments/status`: with subresource), and what fails without them."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    otherwise: str
    name: str = ""
    """Where a single object is enough."""

    @property
    def shown(self) -> str:
        plural, _, subresource = self.resource.partition("/")
        whole = f"{plural}.{self.group}" if self.group else plural
        return f"{whole}/{subresource}" if subresource else whole


_CHILDREN = (
    ("", ("serviceaccounts", "services")),
    ("apps", ("statefulsets", "deployments")),
    ("policy", ("poddisruptionbudgets",)),
    ("rbac.authorization.k8s.io", ("roles", "rolebindings")),
)

NEEDS: tuple[Need, ...] = (
    Need(names.GROUP, names.PLURAL, ("list", "watch"), "no deployment is served"),
    Need(names.GROUP, f"{names.PLURAL}/status", ("patch",), "no deployment's status is written"),
    Need(
        names.GROUP,
        f"{names.PLURAL}/finalizers",
        ("update",),
        "children are refused where the API server restricts owner references",
    ),
    *(
        Need(
            group,
            resource,
            ("get", "list", "watch", "create", "patch", "delete"),
            f"{resource} of deployments are not kept as they should be",
        )
        for group, resources in _CHILDREN
        for resource in resources
    ),
    Need("", "secrets", ("get", "create"), "a new deployment has no internal token, and its pods do not start"),
    Need("", "pods", ("list", "watch"), "no deployment is served"),
    Need("", "pods", ("delete", "patch"), "pods that cannot serve are not replaced"),
    Need("", "pods/eviction", ("create",), "a rollout does not replace pods that serve"),
    Need("", "events", ("list",), "it is not told why a StatefulSet makes no pods"),
    Need("events.k8s.io", "events", ("create", "patch"), "kubectl describe shows no events of deployments"),
    Need(
        "discovery.k8s.io", "endpointslices", ("get", "list", "watch"), "the routers' role cannot be made: they need it"
    ),
)
"""In each namespace that is served. The chart grants exactly these."""

Rule = Mapping[str, Any]


def missing(rules: Sequence[Rule], needs: Iterable[Need] = NEEDS) -> list[str]:
    """A sentence for each resource on which a verb is missing; `rules` as a SelfSubjectRulesReview lists them."""
    found = []
    for need in needs:
        lacking = [verb for verb in need.verbs if not any(_grants(rule, need, verb) for rule in rules)]
        if lacking:
            verbs = " and ".join(map(repr, lacking))
            found.append(f"the operator's service account lacks the verb {verbs} on {need.shown!r}: {need.otherwise}")
    return found


def _grants(rule: Rule, need: Need, verb: str) -> bool:
    objects = rule.get("resourceNames") or []
    return (
        _in(verb, rule.get("verbs"))
        and _in(need.group, rule.get("apiGroups"))
        and _covers(need.resource, rule.get("resources") or [])
        and (not objects or (bool(need.name) and need.name in objects))
    )


def _in(value: str, allowed: Sequence[str] | None) -> bool:
    return value in (allowed or ()) or "*" in (allowed or ())


def _covers(resource: str, allowed: Sequence[str]) -> bool:
    subresource = resource.partition("/")[2]
    return resource in allowed or "*" in allowed or (bool(subresource) and f"*/{subresource}" in allowed)
