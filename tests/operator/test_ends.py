"""Passes over a deployment whose pods crash and leave."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from glm52_engine.config import Hold, Outcome
from glm52_operator import names
from glm52_operator.plan.drains import Heard
from glm52_operator.plan.escalation import Crash, CrashPolicy, Series
from glm52_operator.plan.restarts import Members, Restart, SetHold, actions
from glm52_operator.reconcile.kinds import POD
from glm52_operator.reconcile.reconciler import Result
from glm52_operator.status.ends import replica_of, replicas
from tests.operator import world as module
from tests.operator.builders import pod, target
from tests.operator.conftest import FakeClock
from tests.operator.ends import (
    BACKING_OFF,
    NOW,
    RUNNING,
    at,
    crashed,
    stamp,
    terminated,
    told,
    with_container,
)
from tests.operator.world import KEY, World, new_world

DECODE = "chat-decode-0"
POLICY = {"maxRestarts": 3, "backoffBaseSeconds": 60, "resetSeconds": 3600}


@pytest.fixture
async def world(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(module, "NOW", NOW)
    made = new_world(clock)
    made.edit(decode={"replicas": 2}, crashPolicy=POLICY)
    await made.run()
    made.serve()
    assert await made.run() == Result()
    return made


def status(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.api.find(names.KIND, "chat")["status"]
    return found


def conditions(world: World) -> dict[str, Any]:
    return {c["type"]: c for c in status(world)["conditions"]}


def put(world: World, made: Any) -> None:
    world.api.put(POD, made)


def holds(world: World) -> dict[str, Hold | None]:
    found = {name: obj for (kind, _, name), obj in world.api.objects.items() if kind is POD}
    return {
        name: Hold.decode(obj["metadata"].get("annotations", {}).get(names.HOLD, "")) for name, obj in found.items()
    }


def reasons(world: World) -> list[str]:
    return [event["reason"] for event in world.api.told]


async def crash(world: World, *seconds: float, name: str = DECODE, state: Any = BACKING_OFF) -> None:
    """The pod crashes at these times, one after the other, each seen by a pass."""
    for when in seconds:
        old = world.api.objects[POD, "ns", name]["metadata"].get("annotations", {})
        made = with_container(name, state, crashed(when, "rank 1 failed", rank=1))
        made["metadata"]["annotations"] = old
        put(world, made)
        await world.run()


async def test_a_crash_is_told_once_whoever_looks(world: World) -> None:
    await crash(world, -50)
    (entry,) = status(world)["crashes"]
    assert (entry["pod"], entry["node"], entry["rank"], entry["exitCode"]) == (DECODE, "worker", 1, 70)
    assert (entry["reason"], entry["marker"], entry["time"]) == ("Crashed", "CRASH_chat-decode-0", stamp(-50))
    assert reasons(world).count("Crashed") == 2  # the crash, and that DecodeReady is False for it
    world.start()
    await world.run()
    assert world.api.writes == []
    # Its place serves again: what happened stays, and nothing is held.
    put(world, pod(DECODE, ready=True))
    await world.run()
    assert status(world)["crashes"] == [entry]
    assert conditions(world)["Ready"]["status"] == "True"
    assert set(holds(world).values()) == {None}


async def test_each_further_crash_holds_the_next_start_for_longer_and_no_other_replica(world: World) -> None:
    await crash(world, -300)
    assert holds(world)[DECODE] is None
    await crash(world, -10)
    held = holds(world)[DECODE]
    assert held is not None
    assert held.until == at(50)
    assert "crashed 2 times" in held.why
    assert status(world)["restarts"][0]["heldUntil"] == stamp(50)
    assert [write for write in world.api.writes if write[1] == "Pod"] == [("patch", "Pod", DECODE)]
    assert holds(world)["chat-decode-1"] is None
    world.start()
    await world.run()
    assert world.api.writes == []


async def test_after_too_many_it_is_latched_until_the_specification_is_changed(world: World) -> None:
    await crash(world, -300, -200, -100)
    degraded = conditions(world)["Degraded"]
    assert (degraded["status"], degraded["reason"]) == ("True", "CrashLoop")
    for part in (DECODE, "3 times within 3600 s", "on node worker", "rank 1 failed", "spec.restart"):
        assert part in degraded["message"]
    assert holds(world)[DECODE] == Hold(why="crashed 3 times within 3600 s")
    assert "CrashLoop" in reasons(world)
    # An autoscaler is no person.
    world.edit(decode={"replicas": 3})
    await world.run()
    assert conditions(world)["Degraded"]["status"] == "True"
    world.edit(restart="now")
    await world.run()
    assert "Degraded" not in conditions(world)
    # The engine in it waits for good: another pod takes its place.
    assert [write for write in world.api.writes if write[1] == "Pod"] == [("delete", "Pod", DECODE)]
    assert "NoDegraded" in reasons(world)
    assert len(status(world)["crashes"]) == 3


async def test_what_an_edit_forgave_stays_so_while_its_replica_is_scaled_away_and_back(world: World) -> None:
    name = "chat-decode-1"
    await crash(world, -100, name=name)
    world.edit(crashPolicy={**POLICY, "maxRestarts": 1})
    await world.run()
    put(world, with_container(name, RUNNING, crashed(-100), leaves=(-5, 60)))
    for replicas_ in (1, 2):
        world.edit(decode={"replicas": replicas_})
        await world.run()
    assert "Degraded" not in conditions(world)
    assert [(entry["replica"], entry["count"]) for entry in status(world)["restarts"]] == [(name, 0)]
    # With its pod it is forgotten.
    world.edit(decode={"replicas": 1})
    del world.api.objects[POD, "ns", name]
    await world.run()
    await world.run()
    assert "restarts" not in status(world)


async def test_a_refused_configuration_burns_nothing(world: World) -> None:
    for when in (-300, -200, -100, -50):
        ended = terminated(when, 78, message=told(Outcome.CONFIG_REFUSED, "no config.json"))
        put(world, with_container(DECODE, BACKING_OFF, ended))
        await world.run()
    assert "crashes" not in status(world)
    assert "restarts" not in status(world)
    assert conditions(world)["DecodeReady"]["reason"] == "ConfigRefused"


async def test_routers_that_crash_are_told_and_never_held(world: World) -> None:
    put(world, pod("chat-router-0", role="router", containerStatuses=[]))
    for when in (-300, -200, -100):
        made = with_container("chat-router-0", BACKING_OFF, crashed(when), role="router")
        put(world, made)
        await world.run()
    assert "not started any more, but for routers: chat-router." in conditions(world)["Degraded"]["message"]
    assert not [write for write in world.api.writes if write[1] == "Pod"]


async def test_a_missing_permission_to_hold_is_told(world: World) -> None:
    world.api.refuse = lambda verb, kind, name: (
        (403, 'is forbidden: User "op" cannot patch resource "pods"') if (verb, kind) == ("patch", POD) else None
    )
    await crash(world, -300, -10)
    assert "'patch' on 'pods'" in conditions(world)["Progressing"]["message"]
    assert len(status(world)["crashes"]) == 2


async def leave(world: World, name: str, state: Any = RUNNING) -> Any:
    made = with_container(name, state, leaves=(-10, 60))
    put(world, made)
    await world.run()
    return made


async def test_a_pod_that_leaves_is_followed_and_its_end_is_told_though_it_is_gone(world: World) -> None:
    made = await leave(world, "chat-decode-1")
    draining = conditions(world)["Draining"]
    assert (draining["status"], draining["reason"]) == ("True", "PodsLeaving")
    (entry,) = status(world)["drains"]
    assert (entry["phase"], entry["startedAt"], entry["deadline"]) == ("Draining", stamp(-10), stamp(50))
    last = {**made, "status": {**made["status"]}}
    ended = terminated(-1, 75, message=told(Outcome.DRAIN_TIMED_OUT, in_flight=2))
    last["status"]["containerStatuses"] = [{"name": "engine", "state": {"terminated": ended}}]
    # The last change and the deletion come together: no pass sees the pod in between.
    world.store.observe(POD, {**last, "metadata": {**last["metadata"], "resourceVersion": "9000"}})
    del world.api.objects[POD, "ns", "chat-decode-1"]
    world.store.remove(POD, last)
    assert await world.reconciler.reconcile(KEY, 0)
    (entry,) = status(world)["drains"]
    assert (entry["phase"], entry["outcome"], entry["cutOff"]) == ("Ended", "DrainTimedOut", 2)
    assert conditions(world)["Draining"]["status"] == "False"
    assert "DrainTimedOut" in reasons(world)
    assert "crashes" not in status(world)
    assert world.store.departed(KEY) == []
    world.start()
    await world.run()
    assert world.api.writes == []


async def test_what_a_status_could_not_take_is_not_forgotten(world: World) -> None:
    made = await leave(world, "chat-decode-1", {"terminated": terminated(-1, 0, message=told(Outcome.DRAINED))})
    world.api.refuse = lambda verb, kind, name: (500, "busy") if name.endswith("/status") else None
    del world.api.objects[POD, "ns", "chat-decode-1"]
    assert (await world.run()).failed
    world.api.refuse = lambda verb, kind, name: None
    await world.run(1)
    (entry,) = status(world)["drains"]
    assert (entry["uid"], entry["outcome"]) == (made["metadata"]["uid"], "Drained")


async def test_pods_that_leave_are_asked_how_far_they_are(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    listener = type(world.reconciler.listener)
    monkeypatch.setattr(listener, "follow", lambda self, key, pods: asked.append(dict(pods)))
    monkeypatch.setattr(listener, "heard", lambda self, key: {"uid-chat-decode-1": Heard(7)})
    await leave(world, "chat-decode-1")
    assert asked[-1] == {"uid-chat-decode-1": "10.0.0.9"}
    assert status(world)["drains"][0]["inFlight"] == 7
    assert "7 in flight" in conditions(world)["Draining"]["message"]


async def test_a_pod_that_does_not_get_away_is_an_alarm_with_its_node(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave(world, "chat-decode-1")
    monkeypatch.setattr(module, "NOW", at(100))
    await world.run()
    stalled = conditions(world)["Stalled"]
    assert (stalled["status"], stalled["reason"]) == ("True", "StuckTerminating")
    assert "chat-decode-1 on node worker" in stalled["message"]
    assert not [write for write in world.api.writes if write[0] == "delete"]


GRACE = 17
RULES = CrashPolicy(backoff_base=60, backoff_max=600, max_restarts=4, reset=datetime.timedelta(hours=1))


def host(number: int, born: float, *, ready: bool = False, hold: Hold | None = None, leaving: bool = False) -> Any:
    made = pod(f"chat-decode-{number}", ready=ready, leaving=leaving)
    made["metadata"] |= {"creationTimestamp": stamp(born), "resourceVersion": "5"}
    made["metadata"]["annotations"] = {names.HOLD: hold.encode()} if hold else {}
    return made


def fallen(*seconds: float, latched: bool = False) -> Series:
    return Series("chat-decode-0", "s", tuple(Crash(f"c{s}", "chat-decode-1", at(s)) for s in seconds), latched=latched)


def test_the_hosts_of_a_replica_that_crashed_begin_anew_together_once_it_may_start() -> None:
    hosts = [host(n, -500) for n in range(4)]
    members = {"chat-decode-0": Members(4, hosts, GRACE)}
    first = actions([fallen(-5)], members, RULES, NOW)
    assert [(type(a), a.pod) for a in first] == [(Restart, f"chat-decode-{n}") for n in range(4)]
    # After the second crash they wait, every one of them, and go when the time is over.
    second = actions([fallen(-100, -5)], members, RULES, NOW)
    assert {type(a) for a in second} == {SetHold}
    assert len(second) == 4
    assert len(actions([fallen(-200, -65)], members, RULES, NOW)) == 4
    # What was made since, what leaves, and a replica that came back by itself are left alone.
    mixed = [host(0, -500), host(1, -2), host(2, -500, leaving=True)]
    left = {"chat-decode-0": Members(4, mixed, GRACE)}
    assert [a.pod for a in actions([fallen(-5)], left, RULES, NOW)] == ["chat-decode-0"]
    well = [host(n, -500, ready=True) for n in range(4)]
    assert actions([fallen(-5)], {"chat-decode-0": Members(4, well, GRACE)}, RULES, NOW) == []


def test_pods_are_counted_by_the_replica_that_they_are_hosts_of() -> None:
    made = target(decode={"replicas": 2, "hostsPerReplica": 2})
    names_ = [f"chat-decode-{number}" for number in range(5)]
    hosts = [pod(name) for name in names_]
    assert [replica_of(each, made) for each in hosts] == [names_[number] for number in (0, 0, 2, 2, 4)]
    assert replica_of(pod("chat-router-x", role="router"), made) == "chat-router"
    found = replicas(made, {"decode": hosts})
    # What a smaller number of replicas has no room for is nobody's to restart.
    assert {leader: len(members.pods) for leader, members in found.items()} == {
        "chat-prefill-0": 0,
        "chat-decode-0": 2,
        "chat-decode-2": 2,
    }


def test_one_host_alone_is_its_kubelets_to_restart() -> None:
    assert actions([fallen(-5)], {"chat-decode-0": Members(1, [host(0, -500)], GRACE)}, RULES, NOW) == []


def test_a_hold_that_is_right_is_not_written_again_and_one_that_is_over_is_left() -> None:
    held = Hold(until=at(55), why="crashed 2 times within 3600 s")
    right = {"chat-decode-0": Members(1, [host(0, -500, hold=held)], GRACE)}
    assert actions([fallen(-100, -5)], right, RULES, NOW) == []
    assert actions([fallen(-100, -5)], right, RULES, at(56)) == []
    other = actions([fallen(-100, -5, -1)], right, RULES, NOW)
    assert [Hold.decode(a.hold) for a in other if isinstance(a, SetHold)] == [
        Hold(until=at(119), why="crashed 3 times within 3600 s")
    ]
