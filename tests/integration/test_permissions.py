"""The chart's permissions are enough; each verb that is missing is named, and nothing is silent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from e2e.controlplane.client import Object
from e2e.controlplane.operator import Process, render
from e2e.controlplane.programs import Programs
from e2e.controlplane.space import Space, deployment
from e2e.controlplane.standin import Kubelets, Life
from glm52_operator.plan.permissions import NEEDS, missing
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


def grants(rules: Sequence[Object]) -> list[tuple[str, str]]:
    """Verb and resource of everything that rules grant."""
    return [(verb, resource) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]]


def test_each_verb_that_the_api_server_says_is_missing_is_named_by_itself(space: Space, binaries: Programs) -> None:
    """As the operator asks at its start; every one that the chart grants is taken away in turn."""
    values = ("rbac.clusterWide=false", f"watchNamespaces={{{space.name}}}", "crd.install=false")
    objects = render(binaries, "sys", *values)
    (chart,) = (obj for obj in objects if obj["kind"] == "Role" and obj["metadata"]["namespace"] == space.name)
    users = {f"lacks-{number}": lacking for number, lacking in enumerate(grants(chart["rules"]))}
    for user, lacking in users.items():
        role = {**chart, "metadata": {"name": user}, "rules": [dict(rule) for rule in chart["rules"]]}
        without(*lacking)([role])
        space.apply(role, bound_to(user))

    def told(user: str) -> list[str]:
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": space.name},
        }
        where = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        return missing(space.cluster.request("POST", where, body, user=user)["status"]["resourceRules"])

    assert len(users) > 50
    for user, (verb, resource) in users.items():
        # The API server has its permissions from a watch of its own.
        space.until(f"one verb of {user} is missing", lambda user=user: len(told(user)) == 1)  # type: ignore[misc]
        (sentence,) = told(user)
        assert _names(sentence, verb, resource), (verb, resource, sentence)


def bound_to(user: str) -> Object:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": user},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": user},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }


def test_an_operator_that_may_do_nothing_names_every_verb(space: Space, install: Install) -> None:
    def nothing(objects: list[Object]) -> None:
        for obj in objects:
            if obj["kind"] == "ClusterRole":
                obj["rules"] = []

    process = install(space.name, edit=nothing).start(ready=False)
    every = [(verb, need.resource) for need in NEEDS for verb in need.verbs]

    process.until("it names them all", lambda: all(_tells(process, *each) for each in every))
    assert process.status("/readyz") == 503
    assert process.status("/healthz") == 200


def test_each_verb_on_the_lease_that_is_missing_is_named(space: Space, install: Install) -> None:
    """`watch` is for those who wait."""
    verbs = ("create", "get", "update")
    alone = {verb: install(space.name, edit=without(verb, "leases")).start(ready=False) for verb in verbs}
    watched = install(space.name, edit=without("watch", "leases"))
    watched.start()
    waiting = {"watch": watched.start(ready=False)}
    for verb, process in (alone | waiting).items():
        process.until(f"{verb} is named", partial(_tells, process, verb, "leases"))


def test_without_permission_to_read_nodes_it_is_unknown_whether_there_is_room(
    space: Space, install: Install, kubelets: Kubelets
) -> None:
    kubelets.live(Life(bound=False), space.name)
    install(space.name, cluster_wide=False).start()
    space.apply(deployment("chat"))
    said = space.until_condition("chat", "Schedulable", status="Unknown", reason="Forbidden")
    assert "the verb 'list' on 'nodes' and 'pods' by a ClusterRole" in said["message"]


TOGETHER = [
    pytest.param([("create", "services"), ("patch", "statefulsets"), ("delete", "roles")], id="children"),
    pytest.param([("patch", "glm52deployments/status"), ("create", "events")], id="what is told"),
    pytest.param([("create", "secrets"), ("list", "nodes")], id="secrets and nodes"),
    pytest.param([("list", "services"), ("list", "statefulsets")], id="lists"),
    pytest.param([("watch", "pods")], id="a watch"),
    pytest.param([("list", "endpointslices")], id="what is handed on"),
]
"""Verbs whose lack does not hide that of another one, for an operator that really lacks them and goes on."""


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


def _tells(process: Process, verb: str, resource: str) -> bool:
    return any(_names(line, verb, resource) for line in process.text().splitlines())


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
