"""Pure decisions: resolving, comparing, owning, sorting errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_operator import names
from glm52_operator.desired.children import build
from glm52_operator.desired.target import Target, owner_reference
from glm52_operator.plan.changes import difference, stamp
from glm52_operator.plan.failures import classify
from glm52_operator.plan.ownership import Ownership, ownership
from glm52_operator.plan.quantity import same_quantity
from glm52_operator.plan.resolve import Invalid, resolve
from tests.operator.builders import IMAGE, resource, target


def test_an_image_of_its_own_wins() -> None:
    found = resolve(resource(image="mine:1"), IMAGE)
    assert isinstance(found, Target)
    assert found.image == "mine:1"


@pytest.mark.parametrize(
    ("obj", "image", "reason", "says"),
    [
        pytest.param(resource(), None, "ImageMissing", ["spec.image", "--engine-image"], id="no image"),
        pytest.param(
            resource(decode={"warp": 9}), IMAGE, "InvalidSpec", ["spec.decode.warp", "does not know"], id="newer CRD"
        ),
        pytest.param(
            resource(decode={"replicas": -1}), IMAGE, "InvalidSpec", ["spec.decode.replicas", "-1"], id="older CRD"
        ),
        pytest.param(resource("n" * 41), IMAGE, "NameTooLong", ["metadata.name", "40"], id="long name"),
        pytest.param({**resource(), "spec": {}}, IMAGE, "InvalidSpec", ["spec.model", "must be set"], id="no model"),
    ],
)
def test_what_cannot_work_names_field_and_remedy(obj: Any, image: str | None, reason: str, says: list[str]) -> None:
    found = resolve(obj, image)
    assert isinstance(found, Invalid)
    assert found.reason == reason
    for part in says:
        assert part in found.message


CHILDREN = [stamp(child) for child in build(target())]
IDS = [f"{c['kind']}/{c['metadata']['name']}" for c in CHILDREN]


@pytest.mark.parametrize("child", CHILDREN, ids=IDS)
def test_what_was_applied_is_not_applied_again(child: dict[str, Any]) -> None:
    observed = copy.deepcopy(child)
    observed["metadata"] |= {"resourceVersion": "5", "managedFields": [], "generation": 1}
    observed["status"] = {"replicas": 1}
    assert difference(child, observed) is None


def workload() -> dict[str, Any]:
    return next(c for c in CHILDREN if c["kind"] == "StatefulSet")


def container(obj: dict[str, Any]) -> dict[str, Any]:
    return obj["spec"]["template"]["spec"]["containers"][0]  # type: ignore[no-any-return]


def test_what_others_add_is_theirs() -> None:
    observed = copy.deepcopy(workload())
    spec = observed["spec"]["template"]["spec"]
    spec["containers"].insert(0, {"name": "mesh"})
    spec["dnsPolicy"] = "ClusterFirst"
    container(observed)["env"] = container(workload())["env"]
    observed["metadata"]["labels"]["team"] = "a"
    assert difference(workload(), observed) is None


@pytest.mark.parametrize(
    ("edit", "path"),
    [
        pytest.param(lambda o: o["spec"].update(replicas=9), ".spec.replicas", id="scaled by hand"),
        pytest.param(lambda o: container(o).update(image="evil"), "containers[engine].image", id="other image"),
        pytest.param(lambda o: container(o)["env"].pop(), "env[GLM52_HOLD]", id="variable removed"),
        pytest.param(lambda o: container(o)["args"].append("--x"), "args", id="argument added"),
        pytest.param(lambda o: o["metadata"]["labels"].pop(names.NAME), names.NAME, id="label removed"),
        pytest.param(lambda o: o["metadata"].pop("ownerReferences"), "ownerReferences", id="owner removed"),
        pytest.param(
            lambda o: container(o)["resources"]["limits"].update(memory="5Gi"), "limits.memory", id="more memory"
        ),
        pytest.param(lambda o: container(o).pop("livenessProbe"), "livenessProbe", id="probe removed"),
    ],
)
def test_what_others_change_is_found(edit: Any, path: str) -> None:
    observed = copy.deepcopy(workload())
    edit(observed)
    found = difference(workload(), observed)
    assert found is not None
    assert path in found


def test_a_field_that_is_no_longer_wanted_is_found_by_the_hash() -> None:
    old = target(router={"service": {"type": "NodePort", "nodePort": 30080}})
    new = target(router={"service": {"type": "NodePort"}})

    def service(of: Target) -> dict[str, Any]:
        return next(
            c for c in map(stamp, build(of)) if c["metadata"]["name"] == "chat-router" and c["kind"] == "Service"
        )

    assert names.APPLIED_HASH in str(difference(service(new), service(old)))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2048Mi", "2Gi", True),
        ("0.5", "500m", True),
        (1, "1000m", True),
        ("1.5Gi", "1536Mi", True),
        ("1e3", "1k", True),
        ("1Gi", "1G", False),
        ("abc", "abc", False),
        (True, "1", False),
        ("2Gi", "3Gi", False),
    ],
)
def test_quantities_are_compared_as_amounts(one: object, other: object, same: bool) -> None:
    assert same_quantity(one, other) is same


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_nothing_differs_from_itself(value: dict[str, Any]) -> None:
    assert difference(value, copy.deepcopy(value)) is None


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        pytest.param({"ownerReferences": [owner_reference(target())]}, Ownership.OURS, id="controlled by it"),
        pytest.param(
            {"ownerReferences": [owner_reference(target())], "deletionTimestamp": "x"}, Ownership.LEAVING, id="deleted"
        ),
        pytest.param(
            {"ownerReferences": [{**owner_reference(target()), "uid": "old"}]}, Ownership.LEAVING, id="of a former one"
        ),
        pytest.param(
            {"ownerReferences": [{**owner_reference(target()), "uid": "b", "name": "other"}]},
            Ownership.FOREIGN,
            id="of another deployment",
        ),
        pytest.param(
            {
                "ownerReferences": [
                    {"apiVersion": "apps/v1", "kind": "X", "name": "chat", "uid": "b", "controller": True}
                ]
            },
            Ownership.FOREIGN,
            id="of another kind",
        ),
        pytest.param({}, Ownership.FOREIGN, id="of nobody"),
        pytest.param(
            {"labels": {names.MANAGED_BY: names.MANAGER, names.NAME: "chat"}}, Ownership.OURS, id="our orphan"
        ),
    ],
)
def test_ownership(meta: dict[str, Any], expected: Ownership) -> None:
    assert ownership({"metadata": meta}, target()) is expected


@pytest.mark.parametrize(
    ("code", "text", "reason", "transient", "config"),
    [
        (403, 'pods is forbidden: User "x" cannot patch resource', "Forbidden", False, False),
        (403, "exceeded quota: q, requested: count/statefulsets=1", "QuotaExceeded", False, False),
        (403, "unable to create new content: namespace ns is being terminated", "NamespaceTerminating", True, False),
        (403, "admission webhook denied", "Forbidden", False, False),
        (422, "updates to statefulset spec are forbidden", "ImmutableField", False, True),
        (422, "spec.ports: Invalid value", "Refused", False, True),
        (400, "unknown field", "Refused", False, True),
        (500, ".spec.x: field not declared in schema", "Refused", False, True),
        (500, "etcd is away", "ApiError", True, False),
        (409, "conflict", "ApiError", True, False),
        (503, "overloaded", "ApiError", True, False),
        (0, "connection refused", "ApiUnreachable", True, False),
    ],
)
def test_an_api_error_says_what_was_tried(code: int, text: str, reason: str, transient: bool, config: bool) -> None:
    found = classify(
        code=code, text=text, verb="patch", resource="statefulsets.apps", kind="StatefulSet", name="chat-decode"
    )
    assert (found.reason, found.transient, found.config) == (reason, transient, config)
    assert "cannot patch StatefulSet chat-decode" in found.message
    assert text in found.message


def test_a_missing_permission_names_verb_and_resource() -> None:
    text = 'statefulsets.apps "a" is forbidden: User "op" cannot patch resource "statefulsets"'
    found = classify(code=403, text=text, verb="patch", resource="statefulsets.apps", kind="StatefulSet", name="a")
    assert "'patch' on 'statefulsets.apps'" in found.message
