"""Rollouts against the real StatefulSet and disruption controllers; the engines' part is played by a stand-in."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from functools import partial

import pytest

from e2e.controlplane.client import Object
from e2e.controlplane.operator import Installed, Process
from e2e.controlplane.space import Space, deployment
from e2e.controlplane.standin import Kubelets, Life
from glm52_operator.desired.children import build
from glm52_operator.desired.target import Target
from glm52_operator.plan.resolve import resolve

pytestmark = pytest.mark.integration

LIFE = Life(warm_up=0.3, drain=0.3)
KV = "glm52.dev/kv"
LEFT = ["chat-decode-0", "chat-decode-1", "chat-decode-2"]
"""Pods of the first replica of three hosts."""


def serves(pod: Object) -> bool:
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", []))
    return ready and "deletionTimestamp" not in pod["metadata"]


def serving(space: Space, role: str) -> list[Object]:
    return [pod for pod in space.pods("chat", role).values() if serves(pod)]


def uids(space: Space, role: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in space.pods("chat", role).values()}


class Watched:
    """What every state between two points of a test had in common: it is looked at after each event."""

    def __init__(self, space: Space, floors: dict[str, int]) -> None:
        self.space = space
        self.floors = floors
        self.broken: list[str] = []

    def look(self) -> None:
        kvs = []
        for role, floor in self.floors.items():
            found = serving(self.space, role)
            kvs.append({pod["metadata"]["labels"].get(KV) for pod in found})
            if len(found) < floor:
                self.broken.append(f"{len(found)} {role} pods serve, {floor} have to")
        if not set.intersection(*kvs):
            self.broken.append(f"no prefill and decode pod can exchange KV: {kvs}")

    def until_ready(self, generation: int, timeout: float = 90.0) -> None:
        def probe() -> Object | None:
            self.look()
            found = self.space.seen("GLM52Deployment", "chat")
            new = found is not None and found["metadata"]["generation"] >= generation
            return found if new and self.space.condition("chat", "Ready").get("status") == "True" else None

        self.space.until("the rollout is over", probe, timeout, self._state)
        assert not self.broken, self.broken[:3]

    def _state(self) -> object:
        return (self.space.seen("GLM52Deployment", "chat") or {}).get("status"), self.broken[:3]


@contextlib.contextmanager
def floors(space: Space, **least: int) -> Iterator[Watched]:
    yield Watched(space, least)


def generation(obj: Object) -> int:
    return int(obj["metadata"]["generation"])


@pytest.fixture
def chat(space: Space, kubelets: Kubelets, operator: Process) -> Space:
    """Two prefill and three decode replicas that serve."""
    kubelets.live(LIFE, space.name)
    space.apply(deployment("chat", image="engine:1", prefill={"replicas": 2}, decode={"replicas": 3}))
    space.until_ready("chat")
    return space


def test_an_edit_replaces_pods_drained_and_keeps_floor_and_pairs(chat: Space) -> None:
    before = uids(chat, "prefill") | uids(chat, "decode")
    with floors(chat, prefill=1, decode=2) as watched:
        watched.until_ready(generation(chat.edit("chat", image="engine:2")))
    assert not before & (uids(chat, "prefill") | uids(chat, "decode"))
    assert {pod["spec"]["containers"][0]["image"] for pod in chat.pods("chat").values()} == {"engine:2"}
    told = [event for event in chat.all_seen("Event") if event.get("reason") == "Replacing"]
    assert len(told) == 5
    status = (chat.get("GLM52Deployment", "chat") or {})["status"]
    assert (status["upToDate"], status["decode"]["updatedReplicas"]) == ("6/6", 3)


def test_a_change_of_decode_alone_leaves_prefill_and_router_and_restart_does_not(chat: Space) -> None:
    prefill, router, decode = (uids(chat, part) for part in ("prefill", "router", "decode"))
    with floors(chat, prefill=2, decode=2) as watched:
        watched.until_ready(generation(chat.edit("chat", decode={"replicas": 3, "maxNumSeqs": 7})))
    assert uids(chat, "decode").isdisjoint(decode)
    assert (uids(chat, "prefill"), uids(chat, "router")) == (prefill, router)
    before = {part: uids(chat, part) for part in ("prefill", "decode", "router")}
    with floors(chat, prefill=1, decode=2) as watched:
        watched.until_ready(generation(chat.edit("chat", restart="2026-01-02")))
    assert all(uids(chat, part).isdisjoint(old) for part, old in before.items())


def test_a_stuck_image_stops_early_and_its_fix_needs_no_hand(chat: Space, kubelets: Kubelets) -> None:
    kubelets.lacks_image("engine:missing")
    with floors(chat, prefill=1, decode=2) as watched:
        chat.edit("chat", image="engine:missing")
        chat.until_condition("chat", "DecodeReady", reason="ImagePullBackOff")
        chat.until_condition("chat", "PrefillReady", reason="ImagePullBackOff")
        # Taken back: what serves is of that revision, and stays.
        kept = {pod["metadata"]["uid"] for role in ("prefill", "decode") for pod in serving(chat, role)}
        watched.until_ready(generation(chat.edit("chat", image="engine:1")))
        assert kept <= uids(chat, "prefill") | uids(chat, "decode")
        chat.edit("chat", image="engine:missing")
        chat.until_condition("chat", "DecodeReady", reason="ImagePullBackOff")
        watched.until_ready(generation(chat.edit("chat", image="engine:3")))


def test_a_paused_rollout_waits_and_suspend_drains_all(chat: Space) -> None:
    before = uids(chat, "decode")
    chat.apply(deployment("early", rollout={"paused": True}))
    chat.edit("chat", rollout={"paused": True}, restart="later")
    chat.until_condition("chat", "Progressing", reason="Paused")
    assert uids(chat, "decode") == before
    with floors(chat, prefill=1, decode=2) as watched:
        watched.until_ready(generation(chat.edit("chat", rollout={"paused": False})))
    assert uids(chat, "decode").isdisjoint(before)
    chat.edit("chat", suspend=True)
    chat.until_condition("chat", "Ready", reason="Suspended")
    chat.until("every pod is gone", lambda: not chat.pods("chat"))
    chat.until_ready("early")
    chat.until_ready("chat", generation(chat.edit("chat", suspend=False)))
    assert len(chat.pods("chat", "decode")) == 3


def test_an_operator_that_dies_again_and_again_and_scaling_in_between(chat: Space, operator: Process) -> None:
    with floors(chat, prefill=1, decode=2) as watched:
        chat.edit("chat", image="engine:2")
        for number, replicas in enumerate((4, 5)):
            first = uids(chat, "decode")
            chat.until("a decode pod was replaced", partial(_others, chat, first))
            operator.kill()
            chat.scale("chat", replicas)
            edited = chat.edit("chat", image=f"engine:{3 + number}")
            operator.start()
        watched.until_ready(generation(edited), timeout=120.0)
    assert len(chat.pods("chat", "decode")) == 5
    assert {pod["spec"]["containers"][0]["image"] for pod in chat.pods("chat").values()} == {"engine:4"}


def test_a_second_budget_holds_a_rollout_and_is_named(chat: Space) -> None:
    ours = {"glm52.dev/name": "chat", "glm52.dev/role": "decode"}
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "theirs"},
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": ours}},
    }
    chat.apply(budget)
    before = uids(chat, "decode")
    chat.edit("chat", decode={"replicas": 3, "maxNumSeqs": 9})
    chat.until(
        "the budget is named",
        lambda: "more than one PodDisruptionBudget" in _said(chat) or None,
        last=lambda: _said(chat),
    )
    assert uids(chat, "decode") == before
    chat.until_condition("chat", "DecodeReady", reason="RollingOut")


def test_an_eviction_that_broke_off_holds_the_rollout_only_for_another_pod(chat: Space) -> None:
    """An eviction charges the budget and then deletes the pod: its client can go away in between."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    charge = partial(chat.patch, "PodDisruptionBudget", "chat-decode", subresource="status")
    charge({"status": {"disruptedPods": {"chat-decode-1": now}}})
    before = uids(chat, "decode")
    edited = chat.edit("chat", decode={"replicas": 3, "maxNumSeqs": 9})
    chat.until(
        "what the budget lacks, and the pod, are named",
        lambda: "has 2 currently); the budget counts an eviction of chat-decode-1" in _said(chat) or None,
        last=lambda: _said(chat),
    )
    assert uids(chat, "decode") == before
    charge({"status": {"disruptedPods": {"chat-decode-1": None, "chat-decode-0": now}}})
    # Long before the two minutes are over after which the budget forgets it.
    chat.until_ready("chat", edited["metadata"]["generation"])


def _others(space: Space, known: set[str]) -> bool:
    return uids(space, "decode") != known


def _said(space: Space) -> str:
    status = (space.seen("GLM52Deployment", "chat") or {}).get("status", {})
    return " ".join(c["message"] for c in status.get("conditions", []))


def test_replicas_of_several_hosts_are_replaced_and_scaled_whole(
    space: Space, kubelets: Kubelets, operator: Process
) -> None:
    kubelets.live(LIFE, space.name)
    sizes = {"replicas": 2, "hostsPerReplica": 3}
    space.apply(deployment("chat", prefill={"replicas": 2}, decode=sizes))
    space.until_ready("chat")
    least = []

    def whole() -> int:
        hosts = {pod["metadata"]["name"] for pod in serving(space, "decode")}
        return sum({f"chat-decode-{3 * n + host}" for host in range(3)} <= hosts for n in range(2))

    def rolled() -> bool:
        least.append(whole())
        current = space.condition("chat", "Ready")
        return current.get("status") == "True" and current["observedGeneration"] == edited

    edited = generation(space.edit("chat", restart="now"))
    space.until("every replica was replaced", rolled, 90.0)
    assert min(least) == 1
    space.scale("chat", 1)
    space.until("the second replica is gone", lambda: sorted(space.pods("chat", "decode")) == LEFT)
    status = space.until_ready("chat")["status"]["decode"]
    assert (status["replicas"], status["readyReplicas"], status["ready"]) == (1, 1, "1/1")
    assert [pod["metadata"]["name"] for pod in space.cluster.listed("Pod", space.name, status["selector"])] == LEFT[:1]


def test_children_of_an_operator_before_are_taken_over_without_a_gap(
    space: Space, kubelets: Kubelets, installed: Installed
) -> None:
    kubelets.live(LIFE, space.name)
    made = space.apply(deployment("chat", image="engine:1", prefill={"replicas": 2}, decode={"replicas": 2}))
    resolved = resolve(made, None)
    assert isinstance(resolved, Target)
    for child in build(resolved):
        if child["kind"] == "StatefulSet":
            # As that operator made them: updated by their controller, configured by a ConfigMap.
            child["spec"]["updateStrategy"] = {"type": "RollingUpdate"}
            template = child["spec"]["template"]
            template["metadata"]["annotations"] = {"glm52.dev/config-hash": "0"}
            del template["metadata"]["labels"][KV]
            template["spec"]["volumes"][0] = {"name": "config", "configMap": {"name": "chat-engine"}}
        space.cluster.apply(child, manager="glm52-operator", force="true")
    space.until("the pods serve", lambda: len(serving(space, "decode")) == len(serving(space, "prefill")) == 2)
    installed.start()
    with floors(space, prefill=1, decode=1) as watched:
        watched.until_ready(generation(made))
    for role in ("prefill", "decode"):
        workload = space.get("StatefulSet", f"chat-{role}") or {}
        assert workload["spec"]["updateStrategy"] == {"type": "OnDelete"}
        assert "configMap" not in str(workload["spec"]["template"])
        assert all(KV in pod["metadata"]["labels"] for pod in space.pods("chat", role).values())
