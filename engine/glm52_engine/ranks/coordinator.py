"""The leader's thread: it brings the replica up, then plans step after step and tells every rank the same.

Whatever ends it, Shutdown goes to all hosts before anything is waited for: no teardown depends on who ends first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from glm52_engine.config import ConfigError
from glm52_engine.lifecycle.threads import in_thread
from glm52_engine.ranks.books import Books
from glm52_engine.ranks.collectives import serve_store
from glm52_engine.ranks.connect import Remote, connect_hosts
from glm52_engine.ranks.crew import Crew, RankFailed
from glm52_engine.ranks.frames import ProtocolError
from glm52_engine.ranks.link import LinkLost, unexpected
from glm52_engine.ranks.load import HostParts
from glm52_engine.ranks.messages import (
    Done,
    Failed,
    Join,
    Joined,
    Loaded,
    Order,
    Phase,
    RankOrder,
    RankResult,
    Shape,
    Shutdown,
    Terms,
)
from glm52_engine.ranks.phases import Phases
from glm52_engine.ranks.race import unless
from glm52_engine.ranks.spans import LOCAL, RankHost, RankSpan
from glm52_engine.runtime.rank import Event, Running

log = logging.getLogger(__name__)

CAUSE_SECONDS = 1.0
"""How long a failure that is another one's consequence waits for that one to be told."""

LOOPBACK = "127.0.0.1"

T = TypeVar("T")


class ReplicaFailed(Exception):
    """The replica cannot go on; `rank`: the one that failed, where one did."""

    def __init__(self, reason: str, *, rank: int | None = None, consequence: bool = False) -> None:
        super().__init__(reason)
        self.rank = rank
        self.consequence = consequence


@dataclass(frozen=True, slots=True)
class Plan:
    """What a replica is made of. `connect_seconds`: for all hosts to be there; `debug`: collectives are checked."""

    hosts: Sequence[RankHost]
    terms: Terms
    secret: str
    load: Callable[[], HostParts]
    connect_seconds: float
    launch_ahead: bool = False
    debug: bool = False

    @property
    def local(self) -> RankSpan:
        return RankSpan(LOCAL, 0, self.terms.hosts[0])


class _Host:
    """A rank host as the leader hears it."""

    def __init__(self, remote: Remote, told: Callable[[str, Phase], None]) -> None:
        self.span, self.link = remote.span, remote.link
        self.loaded, self.joined = asyncio.Event(), asyncio.Event()
        self.done: asyncio.Queue[Done] = asyncio.Queue()
        self._told = told
        self.watch = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        name = f"rank host {self.span.host} ({self.span})"
        try:
            while True:
                said = await self.link.receive()
                if isinstance(said, Failed):
                    if said.refused:
                        raise ConfigError(f"{name}: {said.reason}")
                    raise ReplicaFailed(f"{name}: {said.reason}", rank=said.rank, consequence=said.consequence)
                self._take(said)
        except (LinkLost, ProtocolError) as error:
            raise ReplicaFailed(f"{name}: {error}", rank=self.span.first_rank) from error

    def _take(self, said: object) -> None:
        if isinstance(said, Phase):
            self._told(self.span.host, said)
        elif isinstance(said, Loaded):
            self.loaded.set()
        elif isinstance(said, Joined):
            self.joined.set()
        elif isinstance(said, Done):
            self.done.put_nowait(said)
        else:
            raise unexpected(said, Phase, Loaded, Joined, Done, Failed)  # type: ignore[arg-type]


class Coordinator:
    """`post` is called on the coordinator's thread with the events of a step; commands come from any thread."""

    def __init__(self, plan: Plan, phases: Phases, post: Callable[[list[Event]], None]) -> None:
        self.plan = plan
        self.failure: ReplicaFailed | ConfigError | None = None
        self.parts: HostParts | None = None
        self.phases: dict[str, list[Phase]] = {}
        """Of each host: how the start spent its time."""
        self._own_phases, self._post = phases, post
        self._books: Books | None = None
        self._hosts: list[_Host] = []
        self._crew: Crew | None = None
        self._ready: Future[None] = Future()
        self._main: asyncio.Task[None] | None = None
        self._waiting_since: float | None = None
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def bring_up(self) -> None:
        """Blocks until every rank of every host has computed its first steps. Raises what prevents it."""
        self._thread.start()
        self._ready.result()

    def start(self, rank: int, sequence: Running) -> None:
        self._command(lambda books: books.start(rank, sequence))

    def abort(self, rank: int, key: str) -> None:
        self._command(lambda books: books.abort(rank, key))

    def seconds_without_progress(self) -> float:
        since = self._waiting_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def books(self) -> Books:
        if self._books is None:
            raise RuntimeError("the replica is not up yet")
        return self._books

    def stop(self, seconds: float = 5.0) -> None:
        """Ends the replica; returns when all hosts were told, or after `seconds`."""
        if self._thread.ident is None:
            return
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._interrupt)
        self._thread.join(seconds)

    # Everything below runs on the coordinator's thread, except _command.

    def _command(self, command: Callable[[Books], None]) -> None:
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()

        def apply() -> None:
            command(self.books)
            self._news.set()

        with contextlib.suppress(RuntimeError):  # the replica has ended: whoever asks is told by `failure`
            self._loop.call_soon_threadsafe(apply)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    def _interrupt(self) -> None:
        if self._main is not None:
            self._main.cancel()

    async def _live(self) -> None:
        self._main = asyncio.current_task()
        shutdown = Shutdown("the leader was asked to end", crashed=False)
        try:
            await self._come_up()
            self._ready.set_result(None)
            await self._step_forever()
        except asyncio.CancelledError:
            if not self._ready.done():
                self._ready.set_exception(ReplicaFailed(shutdown.reason))
        except Exception as error:
            cause = await self._cause(error)
            shutdown = Shutdown(str(cause), crashed=True)
            self._fail(cause)
        await self._broadcast(shutdown)

    async def _come_up(self) -> None:
        plan = self.plan
        loading = in_thread(plan.load)
        connecting = asyncio.create_task(self._connect())
        try:
            await asyncio.wait((loading, connecting), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
            await connecting
            self.parts = parts = await self._all(loading)
        finally:
            connecting.cancel()
        await self._all(asyncio.gather(*(host.loaded.wait() for host in self._hosts)))
        began = self._own_phases.now()
        await self._join(parts)
        self._own_phases.note("joining and first steps", began)
        self.phases[LOCAL] = list(self._own_phases.done)
        self._books = Books(
            plan.terms.world,
            limits=parts.measures.step,
            block_size=plan.terms.block_size,
            launch_ahead=plan.launch_ahead,
        )

    async def _connect(self) -> None:
        plan = self.plan
        with self._own_phases.phase("connecting to all hosts"):
            remotes = await connect_hosts(
                plan.local.rank_count, plan.hosts, plan.terms, plan.secret, seconds=plan.connect_seconds
            )
            self._hosts = [_Host(remote, self._note) for remote in remotes]

    async def _join(self, parts: HostParts) -> None:
        own = self._hosts[0].link.own_address if self._hosts else LOOPBACK
        store = await in_thread(lambda: serve_store(own))
        group, debug = secrets.token_hex(8), self.plan.debug
        for host in self._hosts:
            await host.link.send(Join(host.link.own_address, store.port, group, debug))
        self._crew = Crew(self.plan.local, self.plan.terms.world, parts)
        await self._all(
            asyncio.gather(
                self._crew.join(Join(own, store.port, group, debug), own),
                *(host.joined.wait() for host in self._hosts),
            )
        )
        self._store = store  # lives as long as the group

    async def _step_forever(self) -> NoReturn:
        while True:
            planned = self.books.next()
            if planned is None:
                self._waiting_since = None
                self._news.clear()
                await self._all(self._news.wait())
                continue
            results = await self._all(self._step(*planned))
            events = self.books.settle(results)
            self._waiting_since = None if self.books.idle else time.monotonic()
            self._post([event for each in events for event in each])
            # Commands of other threads come in between two steps only.
            await asyncio.sleep(0)

    async def _step(self, shape: Shape, orders: Sequence[RankOrder]) -> list[RankResult]:
        for host in self._hosts:
            ranks = host.span.ranks
            await host.link.send(Order(shape, tuple(orders[ranks.start : ranks.stop])))
        assert self._crew is not None
        own, *others = await asyncio.gather(
            self._crew.execute(shape, orders[: self.plan.local.rank_count]),
            *(self._done(h, shape) for h in self._hosts),
        )
        return [result for each in (own, *others) for result in each]

    async def _done(self, host: _Host, shape: Shape) -> list[RankResult]:
        done = await host.done.get()
        if done.number != shape.number or len(done.ranks) != host.span.rank_count:
            raise ReplicaFailed(
                f"rank host {host.span.host} ({host.span}): {len(done.ranks)} results of step {done.number}; "
                f"expected {host.span.rank_count} of step {shape.number}"
            )
        return list(done.ranks)

    async def _all(self, work: Awaitable[T]) -> T:
        return await unless(work, [host.watch for host in self._hosts])

    async def _cause(self, error: Exception) -> Exception:
        """The failure behind a consequence, if it is told in time."""
        if not getattr(error, "consequence", False):
            return error
        watches = {host.watch for host in self._hosts}
        until = time.monotonic() + CAUSE_SECONDS
        while watches and (left := until - time.monotonic()) > 0:
            done, watches = await asyncio.wait(watches, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for watch in done:
                found = watch.exception()
                if isinstance(found, Exception) and not getattr(found, "consequence", False):
                    return found
        return error

    def _fail(self, error: Exception) -> None:
        if isinstance(error, RankFailed):
            error = ReplicaFailed(str(error), rank=error.rank, consequence=error.consequence)
        elif not isinstance(error, ReplicaFailed | ConfigError):
            log.error("the coordinator failed", exc_info=error)
            error = ReplicaFailed(f"{type(error).__name__}: {error}")
        self.failure = error
        if not self._ready.done():
            self._ready.set_exception(error)
            return
        log.error("the replica failed: %s", error)
        world = range(self.plan.terms.world)
        self._post([Event(key, None, True) for rank in world for key in self.books.keys(rank)])

    async def _broadcast(self, shutdown: Shutdown) -> None:
        if self._crew is not None:
            self._crew.leave()
        for host in self._hosts:
            host.watch.cancel()
        await asyncio.gather(*(_end(host, shutdown) for host in self._hosts))

    def _note(self, host: str, phase: Phase) -> None:
        self.phases.setdefault(host, []).append(phase)
        log.info("%s: %s took %.1f s", host, phase.name, phase.ended - phase.began)


async def _end(host: _Host, shutdown: Shutdown) -> None:
    try:
        await host.link.send(shutdown)
    except LinkLost:
        log.info("%s does not hear the end", host.span.host)
    await host.link.close()
