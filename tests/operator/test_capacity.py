"""Room on nodes: the scheduler's sum, and the words made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_operator.desired.target import Object
from glm52_operator.plan.capacity import Fit, demands, fits, pod_requests, slim_node, slim_pod, survey
from glm52_operator.plan.quantity import parse_quantity
from glm52_operator.status.conditions import Verdict
from glm52_operator.status.schedulable import schedulable
from tests.operator.builders import node, pod, target

GI = 1 << 30
CHAT = target(router={"replicas": 0}, prefill={"replicas": 0})
"""One decode pod of 4 GiB, and nothing else."""


def running(on: str, memory: str, name: str = "other", **spec: Any) -> Object:
    containers = [{"name": "c", "image": "i", "resources": {"requests": {"memory": memory}}}]
    return {
        "metadata": {"name": name, "namespace": "x", "uid": f"uid-{name}"},
        "spec": {"nodeName": on, "containers": containers, **spec},
        "status": {"phase": "Running"},
    }


def judged(*nodes: Object, pods: Any = (), of: Any = CHAT, own: Any = ()) -> Verdict:
    demanded = demands(of, {"decode": own})
    return schedulable(demanded, survey(nodes, [*pods, *own]))


def test_enough_room_is_told_with_the_number_of_nodes() -> None:
    found = judged(node("a", "8Gi"), node("b", "3Gi"))
    assert (found.holds, found.reason) == (True, "Room")
    assert found.message == "1 of 2 nodes can hold a decode pod of 4 GiB."


def test_what_is_short_is_named_by_node() -> None:
    nodes = [
        node("a", "8Gi"),
        node("b", "4194303Ki"),
        node("c", "64Gi", ready=False),
        node("d", "64Gi", cordoned=True),
        node("e", "64Gi", taints=[{"key": "gpu", "effect": "NoSchedule"}]),
        node("f", "64Gi", cpu="249m"),
    ]
    found = judged(*nodes, pods=[running("a", "5.8Gi")])
    assert (found.holds, found.reason) == (False, "NoRoom")
    assert found.message.startswith(
        "0 of 6 nodes can hold a decode pod of 4 GiB: cpu is short on f (0.2 free); memory is short on b (3.5 GiB "
        "free), a (2 GiB free); cordoned: d; not ready: c; tainted with gpu: e. "
    )
    assert "A decode pod: 4 GiB = 1 rank × 1 GiB host pool + 1 GiB weights + " in found.message
    assert "hostPoolGiB" in found.message


@pytest.mark.parametrize(
    ("spec", "status", "holds"),
    [
        pytest.param({}, {}, False, id="runs"),
        pytest.param({}, {"phase": "Succeeded"}, True, id="finished"),
        pytest.param({}, {"phase": "Failed"}, True, id="failed"),
        pytest.param({"nodeName": ""}, {"phase": "Pending"}, True, id="waits for a node itself"),
        pytest.param({"nodeName": "elsewhere"}, {}, True, id="on another node"),
    ],
)
def test_what_counts_against_a_node(spec: Object, status: Object, holds: bool) -> None:
    other = running("a", "1Ki", **spec)
    other["status"] |= status
    assert judged(node("a", "4Gi"), pods=[other]).holds is holds


@pytest.mark.parametrize(
    ("toleration", "taint", "holds"),
    [
        ({"key": "k", "operator": "Exists"}, {"key": "k", "value": "v", "effect": "NoSchedule"}, True),
        ({"operator": "Exists"}, {"key": "k", "effect": "NoExecute"}, True),
        ({"key": "k", "value": "v"}, {"key": "k", "value": "v", "effect": "NoSchedule"}, True),
        ({"key": "k", "value": "w"}, {"key": "k", "value": "v", "effect": "NoSchedule"}, False),
        ({"key": "k", "operator": "Exists", "effect": "NoExecute"}, {"key": "k", "effect": "NoSchedule"}, False),
        ({"key": "other", "operator": "Exists"}, {"key": "k", "effect": "NoSchedule"}, False),
        ({"key": "other", "operator": "Exists"}, {"key": "k", "effect": "PreferNoSchedule"}, True),
    ],
)
def test_a_taint_is_held_against_the_tolerations(toleration: Object, taint: Object, holds: bool) -> None:
    demanded = [replace(demand, tolerations=[toleration]) for demand in demands(CHAT, {})]
    assert schedulable(demanded, survey([node("a", "8Gi", taints=[taint])], [])).holds is holds


def test_a_deployment_that_fills_its_nodes_is_schedulable_without_a_look_at_them() -> None:
    own = [pod("chat-decode-0", ready=True, node="a")]
    assert schedulable(demands(CHAT, {"decode": own}), None).reason == "Placed"


def test_only_what_is_missing_needs_room() -> None:
    of = target(router={"replicas": 0}, prefill={"replicas": 0}, decode={"replicas": 2})
    own = [pod("chat-decode-0", ready=True, node="a")]
    assert judged(node("a", "7Gi"), of=of, own=own).holds is False
    assert judged(node("a", "8Gi"), of=of, own=own).holds is True


def test_pods_that_an_update_replaces_are_room_for_their_successors() -> None:
    of = target(router={"replicas": 0}, prefill={"replicas": 0}, decode={"hostPoolGiB": 9})
    own = [pod("chat-decode-0", ready=True, node="a")]
    need = of.memory("decode").per_host
    assert judged(node("a", str(need)), of=of, own=own).holds is True
    assert judged(node("a", str(need - 1)), of=of, own=own).holds is False
    leaves = [pod("chat-decode-0", ready=True, node="a", leaving=True)]
    assert judged(node("a", "4Gi"), own=leaves).reason == "Room"
    assert judged(node("a", "3Gi"), own=leaves).reason == "NoRoom"


def test_a_router_beyond_the_wanted_needs_room_while_it_waits() -> None:
    of = target(decode={"replicas": 0}, prefill={"replicas": 0})
    both = {"router": [pod("r-0", role="router", ready=True, node="a"), pod("r-1", role="router")]}
    found = schedulable(demands(of, both), survey([node("a", "1Mi")], []))
    assert found.holds is False
    assert "router.replicas" in found.message


def test_roles_do_not_count_the_same_room() -> None:
    found = judged(node("a", "5Gi"), of=target(router={"replicas": 0}))
    assert (found.holds, found.reason) == (False, "NoRoom")
    assert "1 prefill pod of 4 GiB, 1 decode pod of 4 GiB together: 1 decode would wait" in found.message


def test_small_pods_of_others_do_not_change_the_words() -> None:
    first = judged(node("a", "4Gi"), pods=[running("a", "1.6Gi")])
    assert first == judged(node("a", "4Gi"), pods=[running("a", "1.6Gi"), running("a", "300Mi", "late")])


def test_a_full_node_takes_no_pod_however_much_memory_it_has() -> None:
    found = judged(node("a", "64Gi", pods="1"), pods=[running("a", "1Mi")])
    assert "the number of pods is short on a (none free)" in found.message


def requests(memory: str, **more: Any) -> Object:
    return {"resources": {"requests": {"memory": memory}}, **more}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({"containers": [requests("1Gi"), requests("2Gi")]}, 3 * GI, id="sum"),
        pytest.param({"initContainers": [requests("5Gi")], "containers": [requests("2Gi")]}, 5 * GI, id="init"),
        pytest.param(
            {"initContainers": [requests("5Gi", restartPolicy="Always")], "containers": [requests("2Gi")]},
            7 * GI,
            id="sidecar",
        ),
        pytest.param(
            {
                "initContainers": [requests("1Gi", restartPolicy="Always"), requests("5Gi")],
                "containers": [requests("2Gi")],
            },
            6 * GI,
            id="init beside a sidecar",
        ),
        pytest.param({"containers": [requests("1Gi")], "overhead": {"memory": "64Mi"}}, GI + (64 << 20), id="overhead"),
        pytest.param({"containers": [requests("1Gi")], **requests("4Gi")}, 4 * GI, id="of the whole pod"),
    ],
)
def test_a_pod_asks_for_what_the_scheduler_counts(spec: Object, expected: int) -> None:
    assert pod_requests(spec) == {"memory": expected, "pods": 1}


SUFFIXES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": GI,
    "Ti": 1 << 40,
}


@given(st.integers(0, 10**6), st.sampled_from(sorted(SUFFIXES)))
def test_every_spelling_of_an_amount_is_the_same_amount(number: int, suffix: str) -> None:
    amount = number * SUFFIXES[suffix]
    assert parse_quantity(f"{number}{suffix}") == amount
    assert parse_quantity(f"{number}.{suffix}") == amount
    assert parse_quantity(f"{amount * 1000}m") == amount
    assert parse_quantity(f"{amount * 10**9}n") == parse_quantity(f"{amount * 10**6}u") == amount
    assert parse_quantity(f"{amount}e0") == parse_quantity(f"{amount // 1000}.{amount % 1000:03}E3") == amount


@pytest.mark.parametrize("text", ["", ".", "Gi", "1gi", "1 Gi", "1e", "1e999999999999", "1\n", "nan", None, True])
def test_what_is_no_amount_is_none(text: object) -> None:
    assert parse_quantity(text) is None


names = st.sampled_from(["a", "b", "c"])
nodes_ = st.lists(
    st.builds(
        node,
        names,
        st.integers(0, 20).map(lambda n: f"{n}Gi"),
        pods=st.integers(0, 4).map(str),
        ready=st.booleans(),
        cordoned=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda obj: obj["metadata"]["name"],
)
others = st.lists(
    st.builds(running, names, st.integers(0, 9).map(lambda n: f"{n}Gi"), st.uuids().map(str)),
    max_size=4,
)
owned = st.lists(
    st.builds(
        pod,
        st.sampled_from(["chat-decode-0", "chat-decode-1"]),
        ready=st.booleans(),
        leaving=st.booleans(),
        node=names | st.none(),
    ),
    max_size=2,
    unique_by=lambda obj: obj["metadata"]["name"],
)
targets = st.builds(
    lambda prefill, decode, pool: target(
        prefill={"replicas": prefill}, decode={"replicas": decode, "hostPoolGiB": pool}
    ),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 5),
)


def found(of: Any, own: Any, nodes: Any, pods: Any) -> list[Fit]:
    return fits(demands(of, {"decode": own}), survey(nodes, pods))


@settings(max_examples=40)
@given(targets, owned, nodes_, others)
def test_any_cluster_is_judged_the_same_whole_and_slim(of: Any, own: Any, nodes: Any, pods: Any) -> None:
    demanded = demands(of, {"decode": own})
    whole = schedulable(demanded, survey(nodes, pods))
    assert whole == schedulable(demanded, survey([*map(slim_node, nodes)], [*map(slim_pod, pods)]))
    each = fits(demanded, survey(nodes, pods))
    assert {fit.demand.component for fit in each} == {d.component for d in demanded if d.missing}
    for fit in each:
        assert fit.fitting + len(fit.obstacles) == fit.nodes == len(nodes)
        assert 0 <= fit.placed <= min(fit.room, fit.demand.missing)
        assert (fit.room > 0) == (fit.fitting > 0)
    assert whole.holds is all(fit.placed == fit.demand.missing for fit in each)


@settings(max_examples=40)
@given(targets, owned, nodes_, others)
def test_another_pod_never_makes_room_and_another_node_never_takes_any(
    of: Any, own: Any, nodes: Any, pods: Any
) -> None:
    for fewer, more in (
        (found(of, own, nodes, [*pods, running("a", "1Gi", "late")]), found(of, own, nodes, pods)),
        (found(of, own, nodes, pods), found(of, own, [*nodes, node("z", "9Gi")], pods)),
    ):
        assert all(low.room <= high.room for low, high in zip(fewer, more, strict=True))
        assert all(low.fitting <= high.fitting for low, high in zip(fewer, more, strict=True))
