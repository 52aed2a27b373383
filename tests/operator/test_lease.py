"""Taking, renewing, losing and giving back the lease, with a clock that only moves when told."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime
from collections.abc import AsyncIterator
from typing import Any

import pytest

from glm52_operator.plan.election import Timing
from glm52_operator.reconcile.client import ApiError
from glm52_operator.reconcile.kinds import LEASE, Kind
from glm52_operator.reconcile.lease import Lease
from tests.operator.conftest import FakeClock

NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


class OneLease:
    """An API server with a single lease, and optimistic writes."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.refuse: tuple[int, str] | None = None
        self.hang = False
        self.reconnected = asyncio.Event()
        self.writes = 0
        self._version = 0
        self._changed = asyncio.Event()

    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"]) if self.lease else ""

    async def get(self, kind: Kind, namespace: str, name: str) -> Any:
        await self._admit("get")
        return copy.deepcopy(self.lease)

    async def create(self, kind: Kind, namespace: str, body: Any) -> Any:
        await self._admit("create")
        if self.lease is not None:
            raise error("create", 409)
        return self._store(body)

    async def replace(self, kind: Kind, body: Any) -> Any:
        await self._admit("update")
        if self.lease is None or body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise error("update", 409)
        return self._store(body)

    async def watch(self, kind: Kind, namespace: str, name: str, version: str, seconds: float) -> AsyncIterator[Any]:
        await self._admit("watch")
        while self.lease and self.lease["metadata"]["resourceVersion"] == version:
            await self._changed.wait()
        yield self.lease

    async def reconnect(self) -> None:
        self.reconnected.set()
        self.hang = False

    def _store(self, body: Any) -> Any:
        self.writes += 1
        self._version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self._version)
        self._changed.set()
        self._changed = asyncio.Event()
        return copy.deepcopy(self.lease)

    async def _admit(self, verb: str) -> None:
        if self.hang:
            await asyncio.Event().wait()
        if self.refuse is not None:
            raise error(verb, *self.refuse)


def error(verb: str, code: int, text: str = "no") -> ApiError:
    return ApiError(code=code, text=text, verb=verb, kind=LEASE, name="op")


@pytest.fixture
def server() -> OneLease:
    return OneLease()


def lease(server: OneLease, clock: FakeClock, me: str) -> Lease:
    return Lease(server, clock, lambda: NOW, namespace="sys", name="op", me=me)  # type: ignore[arg-type]


async def settle() -> None:
    """Let everything run that needs no time to pass."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_the_first_creates_it_and_the_second_stands_by(server: OneLease, clock: FakeClock) -> None:
    first, second = lease(server, clock, "a"), lease(server, clock, "b")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await settle()
    assert (first.is_held(), second.is_held(), server.holder()) == (True, False, "a")
    waiting.cancel()


async def test_a_standby_takes_over_as_soon_as_it_is_given_back(server: OneLease, clock: FakeClock) -> None:
    first, second = lease(server, clock, "a"), lease(server, clock, "b")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await settle()
    await first.release()
    await settle()
    assert waiting.done()
    assert (first.is_held(), second.is_held(), server.holder()) == (False, True, "b")


async def test_a_standby_takes_over_when_a_killed_holders_lease_runs_out(server: OneLease, clock: FakeClock) -> None:
    await lease(server, clock, "a").acquire()
    second = lease(server, clock, "b")
    waiting = asyncio.create_task(second.acquire())
    await settle()
    clock.advance(14.9)
    await settle()
    assert not waiting.done()
    clock.advance(0.2)
    await settle()
    assert second.is_held()


async def test_the_same_pod_has_it_back_at_once(server: OneLease, clock: FakeClock) -> None:
    await lease(server, clock, "a").acquire()
    again = lease(server, clock, "a")
    await again.acquire()
    assert again.is_held()


async def test_it_is_renewed_and_a_standby_never_gets_it(server: OneLease, clock: FakeClock) -> None:
    first, second = lease(server, clock, "a"), lease(server, clock, "b")
    await first.acquire()
    keeping, waiting = asyncio.create_task(first.keep()), asyncio.create_task(second.acquire())
    for _ in range(100):
        await settle()
        clock.advance(1.0)
        assert first.is_held()
    await settle()
    assert server.holder() == "a"
    assert server.writes == 26
    for task in (keeping, waiting):
        task.cancel()


async def test_a_holder_that_cannot_renew_ends_before_anybody_else_may_begin(
    server: OneLease, clock: FakeClock
) -> None:
    first = lease(server, clock, "a")
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    await settle()
    server.refuse = (0, "connection refused")
    for _ in range(12):
        clock.advance(1.0)
        await settle()
    assert keeping.done()
    assert "not renewed for 10 s" in keeping.result()


async def test_a_short_outage_ends_nobody(server: OneLease, clock: FakeClock) -> None:
    first = lease(server, clock, "a")
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    await settle()
    server.refuse = (0, "connection refused")
    for _ in range(8):
        clock.advance(1.0)
        await settle()
    server.refuse = None
    for _ in range(20):
        clock.advance(1.0)
        await settle()
    assert not keeping.done()
    assert first.is_held()
    keeping.cancel()


async def test_a_connection_that_is_dead_without_a_word_is_made_anew(server: OneLease, clock: FakeClock) -> None:
    first = Lease(
        server,  # type: ignore[arg-type]
        clock,
        lambda: NOW,
        namespace="sys",
        name="op",
        me="a",
        timing=Timing(answer=0.01),
    )
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    await settle()
    server.hang = True
    clock.advance(4.0)
    await asyncio.wait_for(server.reconnected.wait(), 10)
    for _ in range(3):
        await settle()
        clock.advance(1.0)
    await settle()
    assert server.writes == 2
    assert first.is_held()
    keeping.cancel()


async def test_a_process_that_was_stopped_may_not_act_when_it_runs_on(server: OneLease, clock: FakeClock) -> None:
    """Before any of its timers has run: by the clock alone."""
    first = lease(server, clock, "a")
    await first.acquire()
    clock._now += 60.0
    assert not first.is_held()


async def test_who_took_it_is_named(server: OneLease, clock: FakeClock) -> None:
    first = lease(server, clock, "a")
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    await settle()
    assert server.lease is not None
    server._store({**server.lease, "spec": {**server.lease["spec"], "holderIdentity": "b"}})
    clock.advance(4.0)
    await settle()
    assert keeping.done()
    assert keeping.result() == "the lease sys/op was taken by b"
    assert not first.is_held()


async def test_a_lease_that_somebody_deleted_is_made_again(server: OneLease, clock: FakeClock) -> None:
    first = lease(server, clock, "a")
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    await settle()
    server.lease = None
    for _ in range(6):
        clock.advance(1.0)
        await settle()
    assert server.holder() == "a"
    assert not keeping.done()
    keeping.cancel()


async def test_a_missing_permission_is_named_once_and_nothing_is_done(
    server: OneLease, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuse = (403, 'leases.coordination.k8s.io "op" is forbidden: User "x" cannot get')
    first = lease(server, clock, "a")
    waiting = asyncio.create_task(first.acquire())
    for _ in range(5):
        await settle()
        clock.advance(1.0)
    assert not waiting.done()
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "'get'" in told
    assert "leases.coordination.k8s.io" in told
    waiting.cancel()


async def test_what_was_never_held_is_not_given_back(server: OneLease, clock: FakeClock) -> None:
    await lease(server, clock, "a").acquire()
    await lease(server, clock, "b").release()
    assert server.holder() == "a"


async def test_an_api_server_that_hangs_does_not_hold_up_the_end(
    server: OneLease, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    first = lease(server, clock, "a")
    await first.acquire()
    server.hang = True
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(first.release(), 5)
    assert "not given back" in caplog.text
