"""Passes over one deployment against an API server in a dict."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from glm52_operator import names
from glm52_operator.desired.children import build
from glm52_operator.reconcile.apply import AT_ONCE, SECRET_RECHECK_SECONDS, WAITING_SECONDS
from glm52_operator.reconcile.kinds import BY_KIND, DEPLOYMENT_RESOURCE, NODE, POD, SECRET, Kind
from glm52_operator.reconcile.nodes import FRESH_SECONDS, REFUSED_SECONDS
from glm52_operator.reconcile.reconciler import ACTING, QUIET_ATTEMPTS, SETTLING, SOON, Result
from tests.operator.builders import listed, node, pod, resource, target
from tests.operator.conftest import FakeClock
from tests.operator.world import KEY, World, new_world


@pytest.fixture
def world(clock: FakeClock) -> World:
    return new_world(clock)


async def test_a_new_deployment_gets_its_children_and_every_condition(world: World) -> None:
    result = await world.run()
    assert not result.failed
    assert result.requeue_after
    kinds = {(c["kind"], c["metadata"]["name"]) for c in build(target())}
    assert {(k, n) for verb, k, n in world.api.writes if verb == "patch" and "/" not in n} == kinds
    assert world.condition("Ready")["reason"] == "Applying"
    assert world.api.find(names.KIND, "chat")["status"]["decode"]["ready"] == "0/1"


async def test_ready_and_then_nothing_is_written(world: World) -> None:
    await world.run()
    world.serve()
    assert await world.run() == Result()
    assert world.condition("Ready")["status"] == "True"
    assert world.api.writes == [("patch", names.KIND, "chat/status")]
    assert await world.run() == Result()
    assert world.api.writes == []


async def test_a_restarted_operator_writes_nothing(world: World) -> None:
    await world.run()
    world.serve()
    await world.run()
    world.start()
    assert await world.run() == Result()
    assert world.api.writes == []


async def test_ready_is_gone_in_the_very_write_that_speaks_of_the_new_generation(world: World) -> None:
    await world.run()
    world.serve()
    await world.run()
    world.edit(decode={"maxNumSeqs": 3})
    await world.run()
    ready = world.condition("Ready")
    assert (ready["status"], ready["observedGeneration"]) == ("False", 2)
    assert [w for w in world.api.writes if w[1] == names.KIND] == [("patch", names.KIND, "chat/status")]


def statuses(world: World) -> list[str]:
    return [name for _, kind, name in world.api.writes if kind == names.KIND]


async def scale(world: World, replicas: int) -> Result:
    world.edit(decode={"replicas": replicas})
    await world.list_all()
    return await world.reconciler.reconcile(KEY, 0)


async def test_a_scale_that_controllers_follow_at_once_is_told_once(world: World) -> None:
    await world.run()
    world.serve()
    await world.run()
    assert await scale(world, 2) == Result(requeue_after=ACTING)
    assert statuses(world) == []
    world.serve()
    await world.list_all()
    await world.reconciler.reconcile(KEY, 0)
    assert statuses(world) == ["chat/status"]
    assert world.condition("Ready")["status"] == "True"
    assert world.api.find(names.KIND, "chat")["status"]["decode"]["ready"] == "2/2"


async def test_a_change_that_no_controller_follows_is_told_however_often_it_is_edited(
    world: World, clock: FakeClock
) -> None:
    await world.run()
    world.serve()
    await world.run()
    await scale(world, 2)
    clock.advance(ACTING / 2)
    assert (await scale(world, 3)).requeue_after == ACTING / 2
    clock.advance(ACTING / 2)
    await scale(world, 4)
    assert statuses(world) == ["chat/status"]
    assert world.condition("Ready")["reason"] == "Applying"


async def test_a_deployment_takes_few_connections_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0
    apply = world.api.apply

    async def slow(*arguments: Any, **more: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await apply(*arguments, **more)

    monkeypatch.setattr(world.api, "apply", slow)
    await world.run()
    assert 2 <= most <= AT_ONCE


async def test_a_refusal_is_told_at_once(world: World) -> None:
    await world.run()
    world.serve()
    await world.run()
    world.api.refuse = lambda verb, kind, name: (403, "no") if kind.kind == "PodDisruptionBudget" else None
    assert (await scale(world, 2)).failed
    assert world.condition("Progressing")["reason"] == "Forbidden"


async def test_an_edit_that_the_answer_to_a_status_brings_is_acted_upon(world: World) -> None:
    await world.run()

    def edit_once(verb: str, kind: Kind, name: str) -> None:
        if name == "chat/status":
            world.api.refuse = lambda verb, kind, name: None
            world.edit(decode={"replicas": 5})

    world.serve()
    await world.list_all()
    world.api.refuse = edit_once
    result = await world.reconciler.reconcile(KEY, 0)
    # The event of this edit is older than what is known by then, so that nobody would be called.
    seen = world.store.get(DEPLOYMENT_RESOURCE, *KEY)
    assert seen is not None
    assert not world.store.observe(DEPLOYMENT_RESOURCE, seen)
    assert result.again
    await world.reconciler.reconcile(KEY, 0)
    assert world.api.find("StatefulSet", "chat-decode")["spec"]["replicas"] == 5


async def test_scaling_writes_one_stateful_set_and_rolls_nothing(world: World) -> None:
    await world.run()
    world.serve()
    await world.run()
    world.edit(decode={"replicas": 3})
    await world.run()
    patched = {name for verb, kind, name in world.api.writes if kind != names.KIND}
    # The other workloads carry the same configuration.
    assert patched == {"chat-decode"}
    assert world.api.find(names.KIND, "chat")["status"]["decode"]["ready"] == "1/3"


async def test_an_edit_of_a_child_is_repaired(world: World) -> None:
    await world.run()
    world.serve()
    await world.run()
    service = world.api.find("Service", "chat-decode")
    service["spec"]["selector"] = {"app": "other"}
    world.api.put(BY_KIND["Service"], service)
    await world.run()
    assert world.api.writes == [("patch", "Service", "chat-decode")]
    assert world.api.find("Service", "chat-decode")["spec"]["selector"] == names.selector("chat", "decode")


async def test_the_secret_is_made_once_and_never_written_again(world: World) -> None:
    await world.run()
    token = world.api.find("Secret", "chat-internal")["data"]["token"]
    assert len(base64.b64decode(token)) >= 32
    world.start()
    world.edit(decode={"maxNumSeqs": 3})
    await world.run()
    assert not [w for w in world.api.writes if w[1] == "Secret"]
    assert world.api.find("Secret", "chat-internal")["data"]["token"] == token


async def test_a_deleted_secret_is_made_again_before_pods_that_need_it(world: World) -> None:
    await world.run()
    del world.api.objects[SECRET, "ns", "chat-internal"]
    world.clock.advance(SECRET_RECHECK_SECONDS + 1)
    world.edit(decode={"maxNumSeqs": 3})
    await world.run()
    writes = world.api.writes
    assert writes.index(("create", "Secret", "chat-internal")) < writes.index(("patch", "StatefulSet", "chat-decode"))


async def test_a_deleted_secret_is_made_again_when_a_pod_waits(world: World) -> None:
    await world.run()
    world.serve()
    await world.run()
    del world.api.objects[SECRET, "ns", "chat-internal"]
    world.clock.advance(SECRET_RECHECK_SECONDS + 1)
    waits = pod("chat-decode-0", role="decode", ready=False)
    world.api.put(POD, {**waits, "status": {"phase": "Pending"}})
    await world.run()
    assert ("create", "Secret", "chat-internal") not in world.api.writes
    world.clock.advance(WAITING_SECONDS)
    await world.run()
    assert ("create", "Secret", "chat-internal") in world.api.writes


async def test_scaling_waits_for_no_look_at_the_secret(world: World) -> None:
    await world.run()
    world.serve()
    await world.run()
    world.clock.advance(SECRET_RECHECK_SECONDS + 1)
    world.edit(decode={"replicas": 2})
    await world.run()
    assert ("patch", "StatefulSet", "chat-decode") in world.api.writes
    assert not [call for call in world.api.calls if call[1] == "Secret"]


async def test_what_takes_minutes_begins_before_the_rest_and_with_nothing_looked_up(world: World) -> None:
    """Of many new deployments every StatefulSet comes before any Service: the key goes to the end of the queue."""
    await world.list_all()
    assert (await world.reconciler.reconcile(KEY, 0)).again
    assert world.api.calls == [
        ("create", "Secret", "chat-internal"),
        ("patch", "StatefulSet", "chat-prefill"),
        ("patch", "StatefulSet", "chat-decode"),
    ]


async def test_a_scale_waits_for_nothing_else(world: World) -> None:
    await world.run()
    world.edit(decode={"replicas": 2}, router={"replicas": 2, "service": {"type": "NodePort"}})
    await world.run()
    assert world.api.writes[0] == ("patch", "StatefulSet", "chat-decode")
    assert ("patch", "Service", "chat-router") in world.api.writes


async def test_somebody_elses_object_is_left_alone_and_named(world: World) -> None:
    foreign = {"metadata": {"namespace": "ns", "name": "chat-router", "labels": {}}, "spec": {"theirs": True}}
    world.api.put(BY_KIND["Deployment"], foreign)
    listed(world.store, DEPLOYMENT_RESOURCE, None, [world.api.find(names.KIND, "chat")], "1000")
    assert (await world.reconciler.reconcile(KEY, 0)).again
    result = await world.reconciler.reconcile(KEY, 0)
    assert result.failed
    assert world.api.find("Deployment", "chat-router")["spec"] == {"theirs": True}
    assert world.condition("RouterReady")["reason"] == "NameTaken"
    assert "Deployment chat-router" in world.condition("Ready")["message"]


async def test_children_of_a_deleted_namesake_are_waited_for(world: World) -> None:
    await world.run()
    del world.api.objects[DEPLOYMENT_RESOURCE, "ns", "chat"]
    world.api.put(DEPLOYMENT_RESOURCE, resource(uid="second"))
    world.start()
    result = await world.run()
    assert result.failed
    assert world.api.writes == []
    for key in [k for k in world.api.objects if k[0] is not DEPLOYMENT_RESOURCE]:
        del world.api.objects[key]
    world.clock.advance(60)
    await world.run(1)
    assert world.api.find("StatefulSet", "chat-decode")["metadata"]["ownerReferences"][0]["uid"] == "second"


async def test_a_child_that_is_no_longer_wanted_is_deleted(world: World) -> None:
    await world.run()
    extra = {**world.api.find("Service", "chat-decode")}
    extra["metadata"] = {**extra["metadata"], "name": "chat-former", "uid": "former"}
    world.api.put(BY_KIND["Service"], extra)
    await world.run()
    assert ("delete", "Service", "chat-former") in world.api.writes


async def test_a_missing_permission_is_told_with_verb_and_resource(world: World) -> None:
    world.api.refuse = lambda verb, kind, name: (
        (403, 'is forbidden: User "op" cannot patch resource "statefulsets"')
        if (verb, kind.kind) == ("patch", "StatefulSet")
        else None
    )
    assert (await world.run()).failed
    progressing = world.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "Forbidden")
    assert "'patch' on 'statefulsets.apps'" in progressing["message"]
    # What does not depend on it is there.
    assert world.api.find("Deployment", "chat-router")
    world.api.refuse = lambda verb, kind, name: None
    assert not (await world.run(1)).failed
    assert world.condition("Progressing")["reason"] == "Applying"


async def test_pods_wait_for_what_they_mount(world: World) -> None:
    world.api.refuse = lambda verb, kind, name: (403, "exceeded quota: q") if kind.kind == "Secret" else None
    await world.run()
    kinds = {kind for _, kind, _ in world.api.writes}
    assert "StatefulSet" not in kinds
    assert world.condition("DecodeReady")["reason"] == "QuotaExceeded"


async def test_a_short_outage_is_retried_before_it_is_told(world: World) -> None:
    world.api.refuse = lambda verb, kind, name: (503, "busy") if kind.kind == "Service" else None
    for attempt in range(QUIET_ATTEMPTS):
        assert (await world.run(attempt)).failed
        assert "status" not in world.api.find(names.KIND, "chat")
    assert (await world.run(QUIET_ATTEMPTS)).failed
    assert world.condition("Progressing")["reason"] == "ApiError"


async def test_a_status_that_cannot_be_written_is_a_failure(world: World) -> None:
    world.api.refuse = lambda verb, kind, name: (403, "no") if name.endswith("/status") else None
    assert (await world.run()).failed


async def test_pods_that_the_api_server_refuses_are_explained(world: World) -> None:
    await world.run()
    obj = world.api.find("StatefulSet", "chat-decode")
    obj["status"] = {"observedGeneration": 1, "replicas": 0}
    world.api.put(BY_KIND["StatefulSet"], obj)
    world.api.events = [{"metadata": {}, "message": "exceeded quota: pods=0", "lastTimestamp": "2026"}]
    assert (await world.run()).requeue_after == SETTLING
    # It may be about to make them.
    assert world.condition("DecodeReady")["reason"] != "PodsRefused"
    world.clock.advance(SETTLING)
    assert (await world.run()).requeue_after == SOON
    decode = world.condition("DecodeReady")
    assert decode["reason"] == "PodsRefused"
    assert "exceeded quota: pods=0" in decode["message"]


async def test_an_invalid_specification_touches_no_child(world: World) -> None:
    await world.run()
    world.serve()
    await world.run()
    world.edit(decode={"warp": 1})
    assert await world.run() == Result()
    assert world.api.writes == [("patch", names.KIND, "chat/status")]
    assert world.condition("ConfigValid")["reason"] == "InvalidSpec"
    assert world.condition("Ready")["status"] == "False"


@pytest.mark.parametrize("deleted", [True, False])
async def test_a_deployment_that_goes_is_left_to_the_garbage_collector(world: World, deleted: bool) -> None:
    await world.run()
    if deleted:
        del world.api.objects[DEPLOYMENT_RESOURCE, "ns", "chat"]
    else:
        world.api.find(names.KIND, "chat")["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        world.api.put(DEPLOYMENT_RESOURCE, world.api.find(names.KIND, "chat"))
    assert await world.run() == Result()
    assert world.api.writes == []


async def test_short_nodes_are_told_before_a_pod_waits(world: World) -> None:
    world.api.put(NODE, node("worker", "6Gi"))
    await world.run()
    schedulable = world.condition("Schedulable")
    assert (schedulable["status"], schedulable["reason"]) == ("False", "NoRoom")
    world.api.put(NODE, node("worker", "64Gi"))
    await world.run()
    assert world.condition("Schedulable")["status"] == "False"
    world.clock.advance(FRESH_SECONDS)
    await world.run()
    assert world.condition("Schedulable")["status"] == "True"


async def test_the_nodes_are_listed_once_for_all_and_not_at_rest(world: World) -> None:
    listed = [("list", "Node", ""), ("list", "Pod", "")]
    await world.run()
    assert [call for call in world.api.calls if call[0] == "list" and call[1] != "Event"] == listed
    await world.run()
    assert not [call for call in world.api.calls if call[:2] == ("list", "Node")]
    world.serve()
    world.clock.advance(FRESH_SECONDS)
    await world.run()
    assert world.condition("Schedulable")["reason"] == "Placed"
    assert not [call for call in world.api.calls if call[0] == "list"]


async def test_without_permission_it_is_unknown_and_says_so(world: World) -> None:
    world.api.refuse_list = lambda kind: (403, "nodes is forbidden") if kind is NODE else None
    world.api.put(NODE, node("worker", "64Gi"))
    assert not (await world.run()).failed
    schedulable = world.condition("Schedulable")
    assert (schedulable["status"], schedulable["reason"]) == ("Unknown", "Forbidden")
    assert "may not list nodes" in schedulable["message"]
    assert "rbac.clusterWide=true" in schedulable["message"]
    world.api.refuse_list = lambda kind: None
    world.clock.advance(FRESH_SECONDS)
    await world.run()
    assert world.condition("Schedulable")["status"] == "Unknown"
    world.clock.advance(REFUSED_SECONDS)
    await world.run()
    assert world.condition("Schedulable")["status"] == "True"
