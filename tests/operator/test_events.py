"""Events that passes leave behind, against an API server in a dict."""

from __future__ import annotations

import logging

import pytest

from glm52_operator.reconcile.kinds import BY_KIND, EVENT_V1
from glm52_operator.reconcile.reconciler import Result
from tests.operator.conftest import FakeClock
from tests.operator.fake_api import FakeApi
from tests.operator.world import World, new_world


@pytest.fixture
def world(clock: FakeClock) -> World:
    return new_world(clock)


def told(api: FakeApi, reason: str) -> list[str]:
    return [event["note"] for event in api.told if event["reason"] == reason]


async def served(world: World) -> None:
    await world.run()
    world.serve()
    await world.run()


async def test_ready_is_told_once_and_not_again_by_the_next_process(world: World) -> None:
    await served(world)
    assert len(told(world.api, "Ready")) == 1
    for _ in range(2):
        world.start()
        await world.run()
        assert not [call for call in world.api.calls if call[1] == EVENT_V1.kind]


async def test_a_status_that_was_not_written_is_not_told(world: World) -> None:
    await world.run()
    world.serve()
    world.api.refuse = lambda verb, kind, name: (500, "no") if name.endswith("/status") else None
    assert (await world.run()).failed
    assert told(world.api, "Ready") == []
    world.api.refuse = lambda verb, kind, name: None
    await world.run()
    assert len(told(world.api, "Ready")) == 1


@pytest.mark.parametrize("gone", [True, False])
async def test_what_somebody_else_did_to_a_child_is_told(world: World, gone: bool) -> None:
    await served(world)
    service = world.api.find("Service", "chat-decode")
    if gone:
        del world.api.objects[BY_KIND["Service"], "ns", "chat-decode"]
    else:
        service["spec"]["selector"] = {"app": "other"}
        world.api.put(BY_KIND["Service"], service)
    await world.run()
    (note,) = told(world.api, "Repaired")
    assert "Service chat-decode" in note
    assert gone or ".spec.selector" in note


async def test_what_the_operator_changes_itself_is_no_repair(world: World) -> None:
    await served(world)
    world.edit(decode={"replicas": 3})
    await world.run()
    assert told(world.api, "Scaled") == ["decode: scaled from 1 to 3 replicas."]
    assert told(world.api, "NotReady") == []
    # A former version of the operator wanted something else.
    world.serve()
    await world.run()
    service = world.api.find("Service", "chat-decode")
    service["metadata"]["annotations"] = {"glm52.dev/applied-hash": "former"}
    world.api.put(BY_KIND["Service"], service)
    await world.run()
    assert told(world.api, "Repaired") == []


async def test_a_repeat_joins_the_event_that_is_there(world: World) -> None:
    await served(world)
    for _ in range(3):
        service = world.api.find("Service", "chat-decode")
        service["spec"]["selector"] = {"app": "other"}
        world.api.put(BY_KIND["Service"], service)
        await world.run()
    (event,) = (event for event in world.api.told if event["reason"] == "Repaired")
    assert event["series"]["count"] == 3


async def test_a_refused_child_is_told(world: World) -> None:
    world.api.refuse = lambda verb, kind, name: (
        (403, "exceeded quota: q") if (verb, kind.kind) == ("patch", "StatefulSet") else None
    )
    await world.run()
    assert [note.split(":")[0] for note in told(world.api, "QuotaExceeded")] == [
        "cannot patch StatefulSet chat-prefill",
        "cannot patch StatefulSet chat-decode",
    ]


async def test_events_that_cannot_be_written_fail_nothing_and_are_named_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    forbidden = 'events.events.k8s.io is forbidden: User "op" cannot patch resource "events"'
    world.api.refuse = lambda verb, kind, name: (403, forbidden) if kind is EVENT_V1 else None
    with caplog.at_level(logging.WARNING, "glm52.events"):
        await world.run()
        world.serve()
        assert await world.run() == Result()
        world.edit(decode={"replicas": 2})
        await world.run()
    assert world.condition("Ready")["observedGeneration"] == 2
    (record,) = (record for record in caplog.records if record.name == "glm52.events")
    assert "'patch' on 'events.events.k8s.io'" in record.getMessage()
