"""The chart's permissions are enough; each verb that is missing is named, and nothing is silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.controlplane.client import Object
from e2e.controlplane.operator import render
from e2e.controlplane.programs import Programs
from e2e.controlplane.space import Space, deployment
from glm52_operator.plan.permissions import NEEDS
from tests.integration.conftest import Install


def without(verb: str, resource: str) -> Callable[[list[Object]], None]:
    """The chart's objects with one verb on one resource taken away; `leases` or `pods/eviction`, as in RBAC."""

    def edit(objects: list[Object]) -> None:
        found = False
        for obj in objects:
            rules = []
            for rule in obj.get("rules", []):
                if resource in rule["resources"] and verb in rule["verbs"]:
                    found = True
                    rest = [each for each in rule["resources"] if each != resource]
                    less = [each for each in rule["verbs"] if each != verb]
                    rules += [{**rule, "resources": rest}] if rest else []
                    rules += [{**rule, "resources": [resource], "verbs": less}] if less else []
                else:
                    rules.append(rule)
            if "rules" in obj:
                obj["rules"] = rules
        assert found, f"the chart does not grant {verb} on {resource}"

    return edit


def test_namespaced_permissions_are_enough(space: Space, install: Install) -> None:
    process = install(space.name, cluster_wide=False).start()
    space.apply(deployment("chat"))
    space.until_ready("chat")
    space.until_ready("chat", space.edit("chat", decode={"replicas": 2})["metadata"]["generation"])
    space.delete("GLM52Deployment", "chat")
    space.until("nothing of it is left", lambda: not space.children("chat"))
    assert "lacks the verb" not in process.text()


TOGETHER = [
    pytest.param([("create", "services"), ("patch", "statefulsets"), ("delete", "roles")], id="children"),
    pytest.param([("patch", "glm52deployments/status"), ("create", "events")], id="what is told"),
    pytest.param([("create", "secrets"), ("list", "nodes")], id="secrets and nodes"),
    pytest.param([("list", "services"), ("list", "statefulsets")], id="lists"),
    pytest.param([("watch", "pods")], id="a watch"),
    pytest.param([("list", "endpointslices")], id="what is handed on"),
    pytest.param([("update", "leases")], id="the lease"),
]
"""Verbs whose lack does not hide that of another one. That each single one is named is a unit test's matter; this is
about an operator that really lacks them."""


@pytest.mark.parametrize("lacking", TOGETHER)
def test_verbs_that_are_missing_are_named(space: Space, install: Install, lacking: list[tuple[str, str]]) -> None:
    def edit(objects: list[Object]) -> None:
        for verb, resource in lacking:
            without(verb, resource)(objects)

    installed = install(space.name, edit=edit)
    process = installed.start(ready=False)
    space.apply(deployment("chat"))

    def told() -> bool:
        lines = said(space, process.text()).splitlines()
        return all(any(_names(line, verb, resource) for line in lines) for verb, resource in lacking)

    try:
        # The end of the process is an answer, too, if its last words are good.
        process.until(f"{lacking} are named", lambda: told() or not process.running())
    finally:
        assert told(), process.text()[-3000:]


def _names(line: str, verb: str, resource: str) -> bool:
    plural = resource.split("/")[0]
    return (repr(verb) in line or f'"{verb}"' in line) and plural in line


def said(space: Space, log: str) -> str:
    """Everything that somebody who looks for the reason can see: conditions, events, the operator's log."""
    found = space.seen("GLM52Deployment", "chat") or {}
    conditions = (found.get("status") or {}).get("conditions") or []
    events = [str(event.get("note")) for event in space.all_seen("Event")]
    return "\n".join([*(str(c.get("message")) for c in conditions), *events, log])


def test_the_chart_grants_what_is_needed_and_no_more(binaries: Programs) -> None:
    (role,) = (obj for obj in render(binaries, "sys", "crd.install=false") if obj["kind"] == "ClusterRole")
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    needed = {(need.group, need.resource, verb) for need in NEEDS for verb in need.verbs}
    # How much room the nodes have is told where it may be.
    assert granted == needed | {("", "nodes", "list")}
