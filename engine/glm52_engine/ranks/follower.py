"""A rank in lock-step: it does exactly what its order says, or fails with the reason. It plans nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast

import torch

from glm52_engine.kv.pools import Pool
from glm52_engine.model import Model, Span
from glm52_engine.model.cache import HotCache
from glm52_engine.ranks.books import running_of
from glm52_engine.ranks.experts import ShardedMoe
from glm52_engine.ranks.lane import Lane
from glm52_engine.ranks.masks import GivenMask
from glm52_engine.ranks.messages import Flags, RankOrder, RankResult, Shape
from glm52_engine.runtime.executor import EagerWork, Executor, HostExecutor, check_finite
from glm52_engine.runtime.rank import Event, Flight, Rank, Running, StepLimits
from glm52_engine.schedule.plan import Planned
from glm52_engine.structured import Matcher


class OrderError(Exception):
    """An order that this rank cannot carry out exactly; the replica ends by it."""


class LockStep(Executor, Protocol):
    """An executor that computes together with all other ranks. `shape`, of the next step, is set before `launch`, which
    comes without spans where this rank has no rows; `relaunch` goes on to the shape that follows."""

    shape: Shape | None


class ShardedExecutor(HostExecutor):
    """Computes a step on the CPU together with all other ranks; without rows it still has its experts to give."""

    def __init__(
        self, model: Model, moes: Sequence[ShardedMoe], lane: Lane, pool: Pool, *, limits: StepLimits, seats: int,
        blocks_per_seat: int, hot: HotCache | None = None,
    ) -> None:  # fmt: skip
        """`moes`: those of the model, in the order of its layers."""
        super().__init__(
            model, pool, seats=seats, blocks_per_seat=blocks_per_seat, vocab_bound=limits.vocab_bound, hot=hot
        )
        self._lane, self._moes = lane, moes
        self._like = torch.empty(0, dtype=getattr(torch, model.spec.dtype))
        self._vocab_size = model.spec.vocab_size
        self.shape: Shape | None = None

    def warm_up(self) -> None:
        """The same two steps on all ranks at once, with numbers below those of any plan."""
        rows = min(2, self.pool.block_size)
        for number, start, count in ((-2, 0, rows), (-1, min(rows, self.pool.block_size - 1), 1)):
            self.shape = Shape(number, count, (count,) * self._lane.world, Flags(prefill=count > 1))
            check_finite(self.launch([Span(0, start, [0] * count, True)]).logits)

    def launch(self, spans: Sequence[Span]) -> EagerWork:
        assert self.shape is not None
        self._lane.enter(self.shape)
        if spans:
            work = super().launch(spans)
        else:
            self._spans = spans
            with torch.inference_mode():
                for moe in self._moes:
                    moe.idle(self._like)
            work = self._work = EagerWork(torch.empty(0, self._vocab_size), self._bound)
        self._lane.leave()
        return work

    def relaunch(self) -> EagerWork:
        """The same shape once more: the next step's, which the coordinator has promised."""
        assert self.shape is not None
        self.shape = replace(self.shape, number=self.shape.number + 1)
        if self._spans:
            return super().relaunch()
        return self.launch(())


class Follower(Rank):
    """`execute` is called by one thread, order after order; the thread of `Rank` is never started."""

    def __init__(self, index: int, executor: LockStep, *, seats: int, limits: StepLimits) -> None:
        self._news: list[Event] = []
        super().__init__(index, executor, seats=seats, limits=limits, post=self._news.extend)
        self._lock_step = executor
        self._seats = seats
        self._blocks = executor.pool.num_blocks
        self._masks: dict[int, GivenMask] = {}
        self._done = 0
        self._number = 0
        self._promised: Shape | None = None

    @property
    def executor(self) -> LockStep:
        return self._lock_step

    def execute(self, shape: Shape, order: RankOrder) -> RankResult:
        """One step. Raises OrderError where the order does not fit what is here, before anything is computed."""
        self._news.clear()
        self._done, self._number = self._number, shape.number
        self._check_shape(shape, order)
        if shape.flags.consume:
            flight, self._ahead = self._ahead, None
            assert flight is not None
        else:
            self._apply(order)
            if not shape.bucket:
                return RankResult((), tuple(self._news))
            self._lock_step.shape = shape
            flight = self._launch([self._planned(seat, count) for seat, count in order.rows])
        self._promised = None
        if shape.flags.lease:
            self._promised = replace(shape, number=shape.number + 1)
            self._go_ahead(flight)
        self._finish(flight)
        return _compact(order, flight, self._news)

    def _check_shape(self, shape: Shape, order: RankOrder) -> None:
        self._ensure(shape.number == self._done + 1, f"it comes after step {self._done}")
        self._ensure(self.index < len(shape.active_rows), f"it is for {len(shape.active_rows)} ranks")
        rows, active = sum(count for _, count in order.rows), shape.active_rows[self.index]
        self._ensure(rows == active, f"it has {rows} rows here and says {active}")
        self._ensure(max(shape.active_rows) <= shape.bucket, f"bucket {shape.bucket} for rows {shape.active_rows}")
        self._ensure(
            shape.flags.consume == (self._ahead is not None),
            "it consumes a step that was not leased" if shape.flags.consume else "a leased step is not consumed",
        )
        if shape.flags.consume:
            same = self._promised is not None and replace(shape, flags=self._promised.flags) == self._promised
            self._ensure(same, "it is not the step that was leased")
            self._ensure(not (order.starts or order.aborts), "sequences come or go in a leased step")
        self._ensure(not (shape.flags.lease and shape.flags.prefill), "it leases a step with rows of a prompt")

    def _apply(self, order: RankOrder) -> None:
        keys = {sequence.key for sequence in self._running.values()}
        for start in order.starts:
            self._ensure(0 <= start.seat < self._seats, f"{start.key} takes seat {start.seat} of {self._seats}")
            self._ensure(start.seat not in self._running, f"{start.key} takes seat {start.seat}, which is not free")
            self._ensure(start.key not in keys, f"{start.key} runs already")
            strange = [block for block in start.blocks if not 0 <= block < self._blocks]
            self._ensure(not strange, f"{start.key} has blocks {strange[:5]} of {self._blocks}")
            keys.add(start.key)
            self._masks.pop(start.seat, None)
            sequence = running_of(start)
            if start.constrained:
                given = self._masks[start.seat] = GivenMask()
                sequence.constraint = cast(Matcher, given)
            self._begin(sequence)
        for mask in order.masks:
            self._ensure(mask.seat in self._masks, f"a mask for seat {mask.seat}, which has no grammar")
            self._masks[mask.seat].give(mask)
        for key in order.aborts:
            self._ensure(key in keys, f"{key} is to end and does not run")
            self._abort(key)

    def _planned(self, seat: int, count: int) -> Planned:
        sequence = self._running.get(seat)
        if sequence is None:
            raise OrderError(f"rank {self.index}, step {self._number}: a row for seat {seat}, where nobody runs")
        most = max(1, len(sequence.prompt) - sequence.computed)
        self._ensure(1 <= count <= most, f"{count} rows for {sequence.key}, which has {most}")
        mask = self._masks.get(seat) if sequence.constraint is not None else None
        draws = count >= len(sequence.prompt) - sequence.computed
        self._ensure(mask is None or mask.given or not draws, f"{sequence.key} draws a token without its mask")
        return Planned(seat, count)

    def _ensure(self, holds: bool, what: str) -> None:
        if not holds:
            raise OrderError(f"rank {self.index}, step {self._number}: {what}")


def _compact(order: RankOrder, flight: Flight, news: Sequence[Event]) -> RankResult:
    """A number for each row that is just one more token; the rest as it is."""
    seats: dict[str, Running] = {sequence.key: sequence for sequence in flight.rows}
    plain: dict[int, int] = {}
    events = []
    for event in news:
        sequence = seats.get(event.key)
        if sequence is not None and event.token is not None and _is_plain(event, sequence):
            plain[sequence.seat] = event.token.id
        else:
            events.append(event)
    return RankResult(tuple(plain.get(seat, -1) for seat, _ in order.rows), tuple(events))


def _is_plain(event: Event, sequence: Running) -> bool:
    token = event.token
    return (
        token is not None
        and token.finish is None
        and token.logprobs is None
        and not event.ended
        and not event.others
        and event.computed == len(sequence.prompt)
    )
