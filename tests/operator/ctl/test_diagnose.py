"""Why a deployment is not Ready, from recorded sets of objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.config import Hold, Outcome, Termination
from glm52_operator import names
from glm52_operator.ctl.diagnose import diagnose, is_ready, report
from glm52_operator.ctl.snapshot import COMPONENTS, Snapshot, snapshot
from glm52_operator.ctl.tree import tree
from tests.operator.builders import pod, resource, router, stateful_set
from tests.operator.ctl.objects import NOT_READY, NOW, SERVING, condition, container, ready_pod, seen, waiting

UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient memory.",
}
REFUSED = Termination(
    outcome=Outcome.CONFIG_REFUSED, role="decode", host="chat-decode-0", message="no config.json in /models/x"
).encode()


def held() -> dict[str, Any]:
    made = pod("chat-decode-0", containerStatuses=[{**container("engine"), "ready": False, "started": True}])
    made["metadata"]["annotations"] = {names.HOLD: Hold(why="crashed 8 times within 3600 s").encode()}
    return made


def decode(**status: Any) -> dict[str, Any]:
    return pod("chat-decode-0", **status)


def test_a_deployment_that_serves_has_no_findings() -> None:
    assert is_ready(seen())
    assert report(seen()) == "GLM52Deployment chat in namespace ns is Ready."


@pytest.mark.parametrize(
    ("given_", "part", "reason", "says", "command"),
    [
        pytest.param(
            seen(decode(containerStatuses=[waiting("CrashLoopBackOff", 3, message=REFUSED, exitCode=78)])),
            "decode",
            "ConfigRefused",
            "no config.json in /models/x",
            "logs chat-decode-0",
            id="engine refuses",
        ),
        pytest.param(
            seen(held()), "decode", "CrashLoop", "crashed 8 times within 3600 s", "{.status.crashes}", id="latched"
        ),
        pytest.param(
            seen(decode(containerStatuses=[waiting("ErrImagePull")])),
            "decode",
            "ImagePullBackOff",
            "engine:test cannot be pulled",
            "describe pod chat-decode-0",
            id="image",
        ),
        pytest.param(
            seen(decode(conditions=[UNSCHEDULABLE])),
            "decode",
            "Unschedulable",
            "Insufficient memory",
            "describe nodes",
            id="scheduling",
        ),
        pytest.param(
            seen(decode(containerStatuses=[waiting("CrashLoopBackOff", 4, message="boom", exitCode=1)])),
            "decode",
            "Crashed",
            "exit code 1: boom",
            "logs chat-decode-0 --all-containers --previous",
            id="crash loop",
        ),
        pytest.param(
            seen(decode(containerStatuses=[waiting("ContainerCreating")])),
            "decode",
            "Starting",
            "chat-decode-0: ",
            "logs chat-decode-0",
            id="starting",
        ),
        pytest.param(
            seen(pod("chat-router-a", role="router", containerStatuses=[container(started=True)])),
            "router",
            "NotReady",
            "once one prefill and one decode pod are",
            "logs chat-router-a",
            id="router",
        ),
        pytest.param(
            seen(workloads={"decode": None}, conditions=NOT_READY),
            "decode",
            "NotMade",
            "StatefulSet chat-decode does not exist",
            "logs deploy/glm52-operator",
            id="child missing",
        ),
        pytest.param(
            seen(workloads={"decode": stateful_set(generation=2, observed=1)}),
            "decode",
            "Applying",
            "its controller has not acted",
            "kube-system",
            id="controller behind",
        ),
        pytest.param(
            seen(
                workloads={"decode": None},
                conditions=[condition("DecodeReady", "False", "QuotaExceeded", "exceeded quota: q")],
            ),
            "decode",
            "QuotaExceeded",
            "exceeded quota: q",
            "describe glm52 chat",
            id="refused by the API server",
        ),
        pytest.param(
            seen(conditions=[condition("ConfigValid", "False", "ImmutableField", "cannot patch")]),
            "specification",
            "ImmutableField",
            "cannot patch",
            "describe glm52 chat",
            id="specification refused",
        ),
        pytest.param(
            seen(**resource(decode={"replicas": "many"}) | {"status": {}}),
            "specification",
            "InvalidSpec",
            "spec.decode.replicas",
            "describe glm52 chat",
            id="specification of another version",
        ),
        pytest.param(
            seen(status={}),
            "operator",
            "OperatorSilent",
            "may not watch namespace ns",
            "glm52-operator",
            id="no operator",
        ),
        pytest.param(
            seen(status={"observedGeneration": 0, "conditions": []}),
            "operator",
            "OperatorBehind",
            "generation 0, the object is at 1",
            "glm52-operator",
            id="operator behind",
        ),
        pytest.param(
            seen(conditions=NOT_READY),
            "operator",
            "Starting",
            "not said Ready yet",
            "describe glm52 chat",
            id="settling",
        ),
    ],
)
def test_a_cause_is_named_with_what_to_do(given_: Snapshot, part: str, reason: str, says: str, command: str) -> None:
    found = [f for f in diagnose(given_) if (f.part, f.reason) == (part, reason)]
    assert len(found) == 1, diagnose(given_)
    assert says in found[0].message
    assert command in found[0].command
    assert not is_ready(given_)


def test_causes_come_before_what_follows_from_them() -> None:
    both = seen(
        pod("chat-router-a", role="router", containerStatuses=[container(started=True)]),
        pod("chat-prefill-0", role="prefill", containerStatuses=[waiting("CrashLoopBackOff", exitCode=1)]),
        pod("chat-decode-0", containerStatuses=[waiting("ContainerCreating")]),
        pod("chat-decode-1", conditions=[UNSCHEDULABLE]),
        pod("chat-decode-2", containerStatuses=[waiting("ErrImagePull")]),
        pod("chat-decode-3", containerStatuses=[waiting("CrashLoopBackOff", message=REFUSED)]),
        status={},
    )
    assert [finding.reason for finding in diagnose(both)] == [
        "OperatorSilent",
        "ConfigRefused",
        "ImagePullBackOff",
        "Unschedulable",
        "Crashed",
        "NotReady",
    ]


def test_pods_with_one_problem_are_one_finding() -> None:
    many = [pod(f"chat-decode-{n}", conditions=[UNSCHEDULABLE]) for n in range(9)]
    (finding,) = diagnose(seen(*many))
    assert "The same: chat-decode-1, chat-decode-2, chat-decode-3, …" in finding.message


def test_a_ready_status_does_not_hide_a_pod_that_crashes_now() -> None:
    # The operator may be away: its last word stands in the object for ever.
    crashed = seen(decode(containerStatuses=[waiting("CrashLoopBackOff", 1, exitCode=1)]))
    assert crashed.said_ready
    assert not is_ready(crashed)


def test_conditions_of_an_older_generation_are_not_believed() -> None:
    behind = seen(status={"observedGeneration": 0, "conditions": SERVING})
    assert not behind.said_ready
    assert tree(behind).splitlines()[1].split()[:2] == ["ns/chat", "Unknown"]


def test_a_deployment_under_deletion_says_so_and_nothing_about_missing_pods() -> None:
    gone = resource()
    gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    found = diagnose(snapshot({**gone, "status": {}}, {}, [], now=NOW))
    assert [finding.reason for finding in found] == ["Deleting"]


def test_a_start_says_how_long_it_takes_and_may_take() -> None:
    starting = decode(containerStatuses=[container(state={"running": {"startedAt": "2026-01-02T03:03:20Z"}})])
    starting["spec"]["nodeName"] = "node-a"
    starting["spec"]["containers"][0]["startupProbe"] = {"periodSeconds": 1, "failureThreshold": 126}
    assert "chat-decode-0: starts for 45s of at most 126s" in report(seen(starting))


def test_the_tree_shows_roles_pods_and_the_next_step() -> None:
    crashed = decode(containerStatuses=[waiting("CrashLoopBackOff", 3, message="boom", exitCode=1)])
    crashed["metadata"]["creationTimestamp"] = BEFORE_TWO_HOURS
    crashed["spec"]["nodeName"] = "node-a"
    said = [condition("DecodeReady", "False", "Crashed"), condition("Ready", "False", "Crashed")]
    lines = tree(seen(crashed, conditions=said)).splitlines()
    assert lines[:7] == [
        "NAME                  READY  STATE     RESTARTS  NODE    FOR",
        "ns/chat               False  Crashed                     3m",
        "├─ prefill            1/1    AllReady                    -",
        "│  └─ chat-prefill-0  yes    ready     0         worker  -",
        "├─ decode             0/1    Crashed                     3m",
        "│  └─ chat-decode-0   no     Crashed   3         node-a  2h",
        "└─ router             1/1    AllReady                    -",
    ]
    assert lines[-2].startswith(
        "Next: decode: Crashed: pod chat-decode-0, container engine ended with exit code 1: boom"
    )
    assert lines[-1].strip() == "kubectl -n ns logs chat-decode-0 --all-containers --previous"


BEFORE_TWO_HOURS = "2026-01-02T01:04:05Z"


def test_the_tree_of_a_deployment_that_serves_ends_with_its_address() -> None:
    assert tree(seen()).endswith("Next: nothing, it serves. Requests go to http://chat-router.ns.svc:8000.")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
GOOD: list[Any] = [
    {**resource(), "status": {"observedGeneration": 1, "conditions": NOT_READY}},
    stateful_set(),
    router(),
    ready_pod("decode"),
    decode(
        conditions=[UNSCHEDULABLE], containerStatuses=[waiting("CrashLoopBackOff", 1, message=REFUSED, exitCode=78)]
    ),
]


def spoilings(good: Any) -> Iterator[Any]:
    """A good object with each of its parts in turn replaced by something else."""
    yield from (None, 3, "x", [None, 3, "x", [], {}], {}, {"name": None})
    if isinstance(good, dict):
        for key in good:
            yield from ({**good, key: inner} for inner in spoilings(good[key]))
    elif isinstance(good, list):
        for index in range(len(good)):
            yield from ([*good[:index], inner, *good[index + 1 :]] for inner in spoilings(good[index]))


def test_no_part_of_any_object_breaks_the_diagnosis_by_having_another_form() -> None:
    top, stateful, deployment, ready, broken = GOOD
    for spoilt_top in spoilings(top):
        assert tree(snapshot(spoilt_top, {"decode": stateful}, [ready], now=NOW))
    for which, good in (("decode", stateful), ("router", deployment)):
        for spoilt_child in spoilings(good):
            assert tree(snapshot(top, {which: spoilt_child}, [ready], now=NOW))  # type: ignore[dict-item]
    for spoilt_pod in [*spoilings(ready), *spoilings(broken)]:
        assert tree(snapshot(top, {"decode": stateful}, [spoilt_pod], now=NOW))


@st.composite
def spoilt(draw: st.DrawFn, good: Any) -> Any:
    """A good object in which any one part is something else."""
    if draw(st.integers(0, 4)) == 0 or not good:
        return draw(anything)
    if isinstance(good, dict):
        key = draw(st.sampled_from(sorted(good)))
        return {**good, key: draw(spoilt(good[key]))}
    if isinstance(good, list):
        index = draw(st.integers(0, len(good) - 1))
        return [*good[:index], draw(spoilt(good[index])), *good[index + 1 :]]
    return draw(anything)


objects = st.sampled_from(GOOD).flatmap(spoilt) | anything


@given(objects, st.lists(objects, max_size=3), st.lists(objects, max_size=3))
def test_no_object_whatever_it_holds_breaks_the_diagnosis(top: Any, workloads: list[Any], pods: list[Any]) -> None:
    found = snapshot(top, dict(zip(COMPONENTS, workloads, strict=False)), pods, now=NOW)
    assert report(found)
    assert tree(found)


def test_what_is_short_on_the_nodes_is_taken_from_the_operator() -> None:
    said = [condition("Schedulable", "False", "NoRoom", "0 of 3 nodes can hold a decode pod"), *NOT_READY]
    first, second = diagnose(seen(decode(conditions=[UNSCHEDULABLE]), conditions=said))
    assert (first.part, first.reason, first.message) == ("nodes", "NoRoom", "0 of 3 nodes can hold a decode pod")
    assert "describe nodes" in first.command
    assert second.reason == "Unschedulable"
