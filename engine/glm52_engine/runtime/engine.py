"""`LocalEngine`: the ranks of one pod behind the `Engine` protocol.

All books (queue, seats, blocks, records) belong to the event loop; ranks only compute. So there is one owner, no lock,
and nothing is freed before the rank that used it has said that it is done.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from glm52_engine.config import RoleConfig
from glm52_engine.kv.pools import Pool
from glm52_engine.model import Model
from glm52_engine.runtime.load import load_parts
from glm52_engine.runtime.rank import Event, Rank, Running, StepLimits
from glm52_engine.runtime.requests import check_request
from glm52_engine.runtime.stream import TokenStream
from glm52_engine.runtime.types import Blocks, Engine, KvPool, Prefilled, Request, RequestError, Stats, Token
from glm52_engine.schedule import Admission, Grant, Limits, blocks_for

State = Literal["waiting", "computing", "held", "decoding"]


class EngineStopped(RuntimeError):
    """The engine was stopped, a rank failed, or the request was released while this call was waiting for it."""


@dataclass(slots=True)
class _Record:
    """One request from submission to the return of its last block."""

    key: str
    request: Request
    prefill: bool
    done: asyncio.Future[Prefilled | Blocks]
    state: State = "waiting"
    grant: Grant | None = None
    closing: bool = False
    stream_ref: weakref.ref[TokenStream] | None = None

    @property
    def blocks(self) -> Blocks:
        if self.grant is None:
            raise RuntimeError(f"{self.request.id} has no blocks yet")
        return Blocks(self.grant.rank, self.grant.blocks)

    @property
    def stream(self) -> TokenStream | None:
        """None also when the consumer dropped it: holding it here would keep a dropped one alive, and its blocks."""
        return None if self.stream_ref is None else self.stream_ref()


class LocalEngine:
    """See `Engine` for the contract; `load` makes one from a checkpoint."""

    def __init__(
        self, model: Model, pools: list[Pool], *, limits: Limits, step: StepLimits, layout: dict[str, str | int]
    ) -> None:
        self.pools: Sequence[KvPool] = list(pools)
        self.layout = layout
        self._limits = limits
        self._admission = Admission(len(pools), limits)
        self._records: dict[str, _Record] = {}
        self._by_key: dict[str, _Record] = {}
        self._keys = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._ranks = [
            Rank(
                index,
                model,
                pool,
                seats=limits.seats,
                blocks_per_seat=blocks_for(limits.max_model_len, limits.block_size),
                limits=step,
                post=self._post,
            )
            for index, pool in enumerate(pools)
        ]

    @classmethod
    def load(
        cls,
        path: Path,
        role: RoleConfig,
        *,
        max_model_len: int,
        block_size: int,
        on_phase: Callable[[str], None],
        vocab_bound: int | None = None,
        eos_ids: frozenset[int] | None = None,
        step_tokens: int = 512,
    ) -> LocalEngine:
        """Blocking: config, preflight, weights, pools, one real forward per rank. Raises ConfigError.

        `vocab_bound` and `eos_ids` come from the checkpoint's tokenizer files when not given; `step_tokens` is the
        most rows of one step.
        """
        parts = load_parts(
            path,
            role,
            max_model_len=max_model_len,
            block_size=block_size,
            on_phase=on_phase,
            vocab_bound=vocab_bound,
            eos_ids=eos_ids,
            step_tokens=step_tokens,
        )
        engine = cls(parts.model, parts.pools, limits=parts.limits, step=parts.step, layout=parts.layout)
        engine.warm_up(on_phase)
        return engine

    def warm_up(self, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        """A real prefill and decode on every rank, before `start`."""
        on_phase("first forward")
        for rank in self._ranks:
            rank.warm_up()

    async def prefill(self, request: Request) -> Prefilled:
        check_request(request, self._limits, stored_tokens=len(request.prompt))
        record = self._submit(request, prefill=True, stored_tokens=len(request.prompt))
        result = await self._outcome(record)
        assert isinstance(result, Prefilled)
        return result

    async def reserve(self, request: Request) -> Blocks:
        stored = len(request.prompt) + request.sampling.max_tokens
        check_request(request, self._limits, stored_tokens=stored)
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
        return Stats(
            running=sum(seats),
            waiting=self._admission.waiting,
            blocks_total=self._admission.blocks_total,
            blocks_free=self._admission.blocks_free,
            prompt_tokens_computed=sum(counter.prompt_tokens_computed for counter in counters),
            tokens_generated=sum(counter.tokens_generated for counter in counters),
            steps=sum(counter.steps for counter in counters),
            per_rank_running=seats,
        )

    def seconds_without_progress(self) -> float:
        return max(rank.seconds_without_progress() for rank in self._ranks)

    def failure(self) -> BaseException | None:
        return next((rank.failure for rank in self._ranks if rank.failure is not None), None)

    def start(self) -> None:
        for rank in self._ranks:
            rank.start()

    def stop(self) -> None:
        self._stopped = True
        for rank in self._ranks:
            rank.stop()
        self.pools = []
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort_all)

    # Everything below runs on the event loop, except _post.

    def _submit(self, request: Request, *, prefill: bool, stored_tokens: int) -> _Record:
        if self._stopped or self.failure() is not None:
            raise EngineStopped("the engine takes no requests any more") from self.failure()
        if request.id in self._records:
            raise RequestError(f"a request with the id {request.id} is already here")
        self._loop = asyncio.get_running_loop()
        record = _Record(f"{request.id}#{next(self._keys)}", request, prefill, self._loop.create_future())
        self._records[request.id] = self._by_key[record.key] = record
        self._admission.submit(record.key, blocks_for(stored_tokens, self._limits.block_size))
        self._admit()
        return record

    async def _outcome(self, record: _Record) -> Prefilled | Blocks:
        try:
            return await record.done
        except asyncio.CancelledError:
            # Also when the result was there already: a caller that never saw it cannot release it.
            self._close(record)
            raise

    def _admit(self) -> None:
        for grant in self._admission.admit():
            record = self._by_key[grant.key]
            record.grant = grant
            if record.prefill:
                record.state = "computing"
                self._start(record, computed=0, last=None)
            else:
                record.state = "held"
                _resolve(record, record.blocks)

    def _start(self, record: _Record, *, computed: int, last: Token | None) -> None:
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
                computed=computed,
                last=last,
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
                self._ended(record, event.token)
        if self.failure() is not None:
            self._abort_all()
        else:
            self._admit()

    def _ended(self, record: _Record, token: Token | None) -> None:
        """The rank no longer touches this sequence."""
        if record.prefill and token is not None and not record.closing:
            record.state = "held"
            self._admission.leave_seat(record.key)
            _resolve(record, Prefilled(token, record.blocks, len(record.request.prompt)))
            return
        if record.stream is not None and token is None:
            record.stream.abort()
        self._forget(record)

    def _close(self, record: _Record) -> None:
        """End a request wherever it stands; more than once is harmless."""
        if record.closing or self._by_key.get(record.key) is not record:
            return
        record.closing = True
        # The id is free for a retry at once; what the rank still uses stays booked under the key.
        self._records.pop(record.request.id, None)
        _fail(record, EngineStopped(f"request {record.request.id} was released"))
        if record.stream is not None:
            record.stream.abort()
        if record.state in ("computing", "decoding"):
            assert record.grant is not None
            self._ranks[record.grant.rank].abort(record.key)
        else:
            self._forget(record)
            self._admit()

    def _forget(self, record: _Record) -> None:
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
            _fail(record, EngineStopped("the engine stopped"))
            if record.stream is not None:
                record.stream.abort()
            self._forget(record)


def _resolve(record: _Record, result: Prefilled | Blocks) -> None:
    if not record.done.done():
        record.done.set_result(result)


def _fail(record: _Record, error: Exception) -> None:
    if not record.done.done():
        record.done.set_exception(error)
        # A call that was cancelled never looks; asyncio would log that as an error.
        record.done.exception()


if TYPE_CHECKING:

    def _conforms(engine: LocalEngine) -> Engine:
        return engine
