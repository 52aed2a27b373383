"""Liveness is about progress."""

from __future__ import annotations

from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from glm52_operator.reconcile.health import Health, application
from glm52_operator.reconcile.kinds import POD, SECRET
from glm52_operator.reconcile.queue import WorkQueue
from tests.operator.conftest import FakeClock


def health(clock: FakeClock) -> Health:
    return Health(clock, WorkQueue[Any](clock), silence_limit=100, work_limit=50)


def test_silence_is_an_illness(clock: FakeClock) -> None:
    own = health(clock)
    assert own.complaint() is None
    clock.advance(99)
    assert own.complaint() is None
    clock.advance(2)
    assert "no event" in str(own.complaint())
    own.progress()
    assert own.complaint() is None


async def test_work_that_never_ends_is_an_illness(clock: FakeClock) -> None:
    own = health(clock)
    own.queue.add(("ns", "a"))
    await own.queue.get()
    clock.advance(51)
    own.progress()
    assert "one pass" in str(own.complaint())


def test_a_watch_that_does_not_bring_what_a_list_showed_is_dead(clock: FakeClock) -> None:
    own = health(clock)
    own.listed_news(POD)
    for _ in range(3):
        # Other watches and the lists go on.
        clock.advance(20)
        own.progress()
        own.heard(SECRET)
        own.listed_news(POD)
    assert own.complaint() is None
    clock.advance(40)
    own.progress()
    assert "the watch of pods is dead" in str(own.complaint())
    own.heard(POD)
    assert own.complaint() is None


async def test_the_endpoints(clock: FakeClock) -> None:
    own = health(clock)
    async with TestClient(TestServer(application(own, lambda: b"glm52_x 1\n"))) as client:
        assert (await client.get("/healthz")).status == 200
        shown = await client.get("/metrics")
        assert (await shown.read(), shown.headers["Content-Type"].split(";")[0]) == (b"glm52_x 1\n", "text/plain")
        assert (await client.get("/readyz")).status == 503
        own.synced = True
        assert (await client.get("/readyz")).status == 200
        clock.advance(101)
        answer = await client.get("/healthz")
        assert answer.status == 500
        assert "no event" in await answer.text()
