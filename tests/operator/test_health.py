"""Liveness is about progress."""

from __future__ import annotations

from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from glm52_operator.reconcile.health import Health, application
from glm52_operator.reconcile.kinds import POD, SECRET
from glm52_operator.reconcile.queue import WorkQueue
from tests.operator.conftest import FakeClock


def health(clock: FakeClock, *, scoped: bool = False) -> Health:
    return Health(clock, WorkQueue[Any](clock), work_limit=50, scoped=scoped)


def version(number: int, namespace: str = "ns") -> dict[str, Any]:
    return {"metadata": {"namespace": namespace, "name": "a", "resourceVersion": str(number)}}


async def test_work_that_never_ends_is_an_illness(clock: FakeClock) -> None:
    own = health(clock)
    own.queue.add(("ns", "a"))
    await own.queue.get()
    clock.advance(51)
    assert "one pass" in str(own.complaint())


def test_rest_is_no_illness(clock: FakeClock) -> None:
    own = health(clock)
    own.heard(POD, version(1))
    clock.advance(100_000)
    assert own.complaint() is None


def test_a_watch_that_does_not_bring_what_was_written_is_dead(clock: FakeClock) -> None:
    own = health(clock)
    own.wrote(POD, version(7))
    for _ in range(4):
        # Other watches go on, and so do writes.
        clock.advance(20)
        own.heard(SECRET, version(100))
        own.heard(POD, version(6))
        own.wrote(POD, version(9))
    assert own.complaint() is None
    clock.advance(20)
    assert "the watch of pods is dead" in str(own.complaint())
    own.heard(POD, version(8))
    assert own.complaint() is None


def test_a_write_that_changed_nothing_or_came_back_before_its_answer_is_not_waited_for(clock: FakeClock) -> None:
    own = health(clock)
    own.heard(POD, version(7))
    own.wrote(POD, version(7))
    clock.advance(1000)
    assert own.complaint() is None


def test_each_namespace_has_its_own_watch(clock: FakeClock) -> None:
    own = health(clock, scoped=True)
    own.wrote(POD, version(7, "a"))
    own.heard(POD, version(9, "b"))
    clock.advance(91)
    assert "pods in a" in str(own.complaint())


async def test_the_endpoints(clock: FakeClock) -> None:
    own = health(clock)
    async with TestClient(TestServer(application(own, lambda: b"glm52_x 1\n"))) as client:
        assert (await client.get("/healthz")).status == 200
        shown = await client.get("/metrics")
        assert (await shown.read(), shown.headers["Content-Type"].split(";")[0]) == (b"glm52_x 1\n", "text/plain")
        assert (await client.get("/readyz")).status == 503
        own.synced = True
        assert (await client.get("/readyz")).status == 200
        own.wrote(POD, version(7))
        clock.advance(101)
        answer = await client.get("/healthz")
        assert answer.status == 500
        assert "the watch of pods is dead" in await answer.text()
