"""What the operator keeps true in the cluster, whoever changes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.controlplane.operator import Process
from e2e.kube import Kubectl, Object, condition, until
from tests.integration.conftest import Install

KINDS = "statefulsets,deployments,services,secrets,poddisruptionbudgets,serviceaccounts,roles,rolebindings"


def deployment(name: str, **spec: Any) -> Object:
    """No pods: these tests are about objects."""
    none = {"replicas": 0}
    return {
        "apiVersion": "glm52.dev/v1alpha1",
        "kind": "GLM52Deployment",
        "metadata": {"name": name},
        "spec": {"model": {"preset": "tiny"}, "prefill": none, "decode": none, "router": none, **spec},
    }


def children(kube: Kubectl, name: str) -> dict[str, Object]:
    return {f"{o['kind']}/{o['metadata']['name']}": o for o in kube.list(KINDS, f"glm52.dev/name={name}")}


def observed(kube: Kubectl, name: str) -> Object | None:
    """The deployment, once the operator has reported on its newest specification."""
    found = kube.get("glm52", name)
    current = found and (found.get("status") or {}).get("observedGeneration") == found["metadata"]["generation"]
    return found if current else None


def reason(kube: Kubectl, name: str, kind: str, wanted: str, timeout: float = 60) -> str:
    """Wait for a condition's reason on the newest specification; returns its message."""

    def probe() -> str | None:
        found = condition(observed(kube, name), kind)
        return str(found["message"]) if found.get("reason") == wanted else None

    message = until(
        f"{kind} of {name} has reason {wanted}", probe, timeout=timeout, last=lambda: kube.get("glm52", name)
    )
    assert message is not None
    return message


def patch(kube: Kubectl, kind: str, name: str, change: Object) -> None:
    kube("patch", kind, name, "--type=merge", "-p", json.dumps(change))


@pytest.fixture(scope="module", autouse=True)
def operator(make_install: Install, kube: Kubectl) -> Process:
    """One for all tests of this file."""
    assert kube.namespace is not None
    return make_install(kube.namespace).start()


@pytest.fixture(scope="module")
def idle(kube: Kubectl) -> str:
    kube.apply(deployment("idle"))
    reason(kube, "idle", "Ready", "ScaledToZero")
    return "idle"


def test_every_child_is_there_and_owned(kube: Kubectl, idle: str) -> None:
    found = children(kube, idle)
    assert set(found) == {
        "Secret/idle-internal",
        "ServiceAccount/idle-router",
        "Role/idle-router",
        "RoleBinding/idle-router",
        "Deployment/idle-router",
        "StatefulSet/idle-prefill",
        "StatefulSet/idle-decode",
        *(f"Service/idle-{suffix}" for suffix in ("prefill", "decode", "router")),
    }
    mine = kube.get("glm52", idle)
    assert mine is not None
    for obj in found.values():
        (owner,) = obj["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (mine["metadata"]["uid"], True)


def test_the_users_object_gets_neither_finalizer_nor_annotation(kube: Kubectl, idle: str) -> None:
    mine = kube.get("glm52", idle)
    assert mine is not None
    assert "finalizers" not in mine["metadata"]
    assert set(mine["metadata"].get("annotations", {})) <= {"kubectl.kubernetes.io/last-applied-configuration"}


@pytest.mark.parametrize(
    ("kind", "name", "change", "seen"),
    [
        pytest.param(
            "service", "idle-decode", {"spec": {"selector": {"glm52.dev/role": "x"}}}, ".spec.selector", id="selector"
        ),
        pytest.param("statefulset", "idle-decode", {"spec": {"replicas": 1}}, ".spec.replicas", id="replicas"),
        pytest.param("role", "idle-router", {"rules": []}, ".rules", id="permissions"),
        pytest.param(
            "service", "idle-router", {"metadata": {"labels": {"glm52.dev/name": None}}}, ".metadata.labels", id="label"
        ),
    ],
)
def test_what_somebody_edits_is_put_back(
    kube: Kubectl, idle: str, kind: str, name: str, change: Object, seen: str
) -> None:
    put_back(kube, kind, name, change, seen)


def put_back(kube: Kubectl, kind: str, name: str, change: Object, seen: str) -> None:
    def value() -> str:
        return kube("get", kind, name, "-o", f"jsonpath={{{seen}}}").stdout

    before = value()
    patch(kube, kind, name, change)
    until(f"{kind} {name} {seen} is {before} again", lambda: value() == before, timeout=30, last=value)


def test_a_budget_comes_with_the_second_pod_and_goes_with_it(kube: Kubectl) -> None:
    kube.apply(deployment("guarded"))
    reason(kube, "guarded", "Progressing", "Complete")
    assert "PodDisruptionBudget/guarded-decode" not in children(kube, "guarded")
    kube("scale", "glm52", "guarded", "--replicas=2")
    until("the budget is there", lambda: kube.get("poddisruptionbudget", "guarded-decode"), timeout=30)
    put_back(kube, "poddisruptionbudget", "guarded-decode", {"spec": {"maxUnavailable": 0}}, ".spec.maxUnavailable")
    kube("scale", "glm52", "guarded", "--replicas=0")
    until("the budget is gone", lambda: not kube.get("poddisruptionbudget", "guarded-decode"), timeout=30)
    kube("delete", "glm52", "guarded")


@pytest.mark.parametrize("child", ["service/idle-decode", "statefulset/idle-prefill"])
def test_what_somebody_deletes_is_made_again(kube: Kubectl, idle: str, child: str) -> None:
    kube("delete", child)
    kind, name = child.split("/")
    until(f"{child} is back", lambda: kube.get(kind, name), timeout=60)


def test_the_secret_survives_every_edit(kube: Kubectl, idle: str) -> None:
    before = kube.get("secret", "idle-internal")
    patch(kube, "glm52", idle, {"spec": {"drain": {"windowSeconds": 31}}})
    reason(kube, idle, "Ready", "ScaledToZero")
    assert kube.get("secret", "idle-internal") == before


def test_the_routers_service_changes_its_type_in_place(kube: Kubectl, idle: str) -> None:
    def service() -> Object:
        found = kube.get("service", "idle-router")
        assert found is not None
        return found["spec"]  # type: ignore[no-any-return]

    patch(kube, "glm52", idle, {"spec": {"router": {"service": {"type": "NodePort", "nodePort": 30899}}}})
    until("node port 30899", lambda: service()["ports"][0].get("nodePort") == 30899, timeout=30, last=service)
    patch(kube, "glm52", idle, {"spec": {"router": {"service": {"type": "ClusterIP", "nodePort": None}}}})
    until("no node port", lambda: service()["type"] == "ClusterIP", timeout=30, last=service)
    assert "nodePort" not in service()["ports"][0]
    assert condition(observed(kube, idle), "Progressing").get("reason") != "Refused"


def test_somebody_elses_object_is_left_alone_and_named(kube: Kubectl) -> None:
    theirs: Object = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "taken-internal"},
        "data": {"theirs": "MQ=="},
    }
    kube.apply(theirs)
    kube.apply(deployment("taken"))
    message = reason(kube, "taken", "Progressing", "NameTaken")
    assert "Secret taken-internal" in message
    found = kube.get("secret", "taken-internal")
    assert found is not None
    assert found["data"] == {"theirs": "MQ=="}
    assert "ownerReferences" not in found["metadata"]
    assert "StatefulSet/taken-decode" not in children(kube, "taken")
    kube("delete", "secret", "taken-internal")
    reason(kube, "taken", "Progressing", "Complete", timeout=90)


def test_a_volume_that_the_server_refuses_is_told_and_can_be_corrected(kube: Kubectl) -> None:
    model = {"path": "/models/x", "volume": {"persistentVolumeClaim": {"claim": "typo"}}}
    kube.apply(deployment("typo", model=model))
    message = reason(kube, "typo", "ConfigValid", "Refused")
    assert "claim" in message
    assert "StatefulSet typo-" in message
    assert condition(observed(kube, "typo"), "Ready")["status"] == "False"
    patch(
        kube,
        "glm52",
        "typo",
        {"spec": {"model": {"volume": {"persistentVolumeClaim": {"claim": None, "claimName": "c"}}}}},
    )
    reason(kube, "typo", "ConfigValid", "Valid", timeout=30)


def test_deletion_leaves_nothing_and_a_namesake_starts_clean(kube: Kubectl) -> None:
    kube.apply(deployment("again"))
    reason(kube, "again", "Progressing", "Complete")
    before = children(kube, "again")
    kube("delete", "glm52", "again", "--wait=false")
    kube.apply(deployment("again"))
    new = until("the namesake is reconciled", lambda: observed(kube, "again"), timeout=90)
    assert new is not None
    reason(kube, "again", "Progressing", "Complete", timeout=90)
    after = children(kube, "again")
    assert set(after) == set(before)
    for name, obj in after.items():
        assert obj["metadata"]["uid"] != before[name]["metadata"]["uid"]
        assert obj["metadata"]["ownerReferences"][0]["uid"] == new["metadata"]["uid"]
    assert after["Secret/again-internal"]["data"] != before["Secret/again-internal"]["data"]
    kube("delete", "glm52", "again")
    until(
        "every child is gone",
        lambda: not children(kube, "again"),
        timeout=60,
        last=lambda: list(children(kube, "again")),
    )


def test_pods_that_a_quota_refuses_are_explained(kube: Kubectl) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    kube.apply(quota)
    try:
        until("the quota counts", lambda: (kube.get("resourcequota", "none") or {}).get("status"), timeout=30)
        kube.apply(deployment("quota", decode={"replicas": 1}, router={"replicas": 1}))
        assert "exceeded quota" in reason(kube, "quota", "DecodeReady", "PodsRefused")
        assert "exceeded quota" in reason(kube, "quota", "RouterReady", "PodsRefused")
    finally:
        kube("delete", "resourcequota", "none")
        kube("delete", "glm52", "quota", "--ignore-not-found")
