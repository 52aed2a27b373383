"""Ranks without a model: the real books and followers over KV that remembers who wrote what, and collectives that are
written down. A token is a hash of all that its row reads, so a row that reads another request's KV says so."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from glm52_engine.model import Span
from glm52_engine.ranks.books import Books
from glm52_engine.ranks.follower import Follower
from glm52_engine.ranks.messages import Shape
from glm52_engine.runtime.rank import Event, Running, StepLimits
from glm52_engine.runtime.types import Sampling
from glm52_engine.schedule import Admission, Limits, blocks_for

BLOCK, SEATS, BLOCKS, LONGEST, EOS = 4, 3, 12, 24, 0
VOCABULARY = 7
LIMITS = Limits(max_model_len=LONGEST, block_size=BLOCK, seats=SEATS, blocks=BLOCKS, vocab_size=VOCABULARY)
STEP = StepLimits(budget=6, least_prefill=2, vocab_bound=VOCABULARY, eos_ids=frozenset({EOS}))


def next_token(context: Sequence[int]) -> int:
    return hashlib.blake2b(bytes(context), digest_size=1).digest()[0] % VOCABULARY


def alone(prompt: Sequence[int], most: int) -> list[int]:
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


class FakeWork:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self.logits = None

    def greedy(self) -> list[int]:
        return self._tokens


class FakeExecutor:
    """One rank's KV and its diary of collectives: (step, bucket, active rows), once for each layer."""

    def __init__(self) -> None:
        self.pool = FakePool()
        self.shape: Shape | None = None
        self.diary: list[tuple[int, int, tuple[int, ...], int]] = []
        self.broken = False
        self._rows: dict[tuple[int, int], int] = {}
        self._tables: dict[int, Sequence[int]] = {}
        self._spans: Sequence[Span] = ()
        self._work = FakeWork([])

    def begin(self, seat: int, blocks: Sequence[int], *, arrived: int) -> None:
        self._tables[seat] = blocks

    def launch(self, spans: Sequence[Span]) -> FakeWork:
        assert self.shape is not None
        if self.broken:
            raise MemoryError("the device has no memory left")
        shape = self.shape
        self.diary += [(shape.number, shape.bucket, shape.active_rows, layer) for layer in range(2)]
        tokens = []
        for span in spans:
            for offset, token in enumerate(span.tokens):
                self._rows[self._place(span.seat, span.start + offset)] = token
            if span.wants_logits:
                tokens.append(next_token([self._rows[self._place(span.seat, at)] for at in range(span.end)]))
        self._spans, self._work = spans, FakeWork(tokens)
        return self._work

    def relaunch(self) -> FakeWork:
        assert self.shape is not None
        self.shape = Shape(self.shape.number + 1, self.shape.bucket, self.shape.active_rows, self.shape.flags)
        ahead = [Span(s.seat, s.end, (t,), True) for s, t in zip(self._spans, self._work.greedy(), strict=True)]
        return self.launch(ahead)

    def keep(self, spans: Sequence[Span]) -> None: ...

    def settle(self) -> None: ...

    def _place(self, seat: int, position: int) -> tuple[int, int]:
        return self._tables[seat][position // BLOCK], position % BLOCK


class Replica:
    """Admission, books and followers of some ranks; `turn` is one step of all of them."""

    def __init__(self, world: int, *, launch_ahead: bool) -> None:
        self.books = Books(world, limits=STEP, block_size=BLOCK, launch_ahead=launch_ahead)
        self.executors = [FakeExecutor() for _ in range(world)]
        self.ranks = [
            Follower(index, executor, seats=SEATS, limits=STEP)  # type: ignore[arg-type]
            for index, executor in enumerate(self.executors)
        ]
        self.admission = Admission(world, LIMITS)
        self.asked: dict[str, tuple[tuple[int, ...], int]] = {}
        self.place: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.aborted: set[str] = set()
        self.shapes: list[Shape] = []

    def submit(self, key: str, prompt: tuple[int, ...], most: int) -> None:
        self.asked[key], self.tokens[key] = (prompt, most), []
        self.admission.submit(key, blocks_for(len(prompt) + most, BLOCK))
        self._admit()

    def abort(self, key: str) -> None:
        self.aborted.add(key)
        if key in self.place:
            self.books.abort(self.place[key], key)
        else:
            self.admission.withdraw(key)
            self.ended.add(key)

    def turn(self) -> bool:
        """False when there was nothing to do."""
        planned = self.books.next()
        if planned is None:
            return False
        shape, orders = planned
        self.shapes.append(shape)
        results = [rank.execute(shape, order) for rank, order in zip(self.ranks, orders, strict=True)]
        for events in self.books.settle(results):
            for event in events:
                self._deliver(event)
        self._admit()
        return True

    def _deliver(self, event: Event) -> None:
        assert event.key not in self.ended, "news of a sequence that has ended"
        if event.token is not None:
            assert event.token.index == len(self.tokens[event.key])
            self.tokens[event.key].append(event.token.id)
        if event.ended:
            self.ended.add(event.key)
            self.admission.finish(event.key)

    def _admit(self) -> None:
        for grant in self.admission.admit():
            prompt, most = self.asked[grant.key]
            self.place[grant.key] = grant.rank
            sampling = Sampling(most, temperature=0.0)
            running = Running(grant.key, grant.seat, grant.blocks, prompt, sampling, seed=0, prefill_only=False)
            self.books.start(grant.rank, running)
