"""One rank: a thread that executes step after step. It decides nothing about who runs.

It talks to the event loop through two one-way streets: commands in (`start_sequence`, `abort`), events out (`post`).
For every sequence it was given, exactly one event ends it; only then are its seat and blocks anybody else's.

With launch-ahead a decode step is started before the tokens of the one before have been looked at, so that the device
computes while the host tells them. Commands wait until no step is under way: who leaves keeps its blocks that long.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from glm52_engine.model import Span
from glm52_engine.runtime.executor import Executor, Work
from glm52_engine.runtime.sampler import Draw, Sampler, finish_of
from glm52_engine.runtime.types import Sampling, Token
from glm52_engine.schedule.launch_ahead import Row, may_lease
from glm52_engine.schedule.plan import Pending, Planned, plan_step
from glm52_engine.structured import Matcher

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Running:
    """A request on a rank. `computed`: prompt tokens with KV; `last`: the newest token, not yet in the cache.

    `arrived`: where a prompt is computed, tokens at its start that came into the pool from outside, and what is before
    them. Where one is only continued, all of it did. `kept`: the KV of full blocks of the output, too, has to be in the
    host's pool when it ends.
    """

    key: str
    seat: int
    blocks: tuple[int, ...]
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    prefill_only: bool
    priority: int = 0
    choices: int = 1
    computed: int = 0
    last: Token | None = None
    constraint: Matcher | None = None
    ended: bool = False
    arrived: int = 0
    kept: bool = False

    @property
    def next_index(self) -> int:
        """Of the output, counted from 0."""
        return 0 if self.last is None else self.last.index + 1

    @property
    def greedy(self) -> bool:
        """Whether the greatest logit is the next token, whatever came before."""
        return self.sampling.is_plain_greedy and self.constraint is None and self.choices == 1

    def row(self, block_size: int) -> Row:
        """What decides whether the step that runs may be followed by a leased one."""
        return Row(
            decoding=self.last is not None and not self.prefill_only,
            greedy=self.greedy,
            tokens_left=0 if self.ended else self.sampling.max_tokens - self.next_index,
            room=len(self.blocks) * block_size - len(self.prompt) - self.next_index,
        )


@dataclass(frozen=True, slots=True)
class Event:
    """News of one sequence: more of its prompt, a token, or its end.

    The end comes with the last token, or without one: after an abort, or when a step that was under way held it up.
    `computed`: leading tokens of the prompt whose KV is certainly there; 0 when that is unknown. `others`: the first
    tokens of the choices behind the first one.
    """

    key: str
    token: Token | None
    ended: bool
    computed: int = 0
    others: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way. `rows`: whose logits it gives, in their order; `prompts`: what it computes of which prompt;
    `lengths`: of the rows' contexts after it."""

    rows: list[Running]
    prompts: list[tuple[Running, Span]]
    work: Work
    lengths: list[int]


@dataclass(slots=True)
class Counters:
    """Written by the rank's thread only; read anywhere."""

    prompt_tokens_computed: int = 0
    tokens_generated: int = 0
    steps: int = 0
    steps_ahead: int = 0


@dataclass(frozen=True, slots=True)
class StepLimits:
    """`budget` rows a step, of which `least_prefill` are kept for prompts; `vocab_bound`: greatest id + 1 to sample."""

    budget: int
    least_prefill: int
    vocab_bound: int
    eos_ids: frozenset[int]


class AnyRank(Protocol):
    """A rank as the engine uses it, wherever it computes. Every method is called from the event loop."""

    index: int

    @property
    def counters(self) -> Counters: ...

    @property
    def failure(self) -> BaseException | None: ...

    def warm_up(self) -> None: ...

    def start(self) -> None: ...

    def start_sequence(self, sequence: Running) -> None: ...

    def abort(self, key: str) -> None: ...

    def seconds_without_progress(self) -> float: ...

    def stop(self) -> None: ...


class Rank:
    """`post` is called on the rank's thread with the events of one step, in order."""

    def __init__(
        self,
        index: int,
        executor: Executor,
        *,
        seats: int,
        limits: StepLimits,
        post: Callable[[list[Event]], None],
        launch_ahead: bool = False,
    ) -> None:
        self.index = index
        self.counters = Counters()
        self.failure: BaseException | None = None
        self._executor = executor
        self._block_size = executor.pool.block_size
        self._limits = limits
        self._post = post
        self._launch_ahead = launch_ahead
        self._sampler = Sampler(seats=seats, vocab_bound=limits.vocab_bound, eos_ids=limits.eos_ids)
        self._running: dict[int, Running] = {}
        self._ahead: Flight | None = None
        self._commands: deque[Running | str] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._waiting_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"rank-{index}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def start_sequence(self, sequence: Running) -> None:
        self._command(sequence)

    def abort(self, key: str) -> None:
        """Ends a sequence before its next step; one that has ended by itself is left alone."""
        self._command(key)

    def stop(self) -> None:
        """Returns when the thread is gone and the pool is let go."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._executor.close()

    def seconds_without_progress(self) -> float:
        """Since work arrived or a step ended, whichever was later; 0 without work."""
        since = self._waiting_since
        return 0.0 if since is None else time.monotonic() - since

    def warm_up(self) -> None:
        """Real steps on this rank's pool, on the caller's thread, before `start`."""
        self._executor.warm_up()

    def _command(self, command: Running | str) -> None:
        with self._wake:
            if self._waiting_since is None:
                self._waiting_since = time.monotonic()
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        torch.set_num_threads(intra_op_threads())
        try:
            self._executor.enter()
            while self._wait():
                self.turn()
        except BaseException as error:
            # Nobody joins this thread before the process ends: what killed it must be seen by failure().
            log.exception("rank %d: the step loop ended", self.index)
            self.failure = error
            left = [s for s in self._ahead.rows if s.ended] if self._ahead else []
            self._post([Event(sequence.key, None, True) for sequence in (*self._running.values(), *left)])

    def _wait(self) -> bool:
        """Until there is something to do; False when it is time to stop."""
        with self._wake:
            if not self._running and not self._commands and self._ahead is None:
                self._waiting_since = None
                self._wake.wait_for(lambda: self._commands or self._stopping)
            return not self._stopping

    def turn(self) -> None:
        """One step, if there is something to compute. The thread does nothing else, over and over."""
        flight, self._ahead = self._ahead, None
        if flight is None:
            self._apply_commands()
            if not self._running:
                return
            flight = self._launch(self._plan())
        if self._launch_ahead and self._may_lease(flight):
            self._go_ahead(flight)
        self._finish(flight)

    def _go_ahead(self, flight: Flight) -> None:
        """Launch the step after `flight` with its rows: what token each has, the device knows."""
        self._ahead = Flight(flight.rows, [], self._executor.relaunch(), [length + 1 for length in flight.lengths])
        self._keep_full(self._ahead)
        self.counters.steps_ahead += 1

    def _apply_commands(self) -> None:
        with self._wake:
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            if isinstance(command, Running):
                self._begin(command)
            else:
                self._abort(command)

    def _begin(self, sequence: Running) -> None:
        s, output = sequence, () if sequence.last is None else (sequence.last.id,)
        self._executor.begin(s.seat, s.blocks, arrived=s.arrived if s.last is None else s.computed)
        self._sampler.begin(s.seat, s.sampling, s.prompt, output, s.constraint)
        self._running[s.seat] = s

    def _abort(self, key: str) -> None:
        seat = next((seat for seat, sequence in self._running.items() if sequence.key == key), None)
        if seat is not None:
            self._executor.settle()
            self._executor.end(seat)
            self._post([Event(key, None, True, self._running.pop(seat).computed)])

    def _plan(self) -> list[Planned]:
        pending = [Pending(s.seat, s.computed, len(s.prompt), s.priority) for s in self._running.values()]
        return plan_step(pending, budget=self._limits.budget, least_prefill=self._limits.least_prefill)

    def _launch(self, plan: Sequence[Planned]) -> Flight:
        spans = [(self._running[planned.seat], _span(self._running[planned.seat], planned)) for planned in plan]
        work = self._executor.launch([span for _, span in spans])
        prompts = [(s, span) for s, span in spans if s.computed < len(s.prompt)]
        self._executor.keep([span for s, span in prompts if s.prefill_only])
        wanted = [(s, span) for s, span in spans if span.wants_logits]
        flight = Flight([s for s, _ in wanted], prompts, work, [span.end for _, span in wanted])
        self._keep_full(flight)
        return flight

    def _keep_full(self, flight: Flight) -> None:
        """Block by block while it computes: at a sequence's end there is nothing left to wait for."""
        full = [
            # Which token it is does not matter, and of a step ahead only the device knows.
            Span(s.seat, length - 1, (0,), True)
            for s, length in zip(flight.rows, flight.lengths, strict=True)
            if s.kept and length % self._block_size == 0
        ]
        if full:
            self._executor.keep(full)

    def _may_lease(self, flight: Flight) -> bool:
        # A step with rows of a prompt is none that could follow itself.
        ranks = [] if flight.prompts else [[s.row(self._block_size) for s in flight.rows]]
        with self._wake:
            return may_lease(ranks, arrivals=bool(self._commands), stopping=self._stopping)

    def _finish(self, flight: Flight) -> None:
        """Wait for the step and tell what it brought."""
        for sequence, span in flight.prompts:
            sequence.computed = span.end
            self.counters.prompt_tokens_computed += len(span.tokens)
        left = [s for s in flight.rows if s.ended]
        tokens = self._tokens(flight)
        # Counted before its tokens are reported: whoever has a token may read the counters and must find its step.
        self.counters.steps += 1
        self.counters.tokens_generated += sum(map(len, tokens.values()))
        news = [Event(s.key, None, False, s.computed) for s, _ in flight.prompts if s.computed < len(s.prompt)]
        news += [self._told(s, *tokens[s.seat]) for s in flight.rows if not s.ended]
        news += [Event(s.key, None, True, s.computed) for s in left]
        if any(s.ended and (s.prefill_only or s.kept) for s in (left if self._ahead else flight.rows)):
            self._executor.settle()
        self._post(news)
        self._waiting_since = time.monotonic()

    def _told(self, sequence: Running, token: Token, *others: Token) -> Event:
        sequence.last = token
        sequence.ended = token.finish is not None or sequence.prefill_only
        if sequence.ended:
            del self._running[sequence.seat]
            self._executor.end(sequence.seat)
        # The step ahead still reads and writes the blocks of a sequence that ends here.
        over = sequence.ended and self._ahead is None
        return Event(sequence.key, token, over, sequence.computed, others)

    def _tokens(self, flight: Flight) -> dict[int, list[Token]]:
        """By seat, a token for each choice of each row that is still somebody's."""
        rows = flight.rows
        if all(s.greedy for s in rows):
            ids = flight.work.greedy() if rows else []
            return {s.seat: [self._greedy(s, id)] for s, id in zip(rows, ids, strict=True) if not s.ended}
        draws = [
            Draw(
                row,
                s.seat,
                s.sampling,
                s.seed,
                index=s.next_index,
                choice=s.sampling.choice + choice,
                shared=s.choices > 1,
            )
            for row, s in enumerate(rows)
            for choice in range(s.choices)
        ]
        tokens = iter(self._sampler.sample(flight.work.logits, draws))
        return {s.seat: list(itertools.islice(tokens, s.choices)) for s in rows}

    def _greedy(self, sequence: Running, id: int) -> Token:
        index = sequence.next_index
        if id < 0:
            return Token(0, index, "error")
        return Token(id, index, finish_of(id, index, sequence.sampling, self._sampler.eos_ids))


def _span(sequence: Running, planned: Planned) -> Span:
    """Prompt tokens while there are some, then the newest output token, right behind what the cache holds."""
    length = len(sequence.prompt)
    if sequence.computed < length:
        end = sequence.computed + planned.tokens
        return Span(sequence.seat, sequence.computed, sequence.prompt[sequence.computed : end], end == length)
    if sequence.last is None:
        raise RuntimeError(f"{sequence.key}: the prompt is computed, but there is no token to go on from")
    return Span(sequence.seat, length + sequence.last.index, (sequence.last.id,), True)


def intra_op_threads() -> int:
    """torch's threads per rank: OMP_NUM_THREADS, or 1: ranks and pods share the cores already."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) > 0 else 1
