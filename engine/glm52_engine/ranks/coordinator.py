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
from glm52_engine.lifecycle.phases import Phase, Phases
from glm52_engine.lifecycle.threads import in_thread
from glm52_engine.ranks.books import Books
from glm52_engine.ranks.collectives import serve_store
from glm52_engine.ranks.connect import connect_hosts
from glm52_engine.ranks.crew import Crew, RankFailed
from glm52_engine.ranks.host import CAUSE_SECONDS
from glm52_engine.ranks.load import HostParts
from glm52_engine.ranks.messages import (
    Agent,
    Join,
    Order,
    RankOrder,
    RankResult,
    Shape,
    Shutdown,
    Terms,
)
from glm52_engine.ranks.race import unless
from glm52_engine.ranks.remote import RemoteHost, ReplicaFailed
from glm52_engine.ranks.spans import LOCAL, RankHost, RankSpan
from glm52_engine.runtime.executor import Executor
from glm52_engine.runtime.rank import Event, Running
from glm52_engine.transfer.pulls import Pull

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

TELL_SECONDS = 1.0
"""For the end to reach all hosts. One that takes nothing in is told by the connection's end."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a replica is made of. `debug`: collectives are checked."""

    hosts: Sequence[RankHost]
    terms: Terms
    secret: str
    load: Callable[[], HostParts]
    launch_ahead: bool = False
    debug: bool = False

    @property
    def local(self) -> RankSpan:
        return RankSpan(LOCAL, 0, self.terms.hosts[0])


class Coordinator:
    """Commands come from any thread; the two callbacks are called on the coordinator's."""

    def __init__(self, plan: Plan, phases: Phases) -> None:
        self.plan = plan
        self.on_events: Callable[[list[Event]], None] = lambda events: None
        """With all events of a step."""
        self.failure: ReplicaFailed | ConfigError | None = None
        self.parts: HostParts | None = None
        self.on_notice: Callable[[bytes], None] = lambda notice: None
        """When a peer has read KV of a rank host, with what it attached."""
        self.on_leaving: Callable[[str], None] = lambda why: None
        """When a rank host was asked to end: the replica has to be drained, since every step needs all hosts."""
        self.on_waiting: Callable[[str], None] = lambda text: None
        """When all is loaded here and hosts are not there yet: which ones, and why; "" once they are."""
        self._missing: dict[str, str] = {}
        self._waits = False
        self._own_phases = phases
        self._books: Books | None = None
        self._hosts: list[RemoteHost] = []
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

    @property
    def phases(self) -> dict[str, list[Phase]]:
        """Of each host: how the start spent its time."""
        return {LOCAL: self._own_phases.done, **self._own_phases.others}

    @property
    def agents(self) -> list[Agent]:
        """Of the rank hosts, in the order of their ranks; once the replica is up."""
        return [host.agent for host in self._hosts if host.agent is not None]

    def fetch(self, pull: Pull) -> asyncio.Future[int]:
        """See `kv.Carrier`."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._fetch(pull), self._loop))

    def hold(self, rank: int, held: bool) -> None:
        """Whether KV of this rank is held for peers."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._hold, rank, held)

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

    def close(self, seconds: float = 5.0) -> None:
        """After `stop`: lets go of what the leader's own ranks have loaded, unless one of them hangs on it still: then
        the end of the process does."""
        if self.parts is None:
            return
        if self._crew is None or self._crew.wait(seconds):
            self.parts.close()
        else:
            log.warning("a rank has not ended: what it has pinned stays so until the process ends")

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
        try:
            await self._come_up()
            self._ready.set_result(None)
            await self._step_forever()
        except asyncio.CancelledError:
            asked = "the leader was asked to end"
            await self._broadcast(Shutdown(asked, crashed=False))
            if not self._ready.done():
                self._ready.set_exception(ReplicaFailed(asked))
        except Exception as error:
            cause = await self._cause(error)
            # Before anybody here learns of it: the process then ends at once, and its hosts would never hear why.
            await self._broadcast(Shutdown(str(cause), crashed=True))
            self._fail(cause)

    async def _come_up(self) -> None:
        plan = self.plan
        loading = in_thread(self._load)
        connecting = asyncio.create_task(self._connect())
        try:
            await asyncio.wait((loading, connecting), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
            self._waits = not connecting.done()
            self._tell_waiting()
            await connecting
            self._waits = False
            self.on_waiting("")
            parts = await self._all(loading)
        finally:
            connecting.cancel()
        await self._all(asyncio.gather(*(host.loaded.wait() for host in self._hosts)))
        began = self._own_phases.now()
        await self._join(parts)
        self._own_phases.note("joining and first steps", began)
        self._books = Books(
            plan.terms.world,
            limits=parts.measures.step,
            block_size=plan.terms.block_size,
            launch_ahead=plan.launch_ahead,
        )

    def _load(self) -> HostParts:
        self.parts = self.plan.load()
        return self.parts

    async def _connect(self) -> None:
        plan = self.plan
        with self._own_phases.phase("connecting to all hosts"):
            # However long it takes: until its node is there, or its image, a pod cannot answer, and to load anew
            # here would bring neither any nearer.
            remotes = await connect_hosts(
                plan.local.rank_count, plan.hosts, plan.terms, plan.secret, seconds=None, missing=self._miss
            )
            self._hosts = [
                RemoteHost(remote, self._note, lambda notice: self.on_notice(notice), lambda why: self.on_leaving(why))
                for remote in remotes
            ]

    def _miss(self, host: str, why: str) -> None:
        self._missing.pop(host, None)
        if why:
            self._missing[host] = why
            log.info("rank host %s is not there yet: %s", host, why)
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        if self._waits and self._missing:
            first, why = next(iter(self._missing.items()))
            more = f" and {len(self._missing) - 1} more" if len(self._missing) > 1 else ""
            self.on_waiting(f"waiting for rank host {first} ({why}){more}")

    @property
    def executors(self) -> Sequence[Executor]:
        """Of the leader's own ranks."""
        return [] if self._crew is None else self._crew.executors

    async def _join(self, parts: HostParts) -> None:
        own = self._hosts[0].link.own_address if self._hosts else LOOPBACK
        store = await in_thread(lambda: serve_store(own))
        group, debug = secrets.token_hex(8), self.plan.debug
        for host in self._hosts:
            await host.send(Join(host.link.own_address, store.port, group, debug))
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
            self.on_events([event for each in events for event in each])
            # Commands of other threads come in between two steps only.
            await asyncio.sleep(0)

    async def _step(self, shape: Shape, orders: Sequence[RankOrder]) -> list[RankResult]:
        for host in self._hosts:
            ranks = host.span.ranks
            await host.send(Order(shape, tuple(orders[ranks.start : ranks.stop])))
        assert self._crew is not None
        own, *others = await asyncio.gather(
            self._crew.execute(shape, orders[: self.plan.local.rank_count]),
            *(host.result(shape) for host in self._hosts),
        )
        return [result for each in (own, *others) for result in each]

    async def _fetch(self, pull: Pull) -> int:
        return await next(host for host in self._hosts if pull.local_rank in host.span.ranks).fetch(pull)

    def _hold(self, rank: int, held: bool) -> None:
        for host in self._hosts:
            if rank in host.span.ranks:
                host.hold(rank, held)

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
        self.on_events([Event(key, None, True) for rank in world for key in self.books.keys(rank)])

    async def _broadcast(self, shutdown: Shutdown) -> None:
        if self._crew is not None:
            self._crew.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_SECONDS):
                await asyncio.gather(*(host.end(shutdown) for host in self._hosts))

    def _note(self, host: str, phase: Phase) -> None:
        self._own_phases.others.setdefault(host, []).append(phase)
        log.info("%s: %s took %.1f s", host, phase.name, phase.ended - phase.began)
