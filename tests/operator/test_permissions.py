"""Which permissions are missing: each verb by itself is named, with its resource and what fails."""

from __future__ import annotations

from typing import Any

import pytest

from glm52_operator.plan.failures import grant
from glm52_operator.plan.permissions import NEEDS, Need, missing

RULES: list[dict[str, Any]] = [
    {"apiGroups": [need.group], "resources": [need.resource], "verbs": list(need.verbs)} for need in NEEDS
]

EVERY = [(number, need, verb) for number, need in enumerate(NEEDS) for verb in need.verbs]


def test_with_all_of_them_nothing_is_missing() -> None:
    assert missing(RULES) == []


@pytest.mark.parametrize(("number", "need", "verb"), EVERY, ids=[f"{verb} {need.shown}" for _, need, verb in EVERY])
def test_a_verb_that_is_taken_away_is_named_and_nothing_else(number: int, need: Need, verb: str) -> None:
    rules = [{**rule, "verbs": [v for v in rule["verbs"] if n != number or v != verb]} for n, rule in enumerate(RULES)]
    (told,) = missing(rules)
    assert f"the verb {verb!r} on {need.shown!r}: {need.otherwise}" in told


def test_several_verbs_of_a_resource_are_one_sentence() -> None:
    (told,) = missing([], [Need("apps", "statefulsets", ("get", "list"), "x")])
    assert told == "the operator's service account lacks the verb 'get' and 'list' on 'statefulsets.apps': x"


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}, id="everything"),
        pytest.param({"apiGroups": [""], "resources": ["*/eviction"], "verbs": ["create"]}, id="subresource of all"),
        pytest.param({"apiGroups": [""], "resources": ["pods/eviction", "x"], "verbs": ["create"]}, id="itself"),
    ],
)
def test_what_grants_an_eviction(rule: dict[str, Any]) -> None:
    assert missing([rule], [Need("", "pods/eviction", ("create",), "x")]) == []


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param({"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}, id="the resource without it"),
        pytest.param({"apiGroups": ["apps"], "resources": ["pods/eviction"], "verbs": ["create"]}, id="another group"),
        pytest.param(
            {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"], "resourceNames": ["a"]},
            id="a pod",
        ),
        pytest.param({"verbs": ["create"]}, id="a rule without resources"),
    ],
)
def test_what_does_not(rule: dict[str, Any]) -> None:
    assert len(missing([rule], [Need("", "pods/eviction", ("create",), "x")])) == 1


def test_the_verb_that_the_api_server_names_is_the_one_to_grant() -> None:
    """An apply is a patch, and where it creates, `create` is asked for as well."""
    said = 'services "a" is forbidden: User "x" cannot create resource "services" in API group "" in the namespace "n"'
    assert "verb 'create' on 'services'" in grant(said, "patch", "services")
    said = 'x is forbidden: User "x" cannot patch resource "glm52deployments/status" in API group "glm52.dev"'
    assert "verb 'patch' on 'glm52deployments.glm52.dev/status'" in grant(said, "patch", "y")
    assert "verb 'list' on 'pods'" in grant("no", "list", "pods")
