"""Decode pulls a long prompt's KV while prefill still computes the rest of it, so that little is left at the end.

It is a hint and no promise: whatever goes wrong here, the hand-off itself begins anew and reads everything. What was
read is used only if prefill then says, under the lease, that the request still has the very blocks that were read: a
request has the same ones from its seat to the end of its lease, so nobody else can have written to them meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from glm52_engine.runtime.types import Blocks, Engine, Request, Sampling
from glm52_engine.transfer.fingerprint import difference
from glm52_engine.transfer.heartbeats import BEAT_SECONDS, SILENCE_SECONDS, PeerGone
from glm52_engine.transfer.peers import KvReference, ProgressCall, ProgressCard, Puller
from glm52_engine.transfer.pulls import PullCut, TransferError

log = logging.getLogger(__name__)

T = TypeVar("T")

UNKNOWN_SECONDS = 10.0
"""For a prompt to get from prefill's front door to its engine: a large body takes seconds to check."""

GONE_SECONDS = 1.0
"""After which a prompt that was computed, and is neither computed nor held, has failed or was given up."""

CLAIM_SECONDS = 5.0
"""For the call that continues a prompt to come once it is computed: the router has chosen this pod already."""

AGAIN_SECONDS = 0.2


@dataclass(slots=True, eq=False)
class _Entry:
    id: str
    address: str
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    kv: KvReference | None = None
    request: Request | None = None
    blocks: Blocks | None = None
    here: int = 0
    """Leading blocks that have been read."""
    ready: bool = False
    """Ended in good order, for whoever claims it; nothing writes to the blocks."""

    @property
    def seat(self) -> str:
        """Its request's id at the engine: if it comes to nothing, the hand-off reserves under its own."""
        return f"{self.id}/early"


class EarlyPulls:
    """Of one decode pod; everything on its event loop."""

    def __init__(self, engine: Engine, puller: Puller, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._puller = puller
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def seated(self, request_id: str) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and entry.blocks is not None

    def begin(self, request_id: str, address: str) -> bool:
        """In the background. False where it would not be worth while: see `_spare`."""
        if request_id in self._entries or not self._spare():
            return False
        entry = self._entries[request_id] = _Entry(request_id, address)
        entry.task = asyncio.create_task(self._run(entry))
        # Without a reference of ours a task may be gone in the middle.
        self._ending.add(entry.task)
        entry.task.add_done_callback(self._ending.discard)
        return True

    async def claim(self, kv: KvReference, request_id: str, request: Request, take: Callable[[Request], None]) -> Early:
        """What has been read for this request, when the part that is under way is here.

        The request goes on under the id of its seat: `take` is told of it before anything else can happen, and from
        then on the seat is the caller's to release.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.task is None:
            return None
        entry.claimed.set()
        try:
            await asyncio.wait([entry.task])
        except asyncio.CancelledError:
            entry.task.cancel()
            entry.task.add_done_callback(lambda task: self._let_go(entry, None) if entry.ready else None)
            raise
        if not entry.ready or entry.blocks is None:
            return None
        if not _fits(entry, kv, request):
            log.info("KV that came early is of another prompt", extra={"request": request_id})
            self._let_go(entry, None)
            return None
        taken = replace(request, id=entry.seat)
        take(taken)
        return taken, entry.blocks, entry.here

    def make_room(self) -> None:
        """A request waits for a seat that may be one of ours: the youngest that nobody has claimed gives it up."""
        for entry in reversed(self._entries.values()):
            if entry.blocks is not None and not entry.claimed.is_set() and entry.task is not None:
                log.info("an early pull makes room", extra={"request": entry.id})
                entry.task.cancel()
                return

    def close(self) -> None:
        for task in self._ending:
            task.cancel()

    def _spare(self) -> bool:
        """Whether so little is done here that a seat may be held for longer than it is needed.

        Also for pools of one process only: those of a replica's other hosts are out of reach.
        """
        stats = self._engine.stats()
        seatless = sum(entry.blocks is None for entry in self._entries.values())
        few = (stats.running + seatless) * 2 < stats.seats_total
        return few and not stats.waiting and not self._puller.agent.described.others

    async def _run(self, entry: _Entry) -> None:
        late: Future[None] | None = None
        try:
            await self._follow(entry)
            entry.ready = entry.blocks is not None
        except PullCut as error:
            late = error.over
            log.info("an early pull was cut: %s", error, extra={"request": entry.id})
        except Exception as error:
            log.info("an early pull ended: %s", str(error) or type(error).__name__, extra={"request": entry.id})
        finally:
            self._entries.pop(entry.id, None)
            if not entry.ready:
                self._let_go(entry, late)

    def _let_go(self, entry: _Entry, late: Future[None] | None) -> None:
        """Its blocks are others' once no byte can come any more."""
        if late is None:
            self._engine.release(entry.seat)
        else:
            asyncio.wrap_future(late).add_done_callback(lambda over: self._engine.release(entry.seat))

    async def _follow(self, entry: _Entry) -> None:
        """Reads what is new until the request is claimed. Raises where nobody will."""
        silent_until = self._clock() + UNKNOWN_SECONDS
        while not entry.claimed.is_set():
            call = ProgressCall(
                id=entry.id, agent=entry.kv.agent if entry.kv else "", seen=entry.here, prompt=entry.request is None
            )
            card = await _unless(entry.claimed, self._puller.progress(entry.address, call))
            if card is None:
                return
            if card.state == "over":
                await asyncio.wait_for(entry.claimed.wait(), CLAIM_SECONDS)
                return
            if card.state == "unknown":
                if self._clock() >= silent_until:
                    raise TransferError(f"prefill {entry.address} does not compute it")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(entry.claimed.wait(), AGAIN_SECONDS)
                continue
            silent_until = self._clock() + GONE_SECONDS if card.kv else self._clock() + UNKNOWN_SECONDS
            if card.kv is not None and card.kept > entry.here:
                await self._more(entry, card, card.kv)

    async def _more(self, entry: _Entry, card: ProgressCard, kv: KvReference) -> None:
        if entry.blocks is None:
            if card.prompt is None:
                raise TransferError(f"prefill {entry.address} does not say what it computes")
            wrong = difference(self._puller.ours, kv.fingerprint)
            if wrong:
                raise TransferError(f"prefill {entry.address} and this decode pod cannot exchange KV: {wrong}")
            asked = card.prompt
            entry.kv = kv
            entry.request = Request(
                entry.seat,
                tuple(asked.ids),
                Sampling(max_tokens=asked.max_tokens),
                priority=asked.priority,
                cache_salt=asked.cache_salt,
            )
            entry.blocks = await self._engine.reserve(entry.request, wait=False)
        elif entry.kv is None or (kv.agent, kv.rank, kv.blocks) != (entry.kv.agent, entry.kv.rank, entry.kv.blocks):
            raise TransferError(f"prefill {entry.address} computes it in other blocks than before")
        await self._read(entry, kv, entry.blocks, card.kept)
        entry.here = card.kept

    async def _read(self, entry: _Entry, kv: KvReference, into: Blocks, kept: int) -> None:
        """One pull; cut where prefill falls silent."""
        reading = asyncio.ensure_future(self._puller.pull_part(kv, entry.id, into, entry.here, kept))
        heard = self._clock()
        try:
            while not (await asyncio.wait({reading}, timeout=BEAT_SECONDS))[0]:
                why = await self._silent(entry, kv)
                if why is None:
                    heard = self._clock()
                elif isinstance(why, PeerGone) or self._clock() - heard >= SILENCE_SECONDS:
                    self._puller.agent.cut(kv.agent, str(why))
        except asyncio.CancelledError:
            # It comes back when nothing writes to the blocks any more.
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, TransferError):
                await reading
            raise
        await reading

    async def _silent(self, entry: _Entry, kv: KvReference) -> TransferError | None:
        """By this call prefill learns as well that somebody still reads."""
        try:
            await self._puller.progress(entry.address, ProgressCall(id=entry.id, agent=kv.agent, seen=-1))
        except TransferError as error:
            return error
        return None


Early = tuple[Request, Blocks, int] | None
"""The request under its seat's id, its blocks, and how many leading ones are here."""


def _fits(entry: _Entry, kv: KvReference, request: Request) -> bool:
    """Whether what was read is the beginning of just this KV, in blocks that are reserved for just this request."""
    ours, theirs = entry.request, entry.kv
    return (
        ours is not None
        and theirs is not None
        and (theirs.agent, theirs.rank, theirs.blocks) == (kv.agent, kv.rank, kv.blocks)
        and (ours.prompt, ours.cache_salt) == (request.prompt, request.cache_salt)
        and ours.sampling.max_tokens == request.sampling.max_tokens
    )


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Its result; None where the event comes first."""
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        waiting.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, TransferError):
                await task
