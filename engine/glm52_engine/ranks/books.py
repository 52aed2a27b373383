"""The coordinator's books: what runs on every rank, and what all of them do next. Pure; one thread calls it.

Every decision that changes which collectives run is made here, from the data of all ranks, and travels in the shape,
which is the same for all. A rank decides nothing: it does what its order says, or fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from glm52_engine.ranks.masks import advanced, mask_of
from glm52_engine.ranks.messages import Flags, Mask, RankOrder, RankResult, Shape, Start
from glm52_engine.runtime.rank import Counters, Event, Running, StepLimits
from glm52_engine.runtime.types import Token
from glm52_engine.schedule.launch_ahead import may_lease
from glm52_engine.schedule.plan import Pending, plan_step


@dataclass(slots=True)
class _Rank:
    running: dict[int, Running] = field(default_factory=dict)
    leaving: dict[int, Running] = field(default_factory=dict)
    """By seat: their output is over, and a leased step still has their rows."""
    starts: list[Running] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)

    @property
    def has_news(self) -> bool:
        return bool(self.starts or self.aborts)

    def seat_of(self, key: str) -> int | None:
        return next((seat for seat, sequence in self.running.items() if sequence.key == key), None)


class Books:
    """`block_size` in tokens; `launch_ahead`: whether a step may be started before the tokens of the last are known."""

    def __init__(self, world: int, *, limits: StepLimits, block_size: int, launch_ahead: bool) -> None:
        self.counters = [Counters() for _ in range(world)]
        self._ranks = [_Rank() for _ in range(world)]
        self._limits = limits
        self._block_size = block_size
        self._launch_ahead = launch_ahead
        self._number = 0
        self._orders: list[RankOrder] | None = None
        self._leased: tuple[Shape, list[RankOrder]] | None = None

    def start(self, rank: int, sequence: Running) -> None:
        # The books' own copy: ranks of this process are given the caller's.
        self._ranks[rank].starts.append(sequence)

    def abort(self, rank: int, key: str) -> None:
        self._ranks[rank].aborts.append(key)

    @property
    def idle(self) -> bool:
        """Whether `next` would have nothing to say."""
        return self._leased is None and not any(rank.running or rank.has_news for rank in self._ranks)

    def keys(self, rank: int) -> list[str]:
        """Sequences that the rank still owes an end."""
        books = self._ranks[rank]
        return [s.key for s in (*books.running.values(), *books.leaving.values(), *books.starts)]

    def next(self) -> tuple[Shape, list[RankOrder]] | None:
        """The next step and each rank's part of it; None when nothing runs. `settle` comes before the next call."""
        if self._orders is not None:
            raise RuntimeError(f"step {self._number} is planned twice: its results are not there")
        if self.idle:
            return None
        self._number += 1
        leased, self._leased = self._leased, None
        if leased is None:
            orders = [self._order(rank) for rank in self._ranks]
            bucket = bucket_of(max(sum(count for _, count in order.rows) for order in orders))
            prefill = any(
                rank.running[seat].computed < len(rank.running[seat].prompt)
                for rank, order in zip(self._ranks, orders, strict=True)
                for seat, _ in order.rows
            )
        else:
            # Its rows are those of the step that was leased, with the sequences that ended since: they still compute.
            orders = [RankOrder(rows=order.rows) for order in leased[1]]
            bucket, prefill = leased[0].bucket, False
        flags = Flags(prefill, lease=self._may_lease(orders, prefill), consume=leased is not None)
        active = tuple(sum(count for _, count in order.rows) for order in orders)
        shape = Shape(self._number, bucket, active, flags)
        self._orders = orders
        if flags.lease:
            self._leased = shape, orders
            for counters in self.counters:
                counters.steps_ahead += 1
        return shape, orders

    def settle(self, results: Sequence[RankResult]) -> list[list[Event]]:
        """Each rank's events of the step. Raises ValueError for results that are none of the planned step."""
        orders, self._orders = self._orders, None
        if orders is None or len(results) != len(orders):
            raise ValueError(f"step {self._number}: results of {len(results)} ranks for {len(orders or ())} orders")
        return [
            self._settle(index, rank, order, result)
            for index, (rank, order, result) in enumerate(zip(self._ranks, orders, results, strict=True))
        ]

    def _order(self, rank: _Rank) -> RankOrder:
        starts, rank.starts = rank.starts, []
        for sequence in starts:
            matcher = sequence.constraint
            rank.running[sequence.seat] = replace(sequence, constraint=None if matcher is None else matcher.fork())
        # One that has ended by itself is left alone: its end is on its way, or told.
        aborts = [key for key in dict.fromkeys(rank.aborts) if rank.seat_of(key) is not None]
        rank.aborts = []
        pending = [
            Pending(s.seat, s.computed, len(s.prompt), s.priority) for s in rank.running.values() if s.key not in aborts
        ]
        plan = plan_step(pending, budget=self._limits.budget, least_prefill=self._limits.least_prefill)
        return RankOrder(
            tuple(start_of(sequence) for sequence in starts),
            tuple(aborts),
            tuple((planned.seat, planned.tokens) for planned in plan),
            tuple(mask for planned in plan if (mask := _mask(rank.running[planned.seat], planned.tokens)) is not None),
        )

    def _may_lease(self, orders: Sequence[RankOrder], prefill: bool) -> bool:
        if not self._launch_ahead or prefill:
            return False
        ranks = [
            [(rank.running.get(seat) or rank.leaving[seat]).row(self._block_size) for seat, _ in order.rows]
            for rank, order in zip(self._ranks, orders, strict=True)
        ]
        return may_lease(ranks, arrivals=any(rank.has_news for rank in self._ranks), stopping=False)

    def _settle(self, index: int, rank: _Rank, order: RankOrder, result: RankResult) -> list[Event]:
        if len(result.tokens) != len(order.rows):
            raise ValueError(
                f"rank {index}, step {self._number}: {len(result.tokens)} tokens for {len(order.rows)} rows"
            )
        counters = self.counters[index]
        counters.steps += bool(order.rows)
        for seat, count in order.rows:
            sequence = rank.running.get(seat)
            if sequence is not None and sequence.computed < len(sequence.prompt):
                sequence.computed += count
                counters.prompt_tokens_computed += count
        events = [_plain(rank, seat, id) for (seat, _), id in zip(order.rows, result.tokens, strict=True) if id >= 0]
        events += result.events
        events = [self._note(index, rank, event) for event in events]
        for event in events:
            counters.tokens_generated += (event.token is not None) + len(event.others)
        return events

    def _note(self, index: int, rank: _Rank, event: Event) -> Event:
        for group in (rank.running, rank.leaving):
            for seat, sequence in group.items():
                if sequence.key == event.key:
                    told = advanced(sequence, event)
                    if told is not event and not event.ended:
                        # The rank does not know that the grammar ended this output: its end comes with the next step.
                        rank.aborts.append(event.key)
                        self._keep_running(sequence, told)
                        return told
                    self._take(rank, seat, sequence, told)
                    return told
        raise ValueError(f"rank {index}, step {self._number}: news of {event.key}, which does not run there")

    def _keep_running(self, sequence: Running, event: Event) -> None:
        sequence.last, sequence.constraint = event.token, None

    def _take(self, rank: _Rank, seat: int, sequence: Running, event: Event) -> None:
        if event.token is not None:
            sequence.last = event.token
            sequence.ended = event.token.finish is not None or sequence.prefill_only
        if event.ended:
            rank.running.pop(seat, None)
            rank.leaving.pop(seat, None)
        elif sequence.ended:
            rank.leaving[seat] = rank.running.pop(seat)


def _plain(rank: _Rank, seat: int, id: int) -> Event:
    sequence = rank.running[seat]
    return Event(sequence.key, Token(id, sequence.next_index), False, len(sequence.prompt))


def _mask(sequence: Running, tokens: int) -> Mask | None:
    """Of a row that draws a token; a chunk inside a prompt draws none."""
    left = len(sequence.prompt) - sequence.computed
    return mask_of(sequence) if left <= tokens else None


def start_of(sequence: Running) -> Start:
    s = sequence
    return Start(
        s.key, s.seat, s.blocks, s.prompt, s.sampling, s.seed, s.prefill_only, s.priority, s.choices, s.computed,
        s.last, s.constraint is not None, s.arrived, s.kept,
    )  # fmt: skip


def running_of(start: Start) -> Running:
    s = start
    return Running(
        s.key, s.seat, s.blocks, s.prompt, s.sampling, s.seed, s.prefill_only, s.priority, s.choices, s.computed,
        s.last, arrived=s.arrived, kept=s.kept,
    )  # fmt: skip


def bucket_of(rows: int) -> int:
    """Rows that each rank contributes where one has `rows`: the next power of two up to 64, then a multiple of 64."""
    if rows <= 64:
        return 1 << (rows - 1).bit_length() if rows else 0
    return -(-rows // 64) * 64
