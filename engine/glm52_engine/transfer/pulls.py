"""The side that wants KV: it asks the agent that owns it to write it here, and knows when nothing writes any more."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from glm52_engine.transfer.descriptors import Region, runs
from glm52_engine.transfer.wire import Ask, Look, Over, encode, has_ended

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Between two questions to a peer from which something is pulled: nothing else finds that its connection has ended."""


class TransferError(Exception):
    """A pull that did not bring every byte; the local blocks hold nothing of use."""


class PullCut(TransferError):
    """Nobody waits for the bytes any more, but they may still come: the local blocks are free once `over` is done.

    Neither NIXL nor UCX takes a WRITE back, and forgetting the peer does not either: over TCP every byte was seen to
    come later, when a frozen peer went on. It ends with the peer's word or with its connection.
    """

    def __init__(self, message: str, over: Future[None]) -> None:
        super().__init__(message)
        self.over = over


@dataclass(frozen=True, slots=True)
class Lane:
    """A further agent of a pod: it has the pools of the first one registered, and a thread of its own."""

    name: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """An agent and the pools that it has registered: those of the ranks from `first_rank` on. `others`: agents of
    further hosts of the same replica, for their ranks. `lanes`: further agents of the same pools.

    Its name is new with every start of its process: an old incarnation cannot be mistaken for it.
    """

    name: str
    metadata: bytes
    regions: tuple[Region, ...]
    first_rank: int = 0
    others: tuple[Peer, ...] = ()
    lanes: tuple[Lane, ...] = ()

    def holding(self, rank: int) -> Peer:
        """The agent that has this rank's pool. Raises ValueError."""
        for peer in (self, *self.others):
            if 0 <= rank - peer.first_rank < len(peer.regions):
                return peer
        ranks = sum(len(peer.regions) for peer in (self, *self.others))
        raise ValueError(f"rank {rank} of a peer with {ranks}")

    def by_lane(self, number: int) -> Peer:
        """The same pools by another of its agents, 0 being its own. What cuts pulls from this peer cuts those as well:
        they go by its name. Not for `others`, which have lanes of their own."""
        if not number:
            return self
        lane = self.lanes[number - 1]
        return Peer(self.name, b"", (), others=(Peer(lane.name, lane.metadata, self.regions, self.first_rank),))


@dataclass(frozen=True, slots=True)
class Pull:
    peer: Peer
    remote_rank: int
    remote_ids: Sequence[int]
    local_rank: int
    local_ids: Sequence[int]
    notice: bytes


@dataclass(slots=True)
class Job:
    pull: Pull
    done: Future[int]
    deadline: float
    number: int = 0
    peer: str = ""
    """The agent that was asked."""
    bytes: int = 0
    over: Future[None] = field(default_factory=Future)
    """Nothing writes to the local blocks any more."""

    def end(self, error: str = "") -> None:
        if not self.done.done():
            if error:
                self.done.set_exception(TransferError(error))
            else:
                self.done.set_result(self.bytes)
        if not self.over.done():
            self.over.set_result(None)

    def cut(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(PullCut(message, self.over))


async def brought(jobs: Sequence[Job]) -> int:
    """The bytes of one pull, of which these are the parts. When it returns or raises, nothing writes to the local
    blocks any more, except after PullCut: a part that fails fails the pull, and says nothing about bytes of the others.

    A cancellation is let through only then: freeing the blocks earlier would let late bytes hit their next owner.
    """
    parts = [asyncio.wrap_future(job.done) for job in jobs]
    over = asyncio.wrap_future(all_over(jobs))
    for part in parts:
        part.add_done_callback(_noticed)
    cancelled: asyncio.CancelledError | None = None
    while not (_settled(parts) if cancelled is None else over.done()):
        try:
            if cancelled is None:
                await asyncio.wait(parts, return_when=asyncio.FIRST_EXCEPTION)
            else:
                await asyncio.wait([over])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    errors = [why for part in parts if part.done() and (why := part.exception()) is not None]
    if not errors:
        return sum(part.result() for part in parts)
    if len(jobs) == 1 or (all(part.done() for part in parts) and not any(isinstance(why, PullCut) for why in errors)):
        raise errors[0]
    raise PullCut(str(errors[0]), all_over(jobs))


def all_over(jobs: Sequence[Job]) -> Future[None]:
    """Done when nothing writes to the local blocks of any of them."""
    over: Future[None] = Future()
    # Each job ends on the thread of its own agent.
    gate = threading.Lock()

    def ended(of: Future[None]) -> None:
        with gate:
            if not over.done() and all(job.over.done() for job in jobs):
                over.set_result(None)

    for job in jobs:
        job.over.add_done_callback(ended)
    return over


def _settled(parts: Sequence[asyncio.Future[int]]) -> bool:
    done = [part for part in parts if part.done()]
    return len(done) == len(parts) or any(part.exception() is not None for part in done)


def _noticed(part: asyncio.Future[int]) -> None:
    """Another part has failed before, or who waited has gone: nobody asks for this one's error any more."""
    if not part.cancelled():
        part.exception()


class Pulls:
    """Of one agent, on its thread. `metadata`: NIXL's, of this agent."""

    def __init__(self, nixl: Any, regions: Sequence[Region], metadata: bytes) -> None:
        self._nixl = nixl
        self._regions = regions
        self._metadata = metadata
        self._jobs: dict[int, Job] = {}
        """All pulls of which bytes may come, also those that nobody waits for any more."""
        self._numbers = itertools.count(1)
        self._known: dict[str, int] = {}
        """Agents that pulls were asked of, and which connection that is, counted over all of them."""
        self._lives = itertools.count(1)
        self._look_at = 0.0

    @property
    def open(self) -> bool:
        return bool(self._jobs)

    @property
    def waited_for(self) -> bool:
        return any(not job.done.done() for job in self._jobs.values())

    def begin(self, job: Job) -> None:
        try:
            self._ask(job)
        except Exception as error:
            named = "" if isinstance(error, ValueError) else f"cannot read from {job.pull.peer.name}: "
            if has_ended(error):
                self._lost(job.peer, reason_of(error))
            job.end(named + reason_of(error))
        else:
            self._jobs[job.number] = job

    def cut(self, name: str | None, reason: str) -> None:
        """Those from that agent, or all: told at once, and looked after until no byte can come any more."""
        for job in self._jobs.values():
            if name is None or name in (job.peer, job.pull.peer.name):
                job.cut(reason)

    def hear(self, peer: str, over: Over) -> None:
        job = self._jobs.get(over.number)
        if job is not None and job.peer == peer:
            self._end(job, f"reading from {peer} failed: {over.error}" if over.error else "")

    def turn(self, now: float) -> None:
        if self._jobs and now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            for name in {job.peer for job in self._jobs.values()}:
                self._look(name)
        for job in self._jobs.values():
            if now >= job.deadline:
                job.cut(f"reading from {job.peer} took too long")

    def close(self) -> None:
        """The pools are let go: nobody can be kept from them any more."""
        for job in self._jobs.values():
            job.end("the pod is going away")
        self._jobs = {}

    def _ask(self, job: Job) -> None:
        pull = job.pull
        peer = pull.peer.holding(pull.remote_rank)
        rank = pull.remote_rank - peer.first_rank
        merged = runs(pull.remote_ids, pull.local_ids)
        peer.regions[rank].spans([(run.remote, run.count) for run in merged])
        into = self._regions[pull.local_rank]
        job.bytes = sum(size for _, size, _ in into.spans([(run.local, run.count) for run in merged]))
        job.number = next(self._numbers)
        # A connection that was lost meanwhile is made anew.
        self._look(peer.name)
        life = self._connected(peer)
        job.peer = peer.name
        ask = Ask(
            number=job.number,
            life=life,
            metadata=self._metadata,
            rank=rank,
            into=(into.address, into.num_blocks, into.block_bytes),
            runs=[(run.remote, run.local, run.count) for run in merged],
            notice=pull.notice,
        )
        self._nixl.send_notif(peer.name, encode(ask))

    def _connected(self, peer: Peer) -> int:
        if peer.name not in self._known:
            for name in [*self._known]:
                # Those that have ended would be kept for ever.
                self._look(name)
            self._nixl.add_remote_agent(peer.metadata)
            self._known[peer.name] = next(self._lives)
        return self._known[peer.name]

    def _look(self, name: str) -> None:
        """Asks for ends that were not told. A peer whose connection has ended is lost."""
        if name in self._known:
            numbers = [job.number for job in self._jobs.values() if job.peer == name]
            try:
                self._nixl.send_notif(name, encode(Look(life=self._known[name], numbers=numbers)))
            except Exception as error:
                if not has_ended(error):
                    log.warning("a peer cannot be asked", extra={"peer": name, "reason": reason_of(error)})
                    return
                self._lost(name, reason_of(error))

    def _lost(self, name: str, reason: str) -> None:
        """No byte comes from there any more: the transport has closed our end of that connection. A later pull connects
        anew."""
        if self._known.pop(name, None) is not None:
            for job in [job for job in self._jobs.values() if job.peer == name]:
                self._end(job, f"reading from {name} failed: {reason}")
            with contextlib.suppress(Exception):
                self._nixl.remove_remote_agent(name)

    def _end(self, job: Job, error: str) -> None:
        if job.done.done():
            log.info("a pull that was cut is over", extra={"peer": job.peer, "state": error or "all bytes came"})
        del self._jobs[job.number]
        job.end(error)


def reason_of(error: Exception) -> str:
    return str(error) or type(error).__name__
