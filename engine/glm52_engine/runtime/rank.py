"""One rank: a thread that owns a KV pool and executes step after step. It decides nothing about who runs.

It talks to the event loop through two one-way streets: commands in (`start_sequence`, `abort`), events out (`post`).
For every sequence it was given, exactly one event ends it; only then are its seat and blocks anybody else's.
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

import torch

from glm52_engine.kv.pools import Pool
from glm52_engine.model import Model, Span, build_step
from glm52_engine.runtime.sampler import Draw, Sampler
from glm52_engine.runtime.types import Sampling, Token
from glm52_engine.schedule.plan import Pending, Planned, plan_step
from glm52_engine.structured import Matcher

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Running:
    """A request on a rank. `computed`: prompt tokens with KV; `last`: the newest token, not yet in the cache."""

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


@dataclass(frozen=True, slots=True)
class Event:
    """News of one sequence: more of its prompt, a token, or its end. The end without a token is that of an abort.

    `computed`: leading tokens of the prompt whose KV is certainly there; 0 when that is unknown. `others`: the first
    tokens of the choices behind the first one.
    """

    key: str
    token: Token | None
    ended: bool
    computed: int = 0
    others: tuple[Token, ...] = ()


@dataclass(slots=True)
class Counters:
    """Written by the rank's thread only; read anywhere."""

    prompt_tokens_computed: int = 0
    tokens_generated: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class StepLimits:
    """`budget` rows a step, of which `least_prefill` are kept for prompts; `vocab_bound`: greatest id + 1 to sample."""

    budget: int
    least_prefill: int
    vocab_bound: int
    eos_ids: frozenset[int]


class Rank:
    """`post` is called on the rank's thread with the events of one step, in order."""

    def __init__(
        self,
        index: int,
        model: Model,
        pool: Pool,
        *,
        seats: int,
        blocks_per_seat: int,
        limits: StepLimits,
        post: Callable[[list[Event]], None],
    ) -> None:
        self.index = index
        self.counters = Counters()
        self.failure: BaseException | None = None
        self._model = model
        self._pool: Pool | None = pool
        self._block_size = pool.block_size
        self._limits = limits
        self._post = post
        self._tables = torch.zeros(seats, blocks_per_seat, dtype=torch.int64)
        self._sampler = Sampler(seats=seats, vocab_bound=limits.vocab_bound, eos_ids=limits.eos_ids)
        self._running: dict[int, Running] = {}
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
        self._pool = None

    def seconds_without_progress(self) -> float:
        """Since work arrived or a step ended, whichever was later; 0 without work."""
        since = self._waiting_since
        return 0.0 if since is None else time.monotonic() - since

    def warm_up(self) -> None:
        """One real prefill and one real decode on this rank's pool, on the caller's thread, before `start`."""
        rows = min(2, self._block_size)
        for start, tokens in ((0, [0] * rows), (min(rows, self._block_size - 1), [0])):
            if not bool(self._forward([Span(0, start, tokens, True)]).isfinite().all()):
                raise RuntimeError("the first forward pass gave logits that are not finite: the weights are unusable")

    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:
        if self._pool is None:
            raise RuntimeError(f"rank {self.index} was stopped")
        return self._model.forward(build_step(spans, self._tables, self._block_size), self._pool)

    def _command(self, command: Running | str) -> None:
        with self._wake:
            if self._waiting_since is None:
                self._waiting_since = time.monotonic()
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        torch.set_num_threads(intra_op_threads())
        try:
            while self._wait():
                self.turn()
        except BaseException as error:
            # Nobody joins this thread before the process ends: what killed it must be seen by failure().
            log.exception("rank %d: the step loop ended", self.index)
            self.failure = error
            self._post([Event(sequence.key, None, True) for sequence in self._running.values()])

    def _wait(self) -> bool:
        """Until there is something to do; False when it is time to stop."""
        with self._wake:
            if not self._running and not self._commands:
                self._waiting_since = None
                self._wake.wait_for(lambda: self._commands or self._stopping)
            return not self._stopping

    def turn(self) -> None:
        """Apply what arrived, then one step if anything runs. The thread does nothing else, over and over."""
        with self._wake:
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            if isinstance(command, Running):
                self._tables[command.seat].zero_()
                self._tables[command.seat, : len(command.blocks)] = torch.tensor(command.blocks)
                output = () if command.last is None else (command.last.id,)
                self._sampler.begin(command.seat, command.sampling, command.prompt, output, command.constraint)
                self._running[command.seat] = command
            else:
                self._end(command)
        if self._running:
            self._step()

    def _end(self, key: str) -> None:
        seat = next((seat for seat, sequence in self._running.items() if sequence.key == key), None)
        if seat is not None:
            self._post([Event(key, None, True, self._running.pop(seat).computed)])

    def _step(self) -> None:
        pending = [Pending(s.seat, s.computed, len(s.prompt), s.priority) for s in self._running.values()]
        plan = plan_step(pending, budget=self._limits.budget, least_prefill=self._limits.least_prefill)
        sequences = [self._running[planned.seat] for planned in plan]
        spans = [_span(sequence, planned) for sequence, planned in zip(sequences, plan, strict=True)]
        logits = self._forward(spans)
        for sequence, span in zip(sequences, spans, strict=True):
            if sequence.computed < len(sequence.prompt):
                sequence.computed = span.end
                self.counters.prompt_tokens_computed += len(span.tokens)
        # Counted before its tokens are reported: whoever has a token may read the counters and must find its step.
        self.counters.steps += 1
        news = [Event(s.key, None, False, s.computed) for s in sequences if s.computed < len(s.prompt)]
        news += self._sampled([s for s, span in zip(sequences, spans, strict=True) if span.wants_logits], logits)
        self._post(news)
        self._waiting_since = time.monotonic()

    def _sampled(self, sequences: Sequence[Running], logits: torch.Tensor) -> list[Event]:
        """A token for each choice of each; a sequence leaves the rank with its last one."""
        draws = [
            Draw(
                row,
                s.seat,
                s.sampling,
                s.seed,
                index=0 if s.last is None else s.last.index + 1,
                choice=s.sampling.choice + choice,
                shared=s.choices > 1,
            )
            for row, s in enumerate(sequences)
            for choice in range(s.choices)
        ]
        tokens = iter(self._sampler.sample(logits, draws) if draws else [])
        events = []
        for sequence in sequences:
            sequence.last, *others = itertools.islice(tokens, sequence.choices)
            ended = sequence.last.finish is not None or sequence.prefill_only
            if ended:
                del self._running[sequence.seat]
            events.append(Event(sequence.key, sequence.last, ended, sequence.computed, tuple(others)))
        self.counters.tokens_generated += len(draws)
        return events


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
