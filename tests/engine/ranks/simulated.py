"""Ranks without a model: the real books and followers over KV that remembers who wrote what, and collectives that are
written down. A token is a hash of all that its row reads.

Steps compute as late as a device may: when somebody asks for their tokens, in the order in which they were started. So
blocks that are somebody else's too early are written by both.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from glm52_engine.model import Span
from glm52_engine.ranks.books import Books
from glm52_engine.ranks.follower import Follower
from glm52_engine.ranks.messages import Shape
from glm52_engine.runtime.landed import Landed
from glm52_engine.runtime.rank import Event, Running, StepLimits
from glm52_engine.runtime.types import Sampling, Token
from glm52_engine.schedule import Admission, Limits, blocks_for

BLOCK, SEATS, BLOCKS, LONGEST, EOS = 4, 3, 12, 24, 0
VOCABULARY = 7
LIMITS = Limits(max_model_len=LONGEST, block_size=BLOCK, seats=SEATS, blocks=BLOCKS, vocab_size=VOCABULARY)
STEP = StepLimits(budget=6, least_prefill=2, vocab_bound=VOCABULARY, eos_ids=frozenset({EOS}))
LAYERS = 2

Kind = Literal["whole", "prefill", "continued"]
"""Of a request: computed and continued here, computed only, or continued with KV that was pulled into its blocks."""


def next_token(context: Sequence[int]) -> int:
    return hashlib.blake2b(bytes(context), digest_size=1).digest()[0] % VOCABULARY


@functools.lru_cache(maxsize=100_000)
def alone(prompt: tuple[int, ...], most: int) -> list[int]:
    """What a request gives when nobody else is there."""
    context = list(prompt)
    while len(context) < len(prompt) + most:
        context.append(next_token(context))
        if context[-1] == EOS:
            break
    return context[len(prompt) :]


@dataclass
class FakePool:
    num_blocks: int = BLOCKS
    block_size: int = BLOCK


@dataclass
class FakeWork:
    """A step under way. `rows`: each span with its sequence's blocks and name when the step was started."""

    executor: FakeExecutor
    rows: list[tuple[Span, tuple[int, ...], str]]
    follows: FakeWork | None = None
    tokens: list[int] | None = None
    logits: None = None

    def greedy(self) -> list[int]:
        self.executor.compute_until(self)
        assert self.tokens is not None
        return self.tokens


class FakeExecutor:
    """One rank's KV and its diary of collectives: (step, bucket, active rows, layer)."""

    def __init__(self) -> None:
        self.pool = FakePool()
        self.shape: Shape | None = None
        self.diary: list[tuple[int, int, tuple[int, ...], int]] = []
        self.broken = False
        self.names: dict[tuple[int, ...], str] = {}
        """Whose blocks these are."""
        self._rows: dict[tuple[int, int], tuple[str, int]] = {}
        self._seats: dict[int, tuple[tuple[int, ...], str]] = {}
        self._under_way: list[FakeWork] = []
        self._last: FakeWork | None = None

    def begin(self, seat: int, blocks: Sequence[int], *, arrived: int) -> None:
        self._seats[seat] = tuple(blocks), self.names.get(tuple(blocks), "nobody")

    def end(self, seat: int) -> None: ...

    def pull(self, blocks: tuple[int, ...], prompt: Sequence[int]) -> None:
        """KV comes from outside, past all steps under way."""
        for at, token in enumerate(prompt):
            self._rows[blocks[at // BLOCK], at % BLOCK] = self.names[blocks], token

    def launch(self, spans: Sequence[Span]) -> FakeWork:
        return self._start(FakeWork(self, [(span, *self._seats[span.seat]) for span in spans]))

    def relaunch(self) -> FakeWork:
        assert self.shape is not None
        assert self._last is not None
        self.shape = replace(self.shape, number=self.shape.number + 1)
        # Its tokens come with the step before.
        rows = [(Span(s.seat, s.end, (-1,), True), blocks, name) for s, blocks, name in self._last.rows]
        return self._start(FakeWork(self, rows, follows=self._last))

    def keep(self, spans: Sequence[Span]) -> None: ...

    def landed(self) -> Landed:
        return lambda: True

    def settle(self) -> None:
        while self._under_way:
            self._compute(self._under_way.pop(0))

    def compute_until(self, work: FakeWork) -> None:
        while work.tokens is None:
            self._compute(self._under_way.pop(0))

    def _start(self, work: FakeWork) -> FakeWork:
        assert self.shape is not None
        if self.broken:
            raise MemoryError("the device has no memory left")
        shape = self.shape
        self.diary += [(shape.number, shape.bucket, shape.active_rows, layer) for layer in range(LAYERS)]
        self._under_way.append(work)
        self._last = work
        return work

    def _compute(self, work: FakeWork) -> None:
        given = work.follows.tokens if work.follows is not None else None
        tokens = []
        for place, (span, blocks, name) in enumerate(work.rows):
            for offset, token in enumerate(span.tokens if given is None else given[place : place + 1]):
                at = span.start + offset
                self._rows[blocks[at // BLOCK], at % BLOCK] = name, token
            if span.wants_logits:
                read = [self._rows[blocks[at // BLOCK], at % BLOCK] for at in range(span.end)]
                assert {owner for owner, _ in read} == {name}, f"{name} reads KV of others: {read}"
                tokens.append(next_token([token for _, token in read]))
        work.tokens = tokens


@dataclass
class Asked:
    prompt: tuple[int, ...]
    most: int
    kind: Kind = "whole"
    tokens: list[int] = field(default_factory=list)
    rank: int | None = None
    seat: int | None = None
    ended: bool = False
    given_up: bool = False

    @property
    def expected(self) -> list[int]:
        return alone(self.prompt, 1 if self.kind == "prefill" else self.most)


class Replica:
    """Admission, books and followers of some ranks; `turn` is one step of all of them.

    What holds at any time is asserted as it happens: all ranks enter the same collectives, no row reads another
    request's KV, every token is the one that its request gets alone, and the books balance.
    """

    def __init__(self, world: int, *, launch_ahead: bool) -> None:
        self.world, self.launch_ahead = world, launch_ahead
        self.requests: dict[str, Asked] = {}
        self.shapes: list[Shape] = []
        self._begin()

    def _begin(self) -> None:
        self.books = Books(self.world, limits=STEP, block_size=BLOCK, launch_ahead=self.launch_ahead)
        self.executors = [FakeExecutor() for _ in range(self.world)]
        self.ranks = [
            Follower(index, executor, seats=SEATS, limits=STEP)  # type: ignore[arg-type]
            for index, executor in enumerate(self.executors)
        ]
        self.admission = Admission(self.world, LIMITS)

    @property
    def open(self) -> list[str]:
        return [key for key, asked in self.requests.items() if not asked.ended]

    def tokens(self, key: str) -> list[int]:
        return self.requests[key].tokens

    def submit(self, key: str, prompt: tuple[int, ...], most: int, kind: Kind = "whole") -> None:
        asked = self.requests[key] = Asked(prompt, most, kind)
        if kind == "continued":
            asked.tokens = asked.expected[:1]
            if len(asked.expected) == 1:
                asked.ended = True  # its first token was the last one, which prefill has told
                return
        self.admission.submit(key, blocks_for(len(prompt) + most, BLOCK))
        self._admit()

    def abort(self, key: str) -> None:
        asked = self.requests[key]
        asked.given_up = True
        if asked.rank is not None:
            self.books.abort(asked.rank, key)
        else:
            self.admission.withdraw(key)
            asked.ended = True

    def turn(self) -> bool:
        """False when there was nothing to do."""
        planned = self.books.next()
        if planned is None:
            return False
        shape, orders = planned
        self.shapes.append(shape)
        try:
            results = [rank.execute(shape, order) for rank, order in zip(self.ranks, orders, strict=True)]
        finally:
            longest = max((executor.diary for executor in self.executors), key=len)
            assert all(executor.diary == longest[: len(executor.diary)] for executor in self.executors)
        assert all(len(executor.diary) == len(longest) for executor in self.executors)
        for executor in self.executors:
            executor.diary.clear()
        for events in self.books.settle(results):
            for event in events:
                self._deliver(event)
        self._admit()
        self.admission.check_integrity()
        return True

    def crash(self, rank: int) -> None:
        """The rank fails in the next step: nobody hears of a token of it, and everybody of the end; a new life."""
        before = {key: list(asked.tokens) for key, asked in self.requests.items()}
        self.executors[rank].broken = True
        try:
            self.turn()
        except MemoryError:
            assert {key: asked.tokens for key, asked in self.requests.items()} == before
            told = {key for index in range(self.world) for key in self.books.keys(index)}
            assert told == {key for key in self.open if self.requests[key].rank is not None}
            for key in self.open:
                self.requests[key].ended = self.requests[key].given_up = True
            self._begin()
        else:
            self.executors[rank].broken = False

    def finish(self) -> None:
        """Until nothing is left to do."""
        for _ in range(2000):
            if not self.turn():
                break
        assert not self.open, f"{self.open} never ended"
        assert self.books.idle
        assert self.admission.blocks_free == self.admission.blocks_total

    def _deliver(self, event: Event) -> None:
        asked = self.requests[event.key]
        assert not asked.ended, f"news of {event.key}, which has ended"
        if event.token is not None:
            assert event.token.index == len(asked.tokens)
            asked.tokens.append(event.token.id)
            assert asked.tokens == asked.expected[: len(asked.tokens)]
        if event.ended:
            assert asked.given_up or asked.tokens == asked.expected
            asked.ended = True
            self.admission.finish(event.key)

    def _admit(self) -> None:
        for grant in self.admission.admit():
            asked = self.requests[grant.key]
            asked.rank, asked.seat = grant.rank, grant.seat
            executor = self.executors[grant.rank]
            executor.names[grant.blocks] = grant.key
            running = Running(
                grant.key, grant.seat, grant.blocks, asked.prompt, Sampling(asked.most, temperature=0.0), seed=0,
                prefill_only=asked.kind == "prefill",
            )  # fmt: skip
            if asked.kind == "continued":
                executor.pull(grant.blocks, asked.prompt)
                running.computed, running.last = len(asked.prompt), Token(asked.tokens[0], 0)
            self.books.start(grant.rank, running)
