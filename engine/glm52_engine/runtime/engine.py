"""`LocalEngine`: the ranks of one pod behind the `Engine` protocol.

All books (queue, seats, blocks, records) belong to the event loop; ranks only compute. So there is one owner, no lock,
and nothing is freed before the rank that used it has said that it is done.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from glm52_engine.kv import prefix_chain, prefix_keys
from glm52_engine.runtime.executor import Executor
from glm52_engine.runtime.landed import Landings
from glm52_engine.runtime.ledger import Ledger
from glm52_engine.runtime.rank import AnyRank, Event, Rank, Running, StepLimits
from glm52_engine.runtime.record import EngineStopped, Record
from glm52_engine.runtime.requests import check_request, salt_of
from glm52_engine.runtime.sharing import Sharing
from glm52_engine.runtime.stored import BlockStore
from glm52_engine.runtime.stream import TokenStream
from glm52_engine.runtime.types import (
    Blocks,
    Engine,
    EngineBusy,
    KvPool,
    Partial,
    Prefilled,
    Request,
    Stats,
    Token,
)
from glm52_engine.schedule import Limits

LONG_PROMPT = 16_384
"""Tokens from which a prompt is checked and its keys are made on a thread: for a million the event loop would stand
still for a tenth of a second."""

T = TypeVar("T")


class LocalEngine:
    """See `Engine` for the contract; `load.load_engine` makes one from a checkpoint.

    `prefix_cache`: whether `prefill` shares the KV of full blocks between prompts that begin alike. `launch_ahead`:
    whether ranks start a decode step before they look at the tokens of the one before. `pool_seconds`: that the pools
    took to get their memory.
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
        pool_seconds: float = 0.0,
    ) -> None:
        self.pools: Sequence[KvPool] = [executor.pool for executor in executors]
        self.layout = layout
        self._limits = limits
        self._ledger = Ledger(len(executors), limits)
        self._prefix_cache = prefix_cache
        self._prefix_queries = self._prefix_hits = 0
        self._executors = tuple(executors)
        self._pool_seconds = pool_seconds
        self._landings = Landings()
        self._sharing: Sharing | None = None
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

    def warm_up(self) -> None:
        """A real prefill and decode on every rank, before `start`."""
        for rank in self._ranks:
            rank.warm_up()

    async def prefill(self, request: Request) -> Prefilled:
        keys = await _aside(request, lambda: self._checked(request))
        stored = 0 if self._sharing is None else await self._sharing.find(self._ledger.usable(request, keys))
        record = self._submit(request, prefill=True, stored_tokens=len(request.prompt), prefix=keys, stored=stored)
        result = await self._outcome(record)
        assert isinstance(result, Prefilled)
        return result

    def partial(self, request_id: str) -> Partial | None:
        record = self._ledger.by_id.get(request_id)
        if record is None or not record.prefill or record.state == "held":
            return None
        if record.state != "computing":
            return Partial(record.request)
        executor, running = self._executors[record.blocks.rank], self._ledger.computed
        self._landings.forget(running)
        kept = self._landings.tokens(record.key, running.get(record.key, 0), executor.landed)
        return Partial(record.request, record.blocks, kept)

    async def reserve(self, request: Request, *, wait: bool = True) -> Blocks:
        stored = len(request.prompt) + request.sampling.max_tokens
        chain = await _aside(request, lambda: self._continuable(request, stored))
        record = self._submit(request, prefill=False, stored_tokens=stored)
        record.chain = chain
        if not wait and record.state == "waiting":
            self._close(record)
            raise EngineBusy(f"{request.id} would have to wait for a seat", retry_after=1)
        result = await self._outcome(record)
        assert isinstance(result, Blocks)
        return result

    def decode(self, request: Request, blocks: Blocks, first: Token) -> AsyncIterator[Token]:
        record = self._ledger.by_id.get(request.id)
        if record is None or record.prefill or record.state != "held" or record.blocks != blocks:
            raise ValueError(f"{request.id}: decode needs the blocks that reserve gave to this request, once")
        if record.chain and request.cache_salt != record.request.cache_salt:
            record.chain = self._continuable(request, len(request.prompt))
        if first.finish is None and request.prompt != record.request.prompt:
            raise ValueError(f"{request.id}: decode needs the prompt for which its blocks were reserved")
        record.request = request
        assert record.grant is not None
        stream = TokenStream(lambda: self._close(record), first)
        record.stream_ref = weakref.ref(stream)
        if first.finish is not None:
            stream.end()
            self._forget(record)
            self._admit()
            return stream
        record.state = "decoding"
        record.output = [first.id] if record.chain else None
        self._start(record, computed=len(request.prompt), last=first)
        return stream

    def release(self, request_id: str) -> None:
        record = self._ledger.by_id.get(request_id)
        if record is not None:
            self._close(record)

    def stats(self) -> Stats:
        counters = [rank.counters for rank in self._ranks]
        admission = self._ledger.admission
        seats = admission.seats_taken
        hot = [found for executor in self._executors if (found := executor.hot_counters()) is not None]
        return Stats(
            running=sum(seats),
            waiting=admission.waiting,
            blocks_total=admission.blocks_total,
            blocks_free=admission.blocks_free,
            prompt_tokens_computed=sum(counter.prompt_tokens_computed for counter in counters),
            tokens_generated=sum(counter.tokens_generated for counter in counters),
            steps=sum(counter.steps for counter in counters),
            per_rank_running=seats,
            blocks_cached=admission.blocks_cached,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
            store=None if self._sharing is None else self._sharing.store.counters,
            hot=functools.reduce(operator.add, hot) if hot else None,
            seats_total=len(seats) * self._limits.seats,
            queue_blocks=admission.blocks_waited_for,
            queue_positions=tuple(self._ledger.positions),
            queue_positions_sum=self._ledger.positions_sum,
            pool_bytes=sum(pool.num_blocks * pool.block_bytes for pool in self.pools),
            pool_seconds=self._pool_seconds,
        )

    def check_integrity(self) -> None:
        """For tests: raises BlockError unless records, seats, blocks and references balance."""
        self._ledger.check_integrity(saving=0 if self._sharing is None else self._sharing.saving)

    def seconds_without_progress(self) -> float:
        return max(rank.seconds_without_progress() for rank in self._ranks)

    def failure(self) -> BaseException | None:
        return next((rank.failure for rank in self._ranks if rank.failure is not None), None)

    def suspect(self) -> int:
        return max(self._ranks, key=lambda rank: (rank.failure is not None, rank.seconds_without_progress())).index

    def withdraw(self, request_id: str) -> bool:
        record = self._ledger.by_id.get(request_id)
        if record is None or record.state != "waiting":
            return False
        self._close(record)
        return True

    def use_store(self, store: BlockStore) -> None:
        """Before `start`: prefixes come from there too, and go there. The engine closes it when it stops."""
        self._sharing = Sharing(store, self._ledger.admission, self.pools, self._admit)

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
        return prefix_keys(request.prompt, self._limits.block_size, salt_of(request, self.layout))

    def _continuable(self, request: Request, stored_tokens: int) -> tuple[bytes, ...]:
        """The chain of a prompt that can be continued, if its KV is to be saved at the end; raises RequestError."""
        check_request(request, self._limits, stored_tokens=stored_tokens)
        salt = salt_of(request, self.layout)
        return () if self._sharing is None else prefix_chain(request.prompt, self._limits.block_size, salt)

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
        self._loop = asyncio.get_running_loop()
        record = self._ledger.enter(
            request, self._loop.create_future(), time.monotonic(), prefill=prefill, stored_tokens=stored_tokens,
            prefix=prefix, stored=stored,
        )  # fmt: skip
        self._admit()
        self._ledger.note_position(record)
        return record

    async def _outcome(self, record: Record) -> Prefilled | Blocks:
        try:
            return await record.done
        except asyncio.CancelledError:
            # Also when the result was there already: a caller that never saw it cannot release it.
            self._close(record)
            raise

    def _admit(self) -> None:
        for record in self._ledger.admit(time.monotonic()):
            if record.prefill:
                self._prefix_queries += len(record.request.prompt) if self._prefix_cache else 0
                if self._sharing is not None and record.stored > record.cached:
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
        if self._ledger.by_key.get(record.key) is not record:
            return
        if record.closing:
            self._forget(record)
            self._admit()
            return
        record.fetched = count
        self._compute(record)
        # Behind the start: the rank brings what arrived to its device before it begins any other sequence.
        self._ledger.publish(record, self._ledger.cached_tokens(record))

    def _compute(self, record: Record) -> None:
        record.state = "computing"
        cached = self._ledger.cached_tokens(record)
        self._prefix_hits += cached
        self._start(record, computed=cached, last=None)

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
                kept=record.output is not None,
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
            record = self._ledger.by_key.get(event.key)
            if record is None:
                continue
            if event.token is not None and record.stream is not None:
                record.stream.put(event.token)
            record.note(event.token)
            if event.ended:
                self._ended(record, event)
            elif event.token is None:
                self._ledger.publish(record, event.computed)
        if self.failure() is not None:
            self._abort_all()
        else:
            self._admit()

    def _ended(self, record: Record, event: Event) -> None:
        """The rank no longer touches this sequence."""
        token = event.token
        if token is not None and token.finish == "error":
            # Logits that are no numbers come from KV that is none: cached, it would fail every prompt that begins so.
            self._ledger.admission.distrust(record.key)
            if self._sharing is not None and record.fetched:
                self._sharing.store.discard(record.prefix)
        else:
            # Also of a prompt that was given up half-way: its client often asks again.
            self._ledger.publish(record, event.computed)
            if self._sharing is not None and record.prefill:
                # Not before the end: until then a device may not have copied the blocks out.
                self._sharing.save(record, record.prefix[: event.computed // self._limits.block_size])
            elif self._sharing is not None and record.output is not None and event.computed:
                self._sharing.save_conversation(record)
        if record.prefill and token is not None and not record.closing:
            record.state = "held"
            self._ledger.admission.leave_seat(record.key)
            cached = self._ledger.cached_tokens(record)
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

    def _close(self, record: Record) -> None:
        """End a request wherever it stands; more than once is harmless."""
        if record.closing or self._ledger.by_key.get(record.key) is not record:
            return
        record.closing = True
        self._ledger.hide(record)
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
        self._ledger.forget(record)

    def _abort_all(self) -> None:
        """After stop or a failure: no rank computes any more, so nothing needs to be waited for."""
        for record in list(self._ledger.by_key.values()):
            record.fail(EngineStopped("the engine stopped"))
            if record.stream is not None:
                record.stream.abort()
            self._forget(record)


async def _aside(request: Request, work: Callable[[], T]) -> T:
    return work() if len(request.prompt) < LONG_PROMPT else await asyncio.to_thread(work)


if TYPE_CHECKING:

    def _conforms(engine: LocalEngine) -> Engine:
        return engine
