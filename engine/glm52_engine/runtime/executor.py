"""How a rank computes a step: rows in, logits or greedy tokens out. Knows seats and blocks, no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from glm52_engine.kv.hisparse import HotPool
from glm52_engine.kv.pools import Pool
from glm52_engine.model import Model, Span, build_step
from glm52_engine.model.cache import HotCache
from glm52_engine.runtime.landed import Landed
from glm52_engine.runtime.types import HotCounters


class Work(Protocol):
    """A step that was started. Its rows are the spans that want logits, in the order in which they were given."""

    @property
    def logits(self) -> torch.Tensor:
        """float32 [rows, vocab_size] on the executor's device, valid until the next step is started."""
        ...

    def greedy(self) -> list[int]:
        """Each row's token of the greatest logit below the vocabulary's bound, the lowest id among equals; -1 where
        the logits are no numbers. Waits for the step."""
        ...


class Executor(Protocol):
    """One rank's model, KV and step. Called by the rank's thread only, except `warm_up` before that thread starts.

    `pool` is the KV in host memory that hand-offs read and write. An executor that computes elsewhere keeps the same
    blocks there, and copies them in `begin` and `keep`.
    """

    pool: Pool

    def warm_up(self) -> None:
        """Real steps of every shape that has to be ready; raises RuntimeError when the logits are no numbers."""
        ...

    def enter(self) -> None:
        """First call on the rank's thread."""
        ...

    def begin(self, seat: int, blocks: Sequence[int], *, arrived: int) -> None:
        """A sequence takes the seat; the KV of its first `arrived` tokens was put into `pool` from outside."""
        ...

    def end(self, seat: int) -> None:
        """The seat's sequence is over, but for a step that may be under way with its row."""
        ...

    def launch(self, spans: Sequence[Span]) -> Work:
        """Start a step: write the KV of the spans' tokens, compute logits."""
        ...

    def relaunch(self) -> Work:
        """Start the last step, all spans of which were single tokens with logits, once more: each row one token on,
        with its own greedy token as input."""
        ...

    def keep(self, spans: Sequence[Span]) -> None:
        """The KV that the last step wrote for these spans has to be in `pool`; it is there after `settle`. So is all
        that was there or written before in the spans' blocks."""
        ...

    def settle(self) -> None: ...

    def landed(self) -> Landed:
        """To be asked later whether all that `keep` was given so far is in `pool`; both from any thread."""
        ...

    def hot_counters(self) -> HotCounters | None:
        """Of HiSparse; None without it, and after `close`. From any thread, without waiting for the device."""
        ...

    def close(self) -> None:
        """Lets go of the pool and of everything on a device; more than once is harmless."""
        ...


class HostExecutor:
    """On the CPU, straight in the host pool; every call computes before it returns.

    `hot`: HiSparse; decodes then read what it serves of the pool.
    """

    def __init__(
        self,
        model: Model,
        pool: Pool,
        *,
        seats: int,
        blocks_per_seat: int,
        vocab_bound: int,
        hot: HotCache | None = None,
    ) -> None:
        self.pool = pool
        self.hot = hot
        self._model: Model | None = model
        self._tables = torch.zeros(seats, blocks_per_seat, dtype=torch.int64)
        self._bound = vocab_bound
        self._spans: Sequence[Span] = ()
        self._work: EagerWork | None = None

    def warm_up(self) -> None:
        rows = min(2, self.pool.block_size)
        for start, tokens in ((0, [0] * rows), (min(rows, self.pool.block_size - 1), [0])):
            check_finite(self.launch([Span(0, start, tokens, True)]).logits)

    def enter(self) -> None:
        pass

    def begin(self, seat: int, blocks: Sequence[int], *, arrived: int) -> None:
        self._tables[seat].zero_()
        self._tables[seat, : len(blocks)] = torch.tensor(blocks)
        if self.hot is not None:
            self.hot.assign(seat, blocks, arrived=arrived)

    def end(self, seat: int) -> None:
        if self.hot is not None:
            self.hot.pool.release(seat)

    def launch(self, spans: Sequence[Span]) -> EagerWork:
        if self._model is None:
            raise RuntimeError("the rank was stopped")
        step = build_step(spans, self._tables, self.pool.block_size)
        self._spans = spans
        if self.hot is None or step.chunks:
            # A prompt's rows go to the pool and are read there: no hot buffer holds a copy of a row that is new.
            logits = self._model.forward(step, self.pool)
        else:
            logits = self._model.forward(step, self.pool, self.hot)
        self._work = EagerWork(logits, self._bound)
        return self._work

    def relaunch(self) -> EagerWork:
        assert self._work is not None
        tokens = self._work.greedy()
        return self.launch(
            [Span(s.seat, s.end, (max(token, 0),), True) for s, token in zip(self._spans, tokens, strict=True)]
        )

    def keep(self, spans: Sequence[Span]) -> None:
        pass

    def settle(self) -> None:
        pass

    def landed(self) -> Landed:
        return lambda: True

    def hot_counters(self) -> HotCounters | None:
        hot = self.hot
        return None if hot is None else counters_of(hot.pool)

    def close(self) -> None:
        if self._model is not None:
            self._model = self.hot = None
            del self.pool


def counters_of(pool: HotPool) -> HotCounters:
    """One rank's; the numbers are those that the last step has left in host memory."""
    told, (used, frames), residency = pool.counters(), pool.frames_used, pool.residency
    return HotCounters(
        hits=told["hits"],
        misses=told["misses"],
        evicted=told["evicted"],
        fetched_bytes=told["fetched"] * pool.host.row_bytes,
        rows_held=0 if pool.whole else told["held"],
        rows=len(pool.groups) * residency.seats * residency.rows,
        frames_used=used,
        frames=frames,
        whole_ranks=int(pool.whole),
        switches=pool.switches,
    )


class EagerWork:
    """A step whose logits float32 [rows, vocab_size] are there, or on their way on a device."""

    def __init__(self, logits: torch.Tensor, bound: int) -> None:
        self.logits = logits
        self._bound = bound

    def greedy(self) -> list[int]:
        # A NaN is the maximum wherever there is one.
        best, chosen = self.logits[:, : self._bound].max(dim=1)
        tokens: list[int] = torch.where(best.isfinite(), chosen, -1).tolist()
        return tokens


def check_finite(logits: torch.Tensor) -> None:
    if not bool(logits.isfinite().all()):
        raise RuntimeError("the first forward pass gave logits that are not finite: the weights are unusable")
