"""A rank host as its leader hears it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

from glm52_engine.config import ConfigError
from glm52_engine.lifecycle.phases import Phase
from glm52_engine.ranks.connect import Remote
from glm52_engine.ranks.frames import ProtocolError
from glm52_engine.ranks.kv import bytes_of, fetch_of, settle
from glm52_engine.ranks.link import LinkLost, unexpected
from glm52_engine.ranks.messages import (
    Agent,
    Done,
    Failed,
    Fetched,
    Held,
    Joined,
    Leaving,
    Loaded,
    Message,
    Notice,
    PhaseOver,
    RankResult,
    Shape,
    Shutdown,
)
from glm52_engine.ranks.race import unless
from glm52_engine.transfer.pulls import Pull, TransferError

log = logging.getLogger(__name__)


class ReplicaFailed(Exception):
    """The replica cannot go on; `rank`: the one that failed, where one did."""

    def __init__(self, reason: str, *, rank: int | None = None, consequence: bool = False) -> None:
        super().__init__(reason)
        self.rank = rank
        self.consequence = consequence


class HostLost(ReplicaFailed):
    """A rank host is gone or frozen; what became of it, only its own pod can tell."""


def is_consequence(error: BaseException) -> bool:
    """Whether the cause lies with another host, and is told there."""
    return isinstance(error, HostLost) or (isinstance(error, ReplicaFailed) and error.consequence)


class RemoteHost:
    """A rank host as the leader hears it. `leaving` is told why the replica has to end in order."""

    def __init__(
        self,
        remote: Remote,
        told: Callable[[str, Phase], None],
        noticed: Callable[[bytes], None],
        leaving: Callable[[str], None],
    ) -> None:
        self.span, self.link = remote.span, remote.link
        self.loaded, self.joined = asyncio.Event(), asyncio.Event()
        self._done: asyncio.Queue[Done] = asyncio.Queue()
        self.agent: Agent | None = None
        self._held: set[int] = set()
        self._fetches: dict[int, asyncio.Future[int]] = {}
        self._numbers = itertools.count()
        self._background: set[asyncio.Task[None]] = set()
        self._told, self._noticed, self._leaving = told, noticed, leaving
        self.watch = asyncio.create_task(self._listen())

    def __str__(self) -> str:
        return f"rank host {self.span.host} ({self.span})"

    async def send(self, message: Message) -> None:
        """Raises HostLost."""
        try:
            await self.link.send(message)
        except LinkLost as error:
            raise HostLost(f"{self}: {error}", rank=self.span.first_rank) from error

    async def result(self, shape: Shape) -> list[RankResult]:
        """What the step brought on the host's ranks. Raises ReplicaFailed for another step's."""
        done = await self._done.get()
        if done.number != shape.number or len(done.ranks) != self.span.rank_count:
            raise ReplicaFailed(
                f"{self}: {len(done.ranks)} results of step {done.number}; "
                f"expected {self.span.rank_count} of step {shape.number}"
            )
        return list(done.ranks)

    async def fetch(self, pull: Pull) -> int:
        """Bytes read into a pool of this host. Raises TransferError."""
        number = next(self._numbers)
        answered = self._fetches[number] = asyncio.get_running_loop().create_future()
        try:
            await self.link.send(fetch_of(number, pull, self.span))
            return await unless(answered, [self.watch])
        except (LinkLost, ReplicaFailed) as error:
            raise TransferError(str(error)) from error
        finally:
            self._fetches.pop(number, None)

    def hold(self, rank: int, held: bool) -> None:
        """Tells the host when the first of its ranks holds KV for peers, and when the last one no longer does."""
        before = bool(self._held)
        (self._held.add if held else self._held.discard)(rank)
        if bool(self._held) != before:
            task = asyncio.create_task(self._tell(Held(bool(self._held))))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def end(self, shutdown: Shutdown) -> None:
        self.watch.cancel()
        await self._tell(shutdown)
        await self.link.close()

    async def _tell(self, message: Message) -> None:
        try:
            await self.link.send(message)
        except LinkLost as error:
            log.info("%s does not hear: %s", self, error)

    async def _listen(self) -> None:
        try:
            while True:
                said = await self.link.receive()
                if isinstance(said, Failed):
                    if said.refused:
                        raise ConfigError(f"{self}: {said.reason}")
                    raise ReplicaFailed(f"{self}: {said.reason}", rank=said.rank, consequence=said.consequence)
                self._take(said)
        except LinkLost as error:
            raise HostLost(f"{self}: {error}", rank=self.span.first_rank) from error
        except ProtocolError as error:
            raise ReplicaFailed(f"{self}: {error}", rank=self.span.first_rank) from error

    def _take(self, said: Message) -> None:
        if isinstance(said, PhaseOver):
            self._told(self.span.host, Phase(said.name, said.began, said.ended))
        elif isinstance(said, Loaded):
            self.agent = said.agent
            self.loaded.set()
        elif isinstance(said, Joined):
            self.joined.set()
        elif isinstance(said, Done):
            self._done.put_nowait(said)
        elif isinstance(said, Fetched) and said.number in self._fetches:
            settle(self._fetches.pop(said.number), said)
        elif isinstance(said, Notice):
            self._noticed(bytes_of(said.data))
        elif isinstance(said, Leaving):
            self._leaving(f"{self} was asked to end")
        else:
            raise unexpected(said, PhaseOver, Loaded, Joined, Done, Fetched, Notice, Leaving, Failed)
