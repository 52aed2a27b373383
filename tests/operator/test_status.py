"""Conditions and the rest of the status, from objects as the cluster shows them."""

from __future__ import annotations

import datetime
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.config import Outcome, Termination
from glm52_operator import names
from glm52_operator.api.crd import crd
from glm52_operator.plan.failures import Failure
from glm52_operator.plan.resolve import Invalid
from glm52_operator.plan.rollout import REVISION
from glm52_operator.status.compute import Observed, compute, is_settled
from glm52_operator.status.conditions import Verdict, merge
from glm52_operator.status.pods import diagnose
from glm52_operator.status.workloads import Workload, judge
from tests.operator.builders import pod, resource, router, stateful_set, target

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
LATER = NOW + datetime.timedelta(hours=1)
STATUS = jsonschema.Draft4Validator(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"])


def waiting(why: str, text: str = "", /, **last: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"waiting": {"reason": why, "message": text}}
    extra = {"lastState": {"terminated": last}} if last else {}
    return {"name": "engine", "image": "engine:test", "ready": False, "state": state, **extra}


def told(outcome: Outcome, message: str) -> str:
    return Termination(outcome=outcome, role="decode", host="chat-decode-0", message=message).encode()


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient memory.",
}


@pytest.mark.parametrize(
    ("status", "reason", "says"),
    [
        pytest.param(
            {"conditions": [UNSCHEDULABLE]},
            "Unschedulable",
            ["chat-decode-0", "Insufficient memory", "4Gi"],
            id="no node",
        ),
        pytest.param(
            {"containerStatuses": [waiting("ErrImagePull", "not found")]},
            "ImagePullBackOff",
            ["engine:test", "spec.image"],
            id="image",
        ),
        pytest.param(
            {"initContainerStatuses": [waiting("ImagePullBackOff")]},
            "ImagePullBackOff",
            ["engine:test"],
            id="init image",
        ),
        pytest.param(
            {"containerStatuses": [waiting("CreateContainerConfigError", 'secret "s" not found')]},
            "ContainerConfigError",
            ['secret "s" not found'],
            id="container config",
        ),
        pytest.param(
            {
                "containerStatuses": [
                    waiting(
                        "CrashLoopBackOff",
                        message=told(Outcome.CONFIG_REFUSED, "no config.json in /models/x"),
                        exitCode=78,
                    )
                ]
            },
            "ConfigRefused",
            ["no config.json in /models/x"],
            id="refused",
        ),
        pytest.param(
            {
                "initContainerStatuses": [
                    waiting("CrashLoopBackOff", message=told(Outcome.CONFIG_REFUSED, "disk is full"), exitCode=78)
                ],
                "containerStatuses": [waiting("PodInitializing")],
            },
            "ConfigRefused",
            ["disk is full"],
            id="refused by init",
        ),
        pytest.param(
            {"containerStatuses": [waiting("CrashLoopBackOff", message="Traceback: boom", exitCode=1)]},
            "Crashed",
            ["exit code 1", "Traceback: boom", "--previous"],
            id="crash without words",
        ),
        pytest.param(
            {"containerStatuses": [waiting("CrashLoopBackOff", message=told(Outcome.WEDGED, "no step"), exitCode=71)]},
            "Wedged",
            ["no step", "71"],
            id="wedged",
        ),
        pytest.param(
            {"containerStatuses": [waiting("CrashLoopBackOff", reason="OOMKilled", exitCode=137)]},
            "OutOfMemory",
            ["4Gi", "weightsGiB"],
            id="out of memory",
        ),
        pytest.param(
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"},
            "Evicted",
            ["low on memory"],
            id="evicted",
        ),
    ],
)
def test_a_pod_that_cannot_serve_says_why(status: dict[str, Any], reason: str, says: list[str]) -> None:
    problem = diagnose(pod("chat-decode-0", **status))
    assert problem is not None
    assert problem.reason == reason
    for part in says:
        assert part in problem.message


@pytest.mark.parametrize(
    "healthy",
    [
        pytest.param(pod("p", ready=True), id="ready"),
        pytest.param(pod("p"), id="starting"),
        pytest.param(pod("p", containerStatuses=[waiting("ContainerCreating")]), id="creating"),
        pytest.param(pod("p", leaving=True, containerStatuses=[waiting("CrashLoopBackOff", exitCode=1)]), id="leaving"),
        pytest.param(
            pod("p", initContainerStatuses=[{"name": "i", "state": {"terminated": {"exitCode": 0}}, "ready": True}]),
            id="init done",
        ),
        pytest.param(
            pod(
                "p",
                ready=True,
                containerStatuses=[{"name": "e", "ready": True, "lastState": {"terminated": {"exitCode": 1}}}],
            ),
            id="recovered",
        ),
    ],
)
def test_a_pod_that_is_fine_or_on_its_way_has_no_problem(healthy: dict[str, Any]) -> None:
    assert diagnose(healthy) is None


def workload(observed: Any = ..., pods: Any = (), wanted: int = 1, **rest: Any) -> Workload:
    return Workload(
        kind="StatefulSet",
        name="chat-decode",
        title="decode replicas",
        wanted=wanted,
        observed=stateful_set() if observed is ... else observed,
        pods=pods,
        **rest,
    )


READY = (pod("chat-decode-0", ready=True),)


@pytest.mark.parametrize(
    ("given", "holds", "reason"),
    [
        pytest.param(workload(pods=READY), True, "AllReady", id="serving"),
        pytest.param(workload(None), False, "Applying", id="not there"),
        pytest.param(workload(stateful_set(generation=2, observed=1), READY), False, "Applying", id="not seen yet"),
        pytest.param(workload(stateful_set(update="r2", updated=0), READY), False, "RollingOut", id="old revision"),
        pytest.param(
            workload(stateful_set(current="r2", update="r2"), READY), False, "RollingOut", id="pod of an old revision"
        ),
        pytest.param(
            workload(pods=(pod("chat-decode-0", ready=True, leaving=True),)), False, "Draining", id="pod leaves"
        ),
        pytest.param(workload(stateful_set(2), READY), False, "Draining", id="too many"),
        pytest.param(workload(stateful_set(ready=0), (pod("chat-decode-0"),)), False, "Starting", id="starting"),
        pytest.param(
            workload(
                stateful_set(ready=0), (pod("chat-decode-0", containerStatuses=[{"name": "e", "started": True}]),)
            ),
            False,
            "NotReady",
            id="started and not ready",
        ),
        pytest.param(workload(stateful_set(1), READY, wanted=2), False, "Starting", id="too few"),
        pytest.param(workload(stateful_set(0), (), wanted=0), False, "ScaledToZero", id="none wanted"),
        pytest.param(workload(stateful_set(0), (), events=["exceeded quota"]), False, "PodsRefused", id="pods refused"),
        pytest.param(
            workload(pods=READY, failures=[Failure("Forbidden", "no", "StatefulSet", "chat-decode")]),
            False,
            "Forbidden",
            id="not applied",
        ),
    ],
)
def test_a_workload_is_judged_by_generation_and_revision(given: Workload, holds: bool, reason: str) -> None:
    verdict = judge(given)
    assert (verdict.holds, verdict.reason) == (holds, reason)
    assert f"/{given.wanted} decode replicas ready" in verdict.message or reason == "ScaledToZero"


def observed(**rest: Any) -> Observed:
    return Observed(
        workloads={"prefill": stateful_set(), "decode": stateful_set(), "router": router()},
        pods={
            "prefill": [pod("chat-prefill-0", role="prefill", ready=True)],
            "decode": [pod("chat-decode-0", ready=True)],
            "router": [pod("chat-router-x", role="router", ready=True)],
        },
        **rest,
    )


def conditions(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["type"]: c for c in status["conditions"]}


def test_everything_ready() -> None:
    status = compute(resource(generation=3), target(), observed(), now=NOW)
    found = conditions(status)
    assert {k: c["status"] for k, c in found.items()} == {
        "ConfigValid": "True",
        "PrefillReady": "True",
        "DecodeReady": "True",
        "RouterReady": "True",
        "Schedulable": "Unknown",
        "Progressing": "False",
        "Ready": "True",
    }
    assert {c["observedGeneration"] for c in found.values()} == {3} == {status["observedGeneration"]}
    assert status["url"] == "http://chat-router.ns.svc:8000"
    assert (status["upToDate"], status["decode"]["ready"], status["hostRam"]) == (
        "3/3",
        "1/1",
        "prefill 4 GiB, decode 4 GiB",
    )
    assert status["decode"]["memory"]["explanation"] == target().memory("decode").explain()
    assert status["decode"]["selector"] == names.selector_text("chat", "decode")
    assert is_settled(status)


def test_the_same_again_changes_nothing() -> None:
    first = compute(resource(), target(), observed(), now=NOW)
    assert compute({**resource(), "status": first}, target(), observed(), now=LATER) == first


def test_ready_repeats_the_first_reason() -> None:
    seen = observed()
    seen.pods["decode"][:] = [pod("chat-decode-0", conditions=[UNSCHEDULABLE])]  # type: ignore[index]
    found = conditions(compute(resource(), target(), seen, now=NOW))
    assert found["Ready"]["reason"] == found["DecodeReady"]["reason"] == "Unschedulable"
    assert "Insufficient memory" in found["Ready"]["message"]
    assert (found["Progressing"]["status"], found["Progressing"]["reason"]) == ("False", "Unschedulable")
    assert found["PrefillReady"]["status"] == "True"


def test_what_cannot_be_applied_leaves_the_rest_of_the_status_alone() -> None:
    before = compute(resource(), target(), observed(), now=NOW)
    after = compute(
        {**resource(generation=2), "status": before}, Invalid("ImageMissing", "spec.image: ..."), observed(), now=LATER
    )
    found = conditions(after)
    assert (found["Ready"]["status"], found["Ready"]["reason"]) == ("False", "ImageMissing")
    assert {found[c]["status"] for c in ("PrefillReady", "DecodeReady", "RouterReady")} == {"Unknown"}
    assert "decode 1/1" in found["DecodeReady"]["message"]
    assert after["decode"] == before["decode"]
    assert after["observedGeneration"] == 2


@pytest.mark.parametrize(
    ("failure", "unready"),
    [
        (Failure("Forbidden", "m", "PodDisruptionBudget", "chat-decode"), set()),
        (Failure("Forbidden", "m", "Service", "chat-decode-hosts"), {"DecodeReady"}),
        (Failure("Forbidden", "m", "Role", "chat-router"), {"RouterReady"}),
        (Failure("Forbidden", "m", "Secret", "chat-internal"), {"PrefillReady", "DecodeReady", "RouterReady"}),
    ],
)
def test_a_refused_object_concerns_who_needs_it(failure: Failure, unready: set[str]) -> None:
    found = conditions(compute(resource(), target(), observed(failures=[failure]), now=NOW))
    roles = ("PrefillReady", "DecodeReady", "RouterReady")
    assert {c for c in roles if found[c]["status"] == "False"} == unready
    assert (found["Progressing"]["status"], found["Progressing"]["reason"]) == ("False", "Forbidden")
    assert found["Ready"]["status"] == ("False" if unready else "True")


def test_a_refused_specification_is_not_valid() -> None:
    failure = Failure("Refused", "spec.x", "StatefulSet", "chat-decode", config=True)
    found = conditions(compute(resource(), target(), observed(failures=[failure]), now=NOW))
    assert (found["ConfigValid"]["status"], found["Ready"]["reason"]) == ("False", "Refused")


def test_the_transition_time_moves_only_with_the_status() -> None:
    (first,) = merge({"Ready": Verdict(False, "A", "a")}, [], generation=1, now=NOW)
    (second,) = merge({"Ready": Verdict(False, "B", "b")}, [first], generation=2, now=LATER)
    (third,) = merge({"Ready": Verdict(True, "C", "c")}, [second], generation=2, now=LATER)
    assert first["lastTransitionTime"] == second["lastTransitionTime"] == "2026-01-02T03:04:05Z"
    assert (second["reason"], second["observedGeneration"]) == ("B", 2)
    assert third["lastTransitionTime"] == "2026-01-02T04:04:05Z"


counts = st.integers(min_value=0, max_value=3)
revisions = st.sampled_from(["r1", "r2"])
sets = st.none() | st.builds(
    stateful_set,
    counts,
    ready=counts,
    updated=counts,
    generation=st.integers(1, 3),
    observed=st.integers(0, 3),
    current=revisions,
    update=revisions,
)
pods_of = st.lists(
    st.builds(pod, st.sampled_from(["p-0", "p-1"]), ready=st.booleans(), revision=revisions, leaving=st.booleans()),
    max_size=3,
)


@given(prefill=sets, decode=sets, prefill_pods=pods_of, decode_pods=pods_of, wanted=st.integers(0, 3))
def test_any_cluster_gives_a_status_that_the_schema_takes_and_ready_never_lies(
    prefill: Any, decode: Any, prefill_pods: Any, decode_pods: Any, wanted: int
) -> None:
    seen = Observed(
        workloads={"prefill": prefill, "decode": decode, "router": router()},
        pods={"prefill": prefill_pods, "decode": decode_pods, "router": []},
    )
    chosen = target(decode={"replicas": wanted})
    status = compute(resource(generation=5), chosen, seen, now=NOW)
    STATUS.validate(status)
    found = conditions(status)
    assert all(re.fullmatch(r"[A-Za-z]+", c["reason"]) and c["message"] for c in found.values())
    parts = ("ConfigValid", "PrefillReady", "DecodeReady", "RouterReady")
    assert (found["Ready"]["status"] == "True") == all(found[c]["status"] == "True" for c in parts)
    if found["DecodeReady"]["status"] == "True":
        state = decode["status"]
        assert state["observedGeneration"] >= decode["metadata"]["generation"]
        assert state["replicas"] == state["readyReplicas"] == wanted
        assert state["updatedReplicas"] >= wanted > 0
        assert {p["metadata"]["labels"][REVISION] for p in decode_pods} <= {state["updateRevision"]}
        assert not [p for p in decode_pods if "deletionTimestamp" in p["metadata"]]
    assert compute({**resource(generation=5), "status": status}, chosen, seen, now=LATER) == status
