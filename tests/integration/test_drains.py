"""Drains on a real control plane: followed while they last, and their outcome told though the pod is gone."""

from __future__ import annotations

import pytest

from e2e.controlplane.client import Object, Refused, path
from e2e.controlplane.operator import Installed, Process
from e2e.controlplane.space import Space, deployment
from e2e.controlplane.standin import FOREVER, Exit, Kubelets, Life, termination


def words(outcome: str, in_flight: int = 0) -> str:
    fields = {"outcome": outcome, "role": "decode", "host": "h", "message": "m", "in_flight": in_flight}
    return termination(**fields)


def drains(space: Space) -> list[Object]:
    found: list[Object] = (space.seen("GLM52Deployment", "chat") or {}).get("status", {}).get("drains", [])
    return found


def until_drain(space: Space, pod: str, **fields: object) -> Object:
    def probe() -> Object | None:
        return next((d for d in drains(space) if d["pod"] == pod and fields.items() <= d.items()), None)

    return space.until(f"the drain of {pod} is {fields}", probe, last=lambda: drains(space))


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        pytest.param(Exit(0, words("Drained")), "Drained", id="drained"),
        pytest.param(Exit(75, words("DrainTimedOut", 3)), "DrainTimedOut", id="timed out"),
        pytest.param(Exit(137), "Killed", id="killed"),
    ],
)
def test_a_pod_that_is_scaled_away_is_followed_to_its_end(
    space: Space, operator: Process, kubelets: Kubelets, end: Exit, outcome: str
) -> None:
    kubelets.live(Life(drain=FOREVER, end=end), space.name, "decode")
    space.apply(deployment("chat", decode={"replicas": 2}))
    space.until_ready("chat")
    assert space.condition("chat", "Draining")["status"] == "False"
    space.scale("chat", 1)
    leaving = until_drain(space, "chat-decode-1", phase="Draining")
    assert leaving["startedAt"] < leaving["deadline"]
    assert "chat-decode-1" in space.until_condition("chat", "Draining", status="True")["message"]
    kubelets.release(space.name, "chat-decode-1")
    ended = until_drain(space, "chat-decode-1", phase="Ended")
    assert (ended["outcome"], ended.get("cutOff", 0)) == (outcome, 3 if outcome == "DrainTimedOut" else 0)
    assert (ended["startedAt"], ended["deadline"]) == (leaving["startedAt"], leaving["deadline"])
    space.until_condition("chat", "Draining", status="False")
    space.until_ready("chat")
    # What ends because it was told to is no crash.
    assert "crashes" not in (space.seen("GLM52Deployment", "chat") or {})["status"]


def test_an_end_that_no_operator_saw_is_not_called_drained(
    space: Space, installed: Installed, kubelets: Kubelets
) -> None:
    operator = installed.start(hurry=10)
    kubelets.live(Life(drain=FOREVER), space.name, "decode")
    space.apply(deployment("chat", decode={"replicas": 2}))
    space.until_ready("chat")
    space.scale("chat", 1)
    until_drain(space, "chat-decode-1", phase="Draining")
    operator.kill()
    kubelets.release(space.name, "chat-decode-1")
    space.until("the pod is gone", lambda: "chat-decode-1" not in space.pods("chat") or None)
    operator.start()
    until_drain(space, "chat-decode-1", phase="Ended", outcome="Unknown")
    space.until_ready("chat")


def test_a_rollout_drains_pod_after_pod_and_keeps_the_last_outcomes(
    space: Space, operator: Process, kubelets: Kubelets
) -> None:
    kubelets.live(Life(end=Exit(0, words("Drained"))), space.name)
    space.apply(deployment("chat", decode={"replicas": 2}))
    space.until_ready("chat")
    generation = space.edit("chat", restart="once")["metadata"]["generation"]
    space.until_ready("chat", generation)
    for pod in ("chat-decode-0", "chat-decode-1", "chat-prefill-0"):
        until_drain(space, pod, phase="Ended", outcome="Drained")


def evict(space: Space, pod: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": space.name}}
    space.cluster.request("POST", path("Pod", space.name, pod, "eviction"), body)


def test_hosts_of_a_replica_leave_together_and_one_replica_at_a_time(
    space: Space, operator: Process, kubelets: Kubelets
) -> None:
    # Longer than a second, which is as exact as the API server's times are.
    kubelets.live(Life(drain=3.0), space.name, "decode")
    space.apply(deployment("chat", decode={"replicas": 2, "hostsPerReplica": 2}))
    space.until_ready("chat")
    before = {name: pod["metadata"]["uid"] for name, pod in space.pods("chat", "decode").items()}

    def budget() -> tuple[int, int]:
        found = (space.seen("PodDisruptionBudget", "chat-decode") or {}).get("status", {})
        return found.get("currentHealthy", 0), found.get("disruptionsAllowed", 0)

    # The drain of a node asks for all of its pods at once, whichever replicas they are hosts of.
    space.until("there is room for one pod, and so for one replica", lambda: budget() == (4, 1) or None, last=budget)
    evict(space, "chat-decode-3")
    with pytest.raises(Refused, match="disruption budget"):
        evict(space, "chat-decode-0")
    for pod in ("chat-decode-2", "chat-decode-3"):
        until_drain(space, pod, outcome="Drained")
    space.until_ready("chat")
    after = {name: pod["metadata"]["uid"] for name, pod in space.pods("chat", "decode").items()}
    assert {name for name in before if after[name] == before[name]} == {"chat-decode-0", "chat-decode-1"}
    assert "crashes" not in (space.seen("GLM52Deployment", "chat") or {})["status"]
