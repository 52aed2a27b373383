"""Who is here and what they have: a pod's requests with their places in the queue, seats and blocks.

Belongs to the event loop, like the books of `schedule` that it keeps in step with the requests.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Sequence

from glm52_engine.kv import BlockError
from glm52_engine.runtime.record import Record
from glm52_engine.runtime.types import QUEUE_BOUNDS, Blocks, EngineBusy, Prefilled, Request, RequestError
from glm52_engine.schedule import Admission, Departures, Limits, blocks_for

RETRY_SECONDS = 5
MOST_RETRY_SECONDS = 60
"""What a refused client is told while the queue's speed is unknown, and at most: pods come and go meanwhile."""


class Ledger:
    """`by_id`: requests that can be asked for; `by_key`: all that a rank has not ended, too."""

    def __init__(self, ranks: int, limits: Limits) -> None:
        self.admission = Admission(ranks, limits)
        self.by_id: dict[str, Record] = {}
        self.by_key: dict[str, Record] = {}
        self.positions = [0] * (len(QUEUE_BOUNDS) + 1)
        self.positions_sum = 0
        self.computed: dict[str, int] = {}
        """By key: leading tokens of the prompts under way."""
        self._limits = limits
        self._departures = Departures()
        self._keys = itertools.count()

    def enter(
        self, request: Request, done: asyncio.Future[Prefilled | Blocks], now: float, *, prefill: bool,
        stored_tokens: int, prefix: tuple[bytes, ...], stored: int,
    ) -> Record:  # fmt: skip
        """Queue a request that needs room for `stored_tokens`. Raises RequestError and EngineBusy."""
        if request.id in self.by_id:
            raise RequestError(f"a request with the id {request.id} is already here")
        if self.admission.waiting >= self._limits.max_waiting:
            raise self._busy(now)
        record = Record(f"{request.id}#{next(self._keys)}", request, prefill, done, now, prefix, stored=stored)
        blocks = blocks_for(stored_tokens, self._limits.block_size)
        self.by_id[request.id] = self.by_key[record.key] = record
        self.admission.submit(
            record.key, blocks, priority=request.priority, prefix=self.usable(request, prefix),
            work=blocks if prefill else 0,
        )  # fmt: skip
        return record

    def admit(self, now: float) -> list[Record]:
        """Whose turn has come, with their grants."""
        grants = self.admission.admit()
        self._departures.note(now, len(grants), left=self.admission.waiting)
        for grant in grants:
            record = self.by_key[grant.key]
            record.grant, record.seated = grant, now
        return [self.by_key[grant.key] for grant in grants]

    def note_position(self, record: Record) -> None:
        """Where a request that has to wait stands now."""
        if (before := self.admission.before(record.key)) is not None:
            self.positions[bisect.bisect_left(QUEUE_BOUNDS, before)] += 1
            self.positions_sum += before

    def usable(self, request: Request, prefix: Sequence[bytes]) -> tuple[bytes, ...]:
        """The last token is always computed: its logits choose the first one of the output."""
        return tuple(prefix[: (len(request.prompt) - 1) // self._limits.block_size])

    def cached_tokens(self, record: Record) -> int:
        """Leading tokens of the prompt whose KV was found, in the pool or in the store."""
        assert record.grant is not None
        return (record.grant.cached + record.fetched) * self._limits.block_size

    def publish(self, record: Record, computed: int) -> None:
        """Full blocks among the first `computed` tokens of the prompt are there for others."""
        self.computed[record.key] = computed
        self.admission.publish(record.key, record.prefix[: computed // self._limits.block_size])

    def hide(self, record: Record) -> None:
        """The id is free for a retry at once; what the rank still uses stays booked under the key."""
        if self.by_id.get(record.request.id) is record:
            del self.by_id[record.request.id]

    def forget(self, record: Record) -> None:
        """Give back everything; the last thing that happens to a record."""
        if record.state == "waiting":
            self.admission.withdraw(record.key)
        else:
            self.admission.finish(record.key)
        del self.by_key[record.key]
        self.computed.pop(record.key, None)
        self.hide(record)

    def check_integrity(self, *, saving: int) -> None:
        """Raises BlockError unless records, seats and blocks balance; `saving`: prompts that a store still reads."""
        admission = self.admission
        admission.check_integrity()
        waiting = sum(record.state == "waiting" for record in self.by_key.values())
        if waiting != admission.waiting:
            raise BlockError(f"{waiting} requests wait, {admission.waiting} are queued")
        for key, record in self.by_key.items():
            have = record.grant.blocks if record.grant else ()
            if have != admission.blocks_of(key):
                raise BlockError(f"{key}: {record.state} with blocks {have}, booked {admission.blocks_of(key)}")
        placed = sum(record.grant is not None for record in self.by_key.values())
        if placed + saving != admission.placed:
            raise BlockError(f"{placed} have blocks and {saving} are saved, {admission.placed} are placed")
        strangers = [r.key for r in self.by_id.values() if self.by_key.get(r.key) is not r or r.closing]
        if strangers:
            raise BlockError(f"{strangers} have ended and are still known by their ids")

    def _busy(self, now: float) -> EngineBusy:
        waiting = self.admission.waiting
        return EngineBusy(
            f"{waiting} requests wait already and no more than {self._limits.max_waiting} may: try again later",
            retry_after=self._departures.seconds_for(waiting, now, unknown=RETRY_SECONDS, most=MOST_RETRY_SECONDS),
        )
