"""A rollout as the reconciler carries it out, against an API server in a dict."""

from __future__ import annotations

import pytest

from glm52_operator import names
from glm52_operator.reconcile.kinds import BUDGET, BY_KIND, POD
from tests.operator.conftest import FakeClock
from tests.operator.world import KEY, World, new_world


@pytest.fixture
async def world(clock: FakeClock) -> World:
    """Two replicas of each role serve, and the controllers have just made a newer revision of decode."""
    made = new_world(clock)
    made.edit(prefill={"replicas": 2}, decode={"replicas": 2})
    await made.run()
    made.serve()
    await made.run()
    made.edit(decode={"replicas": 2, "maxNumSeqs": 3})
    await made.run()
    newer(made, "chat-decode")
    return made


def observed(world: World, kind: str, name: str) -> None:
    """Its controller has seen the last apply."""
    obj = world.api.find(kind, name)
    obj["status"]["observedGeneration"] = obj["metadata"]["generation"]
    world.api.put(BY_KIND[kind], obj)


def newer(world: World, name: str, revision: str = "r2") -> None:
    observed(world, "StatefulSet", name)
    obj = world.api.find("StatefulSet", name)
    obj["status"] |= {"updateRevision": revision, "updatedReplicas": 0}
    world.api.put(BY_KIND["StatefulSet"], obj)


def gone(world: World) -> list[tuple[str, str]]:
    return [(verb, name) for verb, kind, name in world.api.writes if kind == "Pod"]


async def test_a_replica_that_serves_is_evicted_and_told_of(world: World) -> None:
    await world.run()
    assert gone(world) == [("create", "chat-decode-0/eviction")]
    (told,) = [event for event in world.api.told if event["reason"] == "Replacing"]
    assert "chat-decode-0" in told["note"]
    decode = world.condition("DecodeReady")
    assert decode["reason"] == "RollingOut"
    assert "chat-decode-1 is next and waits: chat-decode-0 finishes its requests and goes" in decode["message"]
    assert world.condition("Progressing")["message"] == decode["message"]


async def test_a_pod_that_was_told_to_go_is_not_told_again_before_the_watch_shows_it(world: World) -> None:
    await world.run()
    world.api.calls.clear()
    # The store still holds the pod as it was listed: only our own note says that it leaves.
    assert world.store.get(POD, "ns", "chat-decode-0")["metadata"]["deletionTimestamp"]  # type: ignore[index]
    await world.reconciler.reconcile(KEY, 0)
    assert gone(world) == []


async def test_a_replica_that_cannot_serve_is_deleted_whatever_a_budget_says(world: World) -> None:
    pod = world.api.find("Pod", "chat-decode-1")
    pod["status"]["conditions"][0]["status"] = "False"
    pod["status"]["containerStatuses"] = [{"name": "engine", "started": False}]
    world.api.put(POD, pod)
    await world.run()
    assert gone(world) == [("delete", "chat-decode-1")]


async def test_a_disruption_budget_without_room_is_waited_for_and_named(world: World) -> None:
    refusal = "Cannot evict pod as it would violate the pod's disruption budget."
    world.api.refuse = lambda verb, kind, name: (429, refusal) if name.endswith("/eviction") else None
    result = await world.run()
    assert not result.failed
    assert result.requeue_after
    message = world.condition("DecodeReady")["message"]
    assert f"chat-decode-0 is next and waits: chat-decode-0 is not let go: {refusal}" in message
    assert not message.endswith("..")
    world.api.refuse = lambda verb, kind, name: None
    await world.run()
    assert gone(world) == [("create", "chat-decode-0/eviction")]


def charge(world: World, *pods: str) -> None:
    """As an eviction does before it deletes the pod."""
    budget = world.api.find("PodDisruptionBudget", "chat-decode")
    budget["status"] = {"disruptedPods": dict.fromkeys(pods, "2026-01-01T10:00:30Z")}
    world.api.put(BUDGET, budget)


def refuse_evictions(world: World) -> None:
    refusal = "Cannot evict pod as it would violate the pod's disruption budget."
    world.api.refuse = lambda verb, kind, name: (429, refusal) if name.endswith("/eviction") else None


def deleted(world: World) -> list[str]:
    return [name for verb, name in gone(world) if verb == "delete"]


async def test_an_eviction_of_another_pod_that_was_not_carried_out_is_named_with_its_end(world: World) -> None:
    charge(world, "chat-decode-1", "chat-decode-9")
    refuse_evictions(world)
    await world.run()
    message = world.condition("DecodeReady")["message"]
    assert (
        "budget; the budget counts an eviction of chat-decode-1 that was not carried out until 10:02:30 UTC." in message
    )
    assert deleted(world) == []
    leaving = world.api.find("Pod", "chat-decode-1")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T10:00:31Z"
    world.api.put(POD, leaving)
    await world.run()
    assert "not carried out" not in world.condition("DecodeReady")["message"]


async def test_an_eviction_of_the_pod_itself_that_was_not_carried_out_is_carried_out(world: World) -> None:
    charge(world, "chat-decode-0")
    refuse_evictions(world)
    await world.run()
    assert deleted(world) == ["chat-decode-0"]


async def test_a_charge_that_was_taken_back_meanwhile_lets_nothing_go(world: World) -> None:
    charge(world, "chat-decode-0")
    await world.list_all()
    charge(world)
    refuse_evictions(world)
    await world.reconciler.reconcile(KEY, 0)
    assert deleted(world) == []


@pytest.mark.parametrize("code", [404, 409])
async def test_a_pod_that_changed_meanwhile_is_left_for_the_next_pass(world: World, code: int) -> None:
    world.api.refuse = lambda verb, kind, name: (code, "changed") if name.endswith("/eviction") else None
    assert not (await world.run()).failed
    assert "deletionTimestamp" not in world.store.get(POD, "ns", "chat-decode-0")["metadata"]  # type: ignore[index]


async def test_only_the_very_pod_that_was_seen_is_evicted(world: World) -> None:
    await world.list_all()
    pod = world.api.find("Pod", "chat-decode-0")
    world.api.put(POD, {**pod, "metadata": {**pod["metadata"], "uid": "its successor"}})
    await world.reconciler.reconcile(KEY, 0)
    assert "deletionTimestamp" not in world.api.find("Pod", "chat-decode-0")["metadata"]


async def test_news_of_a_pod_do_not_keep_it_from_being_evicted(world: World) -> None:
    """A conflict would come after its budget was charged, which then has no room for two minutes."""
    await world.list_all()
    world.api.put(POD, world.api.find("Pod", "chat-decode-0"))
    await world.reconciler.reconcile(KEY, 0)
    assert "deletionTimestamp" in world.api.find("Pod", "chat-decode-0")["metadata"]


async def test_a_missing_permission_names_the_subresource(world: World) -> None:
    world.api.refuse = lambda verb, kind, name: (
        (403, 'pods is forbidden: User "op" cannot create') if name.endswith("/eviction") else None
    )
    assert (await world.run()).failed
    progressing = world.condition("Progressing")
    assert progressing["reason"] == "Forbidden"
    assert "the verb 'create' on 'pods/eviction'" in progressing["message"]


async def test_a_paused_rollout_says_so_and_goes_on_afterwards(world: World) -> None:
    world.edit(rollout={"paused": True})
    await world.run()
    observed(world, "Deployment", "chat-router")
    await world.run()
    assert gone(world) == []
    for kind in ("Ready", "Progressing", "DecodeReady"):
        assert (world.condition(kind)["status"], world.condition(kind)["reason"]) == ("False", "Paused")
    assert "0/2 are of the newest revision" in world.condition("DecodeReady")["message"]
    world.edit(rollout={})
    await world.run()
    assert gone(world) == [("create", "chat-decode-0/eviction")]


async def test_suspend_takes_everything_down_and_is_quiet_then(world: World) -> None:
    world.edit(suspend=True)
    await world.run()
    workloads = [world.api.find("StatefulSet", f"chat-{role}") for role in names.ROLES]
    workloads.append(world.api.find("Deployment", "chat-router"))
    assert {workload["spec"]["replicas"] for workload in workloads} == {0}
    assert gone(world) == [], "the controllers take the pods away"
    for key in [key for key in world.api.objects if key[0] is POD]:
        del world.api.objects[key]
    world.serve()
    result = await world.run()
    assert (world.condition("Ready")["status"], world.condition("Ready")["reason"]) == ("False", "Suspended")
    assert world.condition("Progressing")["reason"] == "Suspended"
    assert result.requeue_after is None
    await world.run()
    assert world.api.writes == []
    world.edit(suspend=False)
    await world.run()
    assert world.api.find("StatefulSet", "chat-decode")["spec"]["replicas"] == 2


async def test_a_deployment_that_begins_paused_gets_its_router(clock: FakeClock) -> None:
    world = new_world(clock)
    world.edit(rollout={"paused": True})
    await world.run()
    # A Deployment's controller makes no pods of one that was paused before it had seen it.
    await world.run()
    assert "paused" not in world.api.find("Deployment", "chat-router")["spec"]
    world.serve()
    await world.run()
    assert world.api.find("Deployment", "chat-router")["spec"]["paused"] is True
    observed(world, "Deployment", "chat-router")
    await world.run()
    assert world.condition("Ready")["status"] == "True"
    world.api.calls.clear()
    await world.run()
    assert world.api.writes == []
