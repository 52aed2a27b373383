"""`LocalEngine`: the ranks of one pod behind the `Engine` protocol.

All books (queue, seats, blocks, records) belong to the event loop; ranks only compute. So there is one owner, no lock,
and nothing is freed before the rank that used it has said that it is done.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
import json
import operator
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from glm52_engine.config import Accelerator, KvCacheDtype, RoleConfig
from glm52_engine.kv import BlockError, prefix_keys
from glm52_engine.runtime.executor import Executor
from glm52_engine.runtime.load import load_parts
from glm52_engine.runtime.rank import AnyRank, Event, Rank, Running, StepLimits
from glm52_engine.runtime.record import EngineStopped, Record
from glm52_engine.runtime.requests import check_request
from glm52_engine.runtime.sharing import Sharing
from glm52_engine.runtime.stored import BlockStore
from glm52_engine.runtime.stream import TokenStream
from glm52_engine.runtime.types import (
    QUEUE_BOUNDS,
    Blocks,
    Engine,
    EngineBusy,
    KvPool,
    Prefilled,
    Request,
    RequestError,
    Stats,
    Token,
)
from glm52_engine.schedule import Admission, Departures, Limits, blocks_for

RETRY_SECONDS = 5
MOST_RETRY_SECONDS = 60
"""What a refused client is told while the queue's speed is unknown, and at most: pods come and go meanwhile."""

LONG_PROMPT = 16_384
"""Tokens from which a prompt is checked and its keys are made on a thread: for a million the event loop would stand
still for a tenth of a second."""

T = TypeVar("T")


class LocalEngine:
    """See `Engine` for the contract; `load` makes one from a checkpoint.

    `prefix_cache`: whether `prefill` shares the KV of full blocks between prompts that begin alike. `launch_ahead`:
    whether ranks start a decode step before they look at the tokens of the one before.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        *,
        limits: Limits,
        step: StepLimits,
        layout: dict[str, str | int],
        prefix_cache: bool = True,
        launch_ahead: bool = False,
    ) -> None:
        self.pools: Sequence[KvPool] = [executor.pool for executor in executors]
        self.layout = layout
        self._limits = limits
        self._admission = Admission(len(executors), limits)
        self._departures = Departures()
        self._prefix_cache = prefix_cache
        self._prefix_queries = self._prefix_hits = 0
        self._executors = tuple(executors)
        self._positions = [0] * (len(QUEUE_BOUNDS) + 1)
        self._positions_sum = 0
        self._pool_seconds = 0.0
        self._sharing: Sharing | None = None
        self._records: dict[str, Record] = {}
        self._by_key: dict[str, Record] = {}
        self._keys = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._ranks: Sequence[AnyRank] = [
            Rank(
                index,
                executor,
                seats=limits.seats,
                limits=step,
                post=self._post,
                launch_ahead=launch_ahead,
            )
            for index, executor in enumerate(executors)
        ]

    @classmethod
    def load(
        cls,
        path: Path,
        role: RoleConfig,
        *,
        max_model_len: int,
        kv_cache_dtype: KvCacheDtype = "auto",
        block_size: int,
        on_phase: Callable[[str], None],
        vocab_bound: int | None = None,
        eos_ids: frozenset[int] | None = None,
        step_tokens: int | None = None,
        accelerator: Accelerator = "cpu",
    ) -> LocalEngine:
        """Blocking: config, preflight, weights, pools, one real forward per rank. Raises ConfigError.

        `vocab_bound` and `eos_ids` come from the checkpoint's tokenizer files when not given; `step_tokens`, the most
        rows of one step, suits the accelerator when not given.
        """
        parts = load_parts(
            path,
            role,
            accelerator=accelerator,
            max_model_len=max_model_len,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            on_phase=on_phase,
            vocab_bound=vocab_bound,
            eos_ids=eos_ids,
            step_tokens=step_tokens,
        )
        engine = cls(
            parts.executors,
            limits=parts.limits,
            step=parts.step,
            layout=parts.layout,
            prefix_cache=role.prefix_cache,
            # On a CPU nothing runs beside the host: a step ahead would only hold up the tokens of the one before.
            launch_ahead=role.launch_ahead and accelerator != "cpu",
        )
        on_phase("first forward" if accelerator == "cpu" else "capturing graphs and first forward")
        engine._pool_seconds = parts.pool_seconds
        engine.warm_up()
        return engine

    def warm_up(self) -> None:
        """A real prefill and decode on every rank, before `start`."""
        for rank in self._ranks:
            rank.warm_up()

    async def prefill(self, request: Request) -> Prefilled:
        keys = await _aside(request, lambda: self._checked(request))
        stored = 0 if self._sharing is None else await self._sharing.find(self._usable(request, keys))
        record = self._submit(request, prefill=True, stored_tokens=len(request.prompt), prefix=keys, stored=stored)
        result = await self._outcome(record)
        assert isinstance(result, Prefilled)
        return result

    async def reserve(self, request: Request) -> Blocks:
        stored = len(request.prompt) + request.sampling.max_tokens
        await _aside(request, lambda: check_request(request, self._limits, stored_tokens=stored))
        record = self._submit(request, prefill=False, stored_tokens=stored)
        result = await self._outcome(record)
        assert isinstance(result, Blocks)
        return result

    def decode(self, request: Request, blocks: Blocks, first: Token) -> AsyncIterator[Token]:
        record = self._records.get(request.id)
        if record is None or record.prefill or record.state != "held" or record.blocks != blocks:
            raise ValueError(f"{request.id}: decode needs the blocks that reserve gave to this request, once")
        assert record.grant is not None
        stream = TokenStream(lambda: self._close(record), first)
        record.stream_ref = weakref.ref(stream)
        if first.finish is not None:
            stream.end()
            self._forget(record)
            self._admit()
            return stream
        record.state = "decoding"
        self._start(record, computed=len(request.prompt), last=first)
        return stream

    def release(self, request_id: str) -> None:
        record = self._records.get(request_id)
        if record is not None:
            self._close(record)

    def stats(self) -> Stats:
        counters = [rank.counters for rank in self._ranks]
        seats = self._admission.seats_taken
        hot = [found for executor in self._executors if (found := executor.hot_counters()) is not None]
        return Stats(
            running=sum(seats),
            waiting=self._admission.waiting,
            blocks_total=self._admission.blocks_total,
            blocks_free=self._admission.blocks_free,
            prompt_tokens_computed=sum(counter.prompt_tokens_computed for counter in counters),
            tokens_generated=sum(counter.tokens_generated for counter in counters),
            steps=sum(counter.steps for counter in counters),
            per_rank_running=seats,
            blocks_cached=self._admission.blocks_cached,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
            store=None if self._sharing is None else self._sharing.store.counters,
            hot=functools.reduce(operator.add, hot) if hot else None,
            seats_total=len(seats) * self._limits.seats,
            queue_blocks=self._admission.blocks_waited_for,
            queue_positions=tuple(self._positions),
            queue_positions_sum=self._positions_sum,
            pool_bytes=sum(pool.num_blocks * pool.block_bytes for pool in self.pools),
            pool_seconds=self._pool_seconds,
        )

    def check_integrity(self) -> None:
        """For tests: raises BlockError unless records, seats, blocks and references balance."""
        self._admission.check_integrity()
        waiting = sum(record.state == "waiting" for record in self._by_key.values())
        if waiting != self._admission.waiting:
            raise BlockError(f"{waiting} requests wait, {self._admission.waiting} are queued")
        for key, record in self._by_key.items():
            have = record.grant.blocks if record.grant else ()
            if have != self._admission.blocks_of(key):
                raise BlockError(f"{key}: {record.state} with blocks {have}, booked {self._admission.blocks_of(key)}")
        placed = sum(record.grant is not None for record in self._by_key.values())
        saving = 0 if self._sharing is None else self._sharing.saving
        if placed + saving != self._admission.placed:
            raise BlockError(f"{placed} have blocks and {saving} are saved, {self._admission.placed} are placed")
        strangers = [r.key for r in self._records.values() if self._by_key.get(r.key) is not r or r.closing]
        if strangers:
            raise BlockError(f"{strangers} have ended and are still known by their ids")

    def seconds_without_progress(self) -> float:
        return max(rank.seconds_without_progress() for rank in self._ranks)

    def failure(self) -> BaseException | None:
        return next((rank.failure for rank in self._ranks if rank.failure is not None), None)

    def suspect(self) -> int:
        return max(self._ranks, key=lambda rank: (rank.failure is not None, rank.seconds_without_progress())).index

    def withdraw(self, request_id: str) -> bool:
        record = self._records.get(request_id)
        if record is None or record.state != "waiting":
            return False
        self._close(record)
        return True

    def use_store(self, store: BlockStore) -> None:
        """Before `start`: prefixes come from there too, and go there. The engine closes it when it stops."""
        self._sharing = Sharing(store, self._admission, self.pools, self._admit)

    def start(self) -> None:
        for rank in self._ranks:
            rank.start()

    def stop(self) -> None:
        self._stopped = True
        if self._sharing is not None:
            # It reads and writes the pools.
            self._sharing.store.close()
        for rank in self._ranks:
            rank.stop()
        self.pools = []
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort_all)

    # Everything below runs on the event loop, except _post.

    def _checked(self, request: Request) -> tuple[bytes, ...]:
        """The keys of a prompt that can run; raises RequestError."""
        check_request(request, self._limits, stored_tokens=len(request.prompt))
        if not self._prefix_cache:
            return ()
        salt = json.dumps([self.layout, request.cache_salt], sort_keys=True).encode()
        return prefix_keys(request.prompt, self._limits.block_size, salt)

    def _usable(self, request: Request, prefix: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The last token is always computed: its logits choose the first one of the output."""
        return prefix[: (len(request.prompt) - 1) // self._limits.block_size]

    def _submit(
        self,
        request: Request,
        *,
        prefill: bool,
        stored_tokens: int,
        prefix: tuple[bytes, ...] = (),
        stored: int = 0,
    ) -> Record:
        if self._stopped or self.failure() is not None:
            raise EngineStopped("the engine takes no requests any more") from self.failure()
        if request.id in self._records:
            raise RequestError(f"a request with the id {request.id} is already here")
        if self._admission.waiting >= self._limits.max_waiting:
            raise self._busy()
        self._loop = asyncio.get_running_loop()
        key = f"{request.id}#{next(self._keys)}"
        record = Record(key, request, prefill, self._loop.create_future(), time.monotonic(), prefix, stored=stored)
        blocks = blocks_for(stored_tokens, self._limits.block_size)
        self._records[request.id] = self._by_key[record.key] = record
        known = self._usable(request, prefix)
        work = blocks if prefill else 0
        self._admission.submit(record.key, blocks, priority=request.priority, prefix=known, work=work)
        self._admit()
        if (before := self._admission.before(record.key)) is not None:
            self._positions[bisect.bisect_left(QUEUE_BOUNDS, before)] += 1
            self._positions_sum += before
        return record

    def _busy(self) -> EngineBusy:
        waiting = self._admission.waiting
        return EngineBusy(
            f"{waiting} requests wait already and no more than {self._limits.max_waiting} may: try again later",
            retry_after=self._departures.seconds_for(
                waiting, time.monotonic(), unknown=RETRY_SECONDS, most=MOST_RETRY_SECONDS
            ),
        )

    async def _outcome(self, record: Record) -> Prefilled | Blocks:
        try:
            return await record.done
        except asyncio.CancelledError:
            # Also when the result was there already: a caller that never saw it cannot release it.
            self._close(record)
            raise

    def _admit(self) -> None:
        grants = self._admission.admit()
        now = time.monotonic()
        self._departures.note(now, len(grants), left=self._admission.waiting)
        for grant in grants:
            record = self._by_key[grant.key]
            record.grant, record.seated = grant, now
            if record.prefill:
                self._prefix_queries += len(record.request.prompt) if self._prefix_cache else 0
                if self._sharing is not None and record.stored > grant.cached:
                    # The seat is kept meanwhile: what comes in is wanted for this request's first step.
                    record.state = "fetching"
                    self._sharing.fetch(record, functools.partial(self._fetched, record))
                else:
                    self._compute(record)
            else:
                record.state = "held"
                record.resolve(record.blocks)

    def _fetched(self, record: Record, count: int) -> None:
        """Nothing but the rank touches the blocks any more."""
        if self._by_key.get(record.key) is not record:
            return
        if record.closing:
            self._forget(record)
            self._admit()
            return
        record.fetched = count
        self._compute(record)
        # Behind the start: the rank brings what arrived to its device before it begins any other sequence.
        self._publish(record, self._cached_tokens(record))

    def _compute(self, record: Record) -> None:
        record.state = "computing"
        cached = self._cached_tokens(record)
        self._prefix_hits += cached
        self._start(record, computed=cached, last=None)

    def _cached_tokens(self, record: Record) -> int:
        """Leading tokens of the prompt whose KV was found, in the pool or in the store."""
        assert record.grant is not None
        return (record.grant.cached + record.fetched) * self._limits.block_size

    def _start(self, record: Record, *, computed: int, last: Token | None) -> None:
        grant, request = record.grant, record.request
        assert grant is not None
        seed = request.sampling.seed
        self._ranks[grant.rank].start_sequence(
            Running(
                key=record.key,
                seat=grant.seat,
                blocks=grant.blocks,
                prompt=request.prompt,
                sampling=request.sampling,
                seed=secrets.randbits(62) if seed is None else seed,
                prefill_only=record.prefill,
                priority=request.priority,
                choices=request.choices if record.prefill else 1,
                computed=computed,
                arrived=computed if record.fetched else 0,
                last=last,
                constraint=request.constraint,
            )
        )

    def _post(self, events: list[Event]) -> None:
        """On a rank's thread. A loop that is closed has nobody left to tell."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(self._deliver, events)
            except RuntimeError:
                if not loop.is_closed():
                    raise

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            record = self._by_key.get(event.key)
            if record is None:
                continue
            if event.token is not None and record.stream is not None:
                record.stream.put(event.token)
            if event.ended:
                self._ended(record, event)
            elif event.token is None:
                self._publish(record, event.computed)
        if self.failure() is not None:
            self._abort_all()
        else:
            self._admit()

    def _ended(self, record: Record, event: Event) -> None:
        """The rank no longer touches this sequence."""
        token = event.token
        if token is not None and token.finish == "error":
            # Logits that are no numbers come from KV that is none: cached, it would fail every prompt that begins so.
            self._admission.distrust(record.key)
            if self._sharing is not None and record.fetched:
                self._sharing.store.discard(record.prefix)
        else:
            # Also of a prompt that was given up half-way: its client often asks again.
            self._publish(record, event.computed)
            if self._sharing is not None and record.prefill:
                # Not before the end: until then a device may not have copied the blocks out.
                self._sharing.save(record, record.prefix[: event.computed // self._limits.block_size])
        if record.prefill and token is not None and not record.closing:
            record.state = "held"
            self._admission.leave_seat(record.key)
            cached = self._cached_tokens(record)
            record.resolve(
                Prefilled(
                    token,
                    record.blocks,
                    event.computed - cached,
                    cached_tokens=cached,
                    others=event.others,
                    queued_seconds=record.seated - record.came,
                )
            )
            return
        if record.stream is not None and token is None:
            record.stream.abort()
        self._forget(record)

    def _publish(self, record: Record, computed: int) -> None:
        """Full blocks among the first `computed` tokens of the prompt are there for others."""
        self._admission.publish(record.key, record.prefix[: computed // self._limits.block_size])

    def _close(self, record: Record) -> None:
        """End a request wherever it stands; more than once is harmless."""
        if record.closing or self._by_key.get(record.key) is not record:
            return
        record.closing = True
        # The id is free for a retry at once; what the rank still uses stays booked under the key.
        self._records.pop(record.request.id, None)
        record.fail(EngineStopped(f"request {record.request.id} was released"))
        if record.stream is not None:
            record.stream.abort()
        if record.state in ("computing", "decoding"):
            assert record.grant is not None
            self._ranks[record.grant.rank].abort(record.key)
        elif record.fetch is not None and record.state == "fetching":
            record.fetch.cancelled = True
        else:
            self._forget(record)
            self._admit()

    def _forget(self, record: Record) -> None:
        """Give back everything; the last thing that happens to a record."""
        if record.state == "waiting":
            self._admission.withdraw(record.key)
        else:
            self._admission.finish(record.key)
        del self._by_key[record.key]
        if self._records.get(record.request.id) is record:
            del self._records[record.request.id]

    def _abort_all(self) -> None:
        """After stop or a failure: no rank computes any more, so nothing needs to be waited for."""
        for record in list(self._by_key.values()):
            record.fail(EngineStopped("the engine stopped"))
            if record.stream is not None:
                record.stream.abort()
            self._forget(record)


async def _aside(request: Request, work: Callable[[], T]) -> T:
    return work() if len(request.prompt) < LONG_PROMPT else await asyncio.to_thread(work)


if TYPE_CHECKING:

    def _conforms(engine: LocalEngine) -> Engine:
        return engine
