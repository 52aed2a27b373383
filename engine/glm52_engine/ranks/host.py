"""One leader's time with a rank host: from the accepted handshake to whatever ends it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from glm52_engine.config import ConfigError
from glm52_engine.lifecycle.phases import Phases
from glm52_engine.lifecycle.termination import last_line
from glm52_engine.ranks.crew import Crew, RankFailed
from glm52_engine.ranks.kv import HostAgent
from glm52_engine.ranks.link import Link, LinkLost, unexpected
from glm52_engine.ranks.load import HostParts
from glm52_engine.ranks.messages import (
    Done,
    Failed,
    Fetch,
    Held,
    Join,
    Joined,
    Leaving,
    Loaded,
    Message,
    Notice,
    Order,
    PhaseOver,
    Shutdown,
)
from glm52_engine.ranks.race import unless
from glm52_engine.ranks.spans import RankSpan

log = logging.getLogger(__name__)

CAUSE_SECONDS = 1.0
"""How long a failure that is another one's consequence waits for that one to be told."""

T = TypeVar("T")


class Ended(Exception):
    """The leader has ended the replica; `crashed` for a failure, whose reason is the text."""

    def __init__(self, said: Shutdown) -> None:
        super().__init__(said.reason)
        self.crashed = said.crashed


@dataclass(frozen=True, slots=True)
class Ready:
    """What a host has loaded, and the agent that has registered its pools."""

    parts: HostParts
    agent: HostAgent


class Session:
    """`run` ends by raising: Ended, LinkLost, ProtocolError, or what failed here, which the leader has been told.

    `leaving` is set once this host was asked to end: the leader then drains the replica. `ill` ends by raising what is
    wrong with this host, whatever it does.
    """

    def __init__(
        self,
        link: Link,
        loading: asyncio.Future[Ready],
        span: RankSpan,
        world: int,
        phases: Phases,
        leaving: asyncio.Event,
        ill: asyncio.Task[None],
    ) -> None:
        self.joined = False
        """From here on only the end of the process frees what the ranks hold."""
        self._link, self._loading, self._span, self._world, self._phases = link, loading, span, world, phases
        self._leaving, self._ill = leaving, ill
        self._orders: asyncio.Queue[Join | Order] = asyncio.Queue()
        self._agent: HostAgent | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.crew: Crew | None = None
        self._news = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    async def run(self) -> NoReturn:
        self._watch = asyncio.create_task(self._listen())
        asides = [asyncio.create_task(work) for work in (self._report(), self._announce())]
        try:
            await self._follow()
        except (Ended, LinkLost):
            raise
        except Exception as error:
            await self._tell(_failed(error))
            if isinstance(error, RankFailed) and error.consequence:
                await asyncio.wait({self._watch}, timeout=CAUSE_SECONDS)
                if self._watch.done():
                    self._watch.result()  # raises what our ranks' failure is the consequence of
            raise
        finally:
            self._watch.cancel()
            for aside in asides:
                aside.cancel()
            if self._agent is not None:
                self._agent.hold(False)
            if self.crew is not None:
                self.crew.leave()

    def poke(self) -> None:
        """A phase of the start is over."""
        self._news.set()

    async def _report(self) -> None:
        """All phases in their order, those from before this leader too."""
        told = 0
        while True:
            for phase in self._phases.done[told:]:
                await self._tell(PhaseOver(phase.name, phase.began, phase.ended))
                told += 1
            self._news.clear()
            if told == len(self._phases.done):
                await self._news.wait()

    async def _announce(self) -> None:
        await self._leaving.wait()
        await self._tell(Leaving())

    async def _follow(self) -> NoReturn:
        ready = await self._unless_ended(asyncio.shield(self._loading))
        self._agent = ready.agent
        loop = asyncio.get_running_loop()

        def on_notice(notice: bytes) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._noticed, notice)

        ready.agent.on_notice = on_notice
        await self._link.send(Loaded(ready.agent.described))
        join = await self._next(Join)
        self.joined = True
        began = self._phases.now()
        self.crew = Crew(self._span, self._world, ready.parts)
        await self._unless_ended(self.crew.join(join, self._link.own_address))
        self._phases.note("joining and first steps", began)
        await self._link.send(Joined())
        while True:
            order = await self._next(Order)
            results = await self._unless_ended(self.crew.execute(order.shape, order.ranks))
            await self._link.send(Done(order.shape.number, tuple(results)))

    async def _next(self, kind: type[T]) -> T:
        said = await self._unless_ended(self._orders.get())
        if not isinstance(said, kind):
            raise unexpected(said, kind)
        return said

    async def _listen(self) -> None:
        while True:
            said = await self._link.receive()
            if isinstance(said, Shutdown):
                raise Ended(said)
            if isinstance(said, Join | Order):
                self._orders.put_nowait(said)
            elif isinstance(said, Fetch) and self._agent is not None:
                self._soon(self._fetch(self._agent, said))
            elif isinstance(said, Held) and self._agent is not None:
                self._agent.hold(said.held)
            else:
                raise unexpected(said, Join, Order, Fetch, Held, Shutdown)

    async def _fetch(self, agent: HostAgent, asked: Fetch) -> None:
        await self._tell(await agent.fetch(asked))

    def _noticed(self, notice: bytes) -> None:
        self._soon(self._tell(Notice(base64.b64encode(notice).decode())))

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _unless_ended(self, work: Awaitable[T]) -> T:
        assert self._watch is not None
        return await unless(work, [self._watch, self._ill])

    async def _tell(self, message: Message) -> None:
        try:
            await self._link.send(message)
        except LinkLost as error:
            log.warning("the leader does not hear", extra={"reason": str(error), "said": type(message).__name__})


def _failed(error: Exception) -> Failed:
    if isinstance(error, RankFailed):
        return Failed(str(error), error.rank, consequence=error.consequence)
    if isinstance(error, ConfigError):
        return Failed(str(error), refused=True)
    return Failed(last_line(error))
