"""A rank's steps on a GPU: decodes as one graph replay, prompts as chunks, blocks mirrored in host memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from glm52_engine.kv.pools import Pool
from glm52_engine.model.device import DecodeStep, DevicePool
from glm52_engine.model.device_weights import DeviceWeights
from glm52_engine.model.exchange import Exchange
from glm52_engine.model.prefill import Prefill
from glm52_engine.model.sparse_pool import SparsePool
from glm52_engine.model.step import Span
from glm52_engine.runtime.device import late
from glm52_engine.runtime.device.buckets import Bucket, bucket_sizes, warm_sizes
from glm52_engine.runtime.device.mirror import Mirror
from glm52_engine.runtime.executor import EagerWork, Work, check_finite, counters_of
from glm52_engine.runtime.landed import Landed
from glm52_engine.runtime.types import HotCounters
from glm52_engine.schedule import blocks_for

log = logging.getLogger(__name__)

TABLE_ELEMENTS = 1 << 24
"""Most elements of the block tables of one chunk's rows: several prompts share a chunk only below that, since a long
one's table, repeated for each row, would be larger than its KV."""

SHARED_READS = 4
"""Rows of one sequence that go through the index scores together."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """(token, position, seat) of the decodes in a bucket; the host's picture of the step's inputs."""

    bucket: Bucket
    rows: tuple[tuple[int, int, int], ...]


class DeviceExecutor:
    """See `Executor`. Computes on the weights' device; on a CPU the same code runs eagerly, in Triton's interpreter."""

    def __init__(
        self,
        weights: DeviceWeights,
        pool: Pool,
        *,
        seats: int,
        blocks_per_seat: int,
        vocab_bound: int,
        step_tokens: int,
        unpin: Callable[[], object] = lambda: None,
        hot_rows: int | None = None,
        hot_always: bool = False,
        debug: bool = False,
        exchange: Exchange | None = None,
    ) -> None:
        """`unpin` lets go of the host pool's pages when nothing on the device uses them any more.

        `hot_rows`: HiSparse with hot buffers of so many rows, and no prompts to compute; `hot_always`: also where whole
        contexts would fit. `debug`: see `HotPool`. `exchange`: of a replica whose ranks share the routed experts; what
        all of them do next is then not for one of them to say.
        """
        self.pool = pool
        self._unpin = unpin
        self._device = weights.embed.device
        self._bound = vocab_bound
        self._top_k = weights.spec.index_topk
        block = pool.block_size
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with self._here():
            self._kv: DevicePool | SparsePool
            self._mirror: Mirror | None = None
            self._kept: Mirror | SparsePool
            self._prefill: Prefill | None = None
            if hot_rows is None:
                self._kv = DevicePool(weights.spec, pool.num_blocks, block, pool.layout.dtype, str(self._device))
                self._kept = self._mirror = Mirror(pool.tensor, self._kv.tensor.view(torch.uint8))
                self._prefill = Prefill(weights, self._kv, most_rows=step_tokens, exchange=exchange)
            else:
                self._kept = self._kv = SparsePool(
                    weights.spec, pool, seats=seats, rows=hot_rows, device=str(self._device),
                    longest=None if hot_always else blocks_per_seat, debug=debug,
                )  # fmt: skip
            self._counted = self._kv if isinstance(self._kv, SparsePool) else None
            self._tables = torch.zeros(seats, blocks_per_seat, dtype=torch.int32, device=self._device)
            self._buckets: dict[int, Bucket] = {}
            step: DecodeStep | None = None
            for size in reversed(bucket_sizes(seats)):
                step = DecodeStep(
                    weights,
                    self._kv,
                    batch=size,
                    longest=blocks_per_seat * block,
                    vocab_bound=vocab_bound,
                    exchange=exchange,
                    larger=step,
                )
                # In ascending order: a step takes the first that its rows fit.
                self._buckets = {size: Bucket(step), **self._buckets}
        self._blocks: list[tuple[int, ...]] = [()] * seats
        self._loaded: _Rows | None = None
        self._expected: _Rows | None = None

    def warm_up(self) -> None:
        with self._here():
            graphs = None
            for size in sorted(self._buckets, reverse=True):
                # The largest first: the others' memory is part of its own.
                for whole in self._forms():
                    graphs = self._buckets[size].capture(graphs, whole=whole)
            for spans in self._first_steps():
                check_finite(self.launch(spans).logits)
        if self._stream is not None:
            late.watch(self._device)

    def enter(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            # For all that the thread does with what a step gives: another stream would not wait for it.
            torch.cuda.set_stream(self._stream)

    def begin(self, seat: int, blocks: Sequence[int], *, arrived: int) -> None:
        with self._here():
            row = torch.zeros(self._tables.shape[1], dtype=torch.int32)
            row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            self._tables[seat].copy_(row)
            self._blocks[seat] = tuple(blocks)
            self._loaded = self._expected = None
            if isinstance(self._kv, SparsePool):
                self._kv.begin(seat, blocks, arrived=arrived)
            elif arrived and self._mirror is not None:
                self._mirror.to_device(blocks[: blocks_for(arrived, self.pool.block_size)])

    def end(self, seat: int) -> None:
        if isinstance(self._kv, SparsePool):
            self._kv.hot.release(seat)

    @torch.inference_mode()
    def launch(self, spans: Sequence[Span]) -> Work:
        with self._here():
            self._settle_contexts(spans)
            decodes = [place for place, span in enumerate(spans) if len(span.tokens) == 1]
            largest = max(self._buckets)
            if len(decodes) == len(spans) <= largest and all(span.wants_logits for span in spans):
                return self._decode([_row(span) for span in spans])
            logits: dict[int, torch.Tensor] = {}
            for first in range(0, len(decodes), largest):
                part = decodes[first : first + largest]
                found = self._decode([_row(spans[place]) for place in part]).logits
                # The next replay writes to the same place.
                logits |= dict(zip(part, found.clone() if len(decodes) > largest else found, strict=True))
            chunks = [place for place, span in enumerate(spans) if len(span.tokens) > 1]
            for group in self._groups([spans[place] for place in chunks]):
                part, chunks = chunks[: len(group)], chunks[len(group) :]
                logits |= dict(zip(part, self._chunk(group), strict=True))
            wanted = [logits[place] for place, span in enumerate(spans) if span.wants_logits]
            self._loaded = self._expected = None
            return EagerWork(torch.stack(wanted) if wanted else self._nothing(), self._bound)

    @torch.inference_mode()
    def relaunch(self) -> Work:
        last = self._loaded
        assert last is not None, "the last step was no plain decode"
        with self._here():
            self._loaded = _Rows(last.bucket, tuple((-1, position + 1, seat) for _, position, seat in last.rows))
            self._expected = None
            return _Replay(self, self._loaded, last.bucket.replay(whole=self._whole))

    def keep(self, spans: Sequence[Span]) -> None:
        size = self.pool.block_size
        with self._here():
            for span in spans:
                self._kept.to_host(self._blocks[span.seat][span.start // size : blocks_for(span.end, size)])

    def settle(self) -> None:
        self._kept.settle()

    def landed(self) -> Landed:
        return (lambda: True) if self._mirror is None else self._mirror.landed()

    def hot_counters(self) -> HotCounters | None:
        kv = self._counted
        return None if kv is None else counters_of(kv.hot)

    def close(self) -> None:
        self._counted = None
        if not self._buckets:
            return
        self.settle()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # Graphs hold the memory that they write to.
        self._buckets.clear()
        del self.pool, self._mirror, self._kept, self._kv, self._prefill
        self._unpin()

    def _decode(self, rows: list[tuple[int, int, int]], least: int = 0) -> _Replay:
        """In the smallest bucket that holds them, and `least` rows."""
        bucket = self._buckets[next(size for size in self._buckets if size >= max(least, len(rows)))]
        wanted = _Rows(bucket, tuple(rows))
        # A step leaves its own successor's inputs on the device: nothing is to be sent where the host wants just that.
        if wanted != self._expected:
            bucket.load(
                rows, self._tables, self._kv.hot.frames if isinstance(self._kv, SparsePool) and self._whole else None
            )
        self._loaded, self._expected = wanted, None
        return _Replay(self, wanted, bucket.replay(whole=self._whole))

    @property
    def _whole(self) -> bool:
        return isinstance(self._kv, SparsePool) and self._kv.hot.whole

    def _forms(self) -> tuple[bool, ...]:
        """Of a decode step, by whether contexts lie whole: which one runs changes while a rank serves."""
        if isinstance(self._kv, SparsePool) and self._kv.hot.frames_used[1]:
            return (False, True)
        return (False,)

    def _first_steps(self) -> Iterator[list[Span]]:
        """Prompts, where this rank computes any, and one token more; each is launched before the next is asked for."""
        rows = 0
        if self._prefill is not None:
            rows = min(2 * SHARED_READS + 1, self.pool.block_size)
            yield [Span(0, 0, [0] * rows, True)]
            longest = self._tables.shape[1] * self.pool.block_size
            for count, context in warm_sizes(self._prefill.most_rows, longest, self._top_k):
                # Nobody is there: all blocks of the seat's table are block 0.
                yield [Span(0, context - count, [0] * count, True)]
            if self._prefill.most_rows >= 4:
                # Two sequences whose rows are not read together.
                yield [Span(0, 0, [0] * 2, True)] * 2
        yield [Span(0, max(0, rows - 1), [0], True)]

    def _settle_contexts(self, spans: Sequence[Span]) -> None:
        """With hot buffers: contexts may come to lie whole with this step, or cease to."""
        if isinstance(self._kv, SparsePool) and self._kv.hot.settle({span.seat: span.start for span in spans}):
            self._loaded = self._expected = None

    def _groups(self, chunks: list[Span]) -> Iterator[list[Span]]:
        """Chunks that go through one pass, so that short prompts share their weights' way through the card."""
        group: list[Span] = []
        for span in chunks:
            joined = [*group, span]
            rows, longest = sum(len(s.tokens) for s in joined), max(s.end for s in joined)
            if group and rows * blocks_for(longest, self.pool.block_size) > TABLE_ELEMENTS:
                yield group
                joined = [span]
            group = joined
        if group:
            yield group

    def _chunk(self, spans: list[Span], bucket: int | None = None) -> torch.Tensor:
        """Logits of every span's last row, [spans, vocab_size]; `bucket`: see `Prefill.run`."""
        if self._prefill is None:
            raise RuntimeError("a rank with hot buffers was given a prompt to compute: it only decodes")
        device, counts = self._device, [len(span.tokens) for span in spans]
        longest = max(span.end for span in spans)
        tokens = torch.tensor([token for span in spans for token in span.tokens])
        sizes = torch.tensor(counts)
        starts = torch.tensor([span.start for span in spans]).repeat_interleave(sizes)
        ends = sizes.cumsum(0)
        firsts = (ends - sizes).repeat_interleave(sizes)
        tables = self._tables[:, : blocks_for(longest, self.pool.block_size)]
        if len(spans) == 1:
            table = tables[spans[0].seat].expand(counts[0], -1)
        else:
            seats = torch.tensor([span.seat for span in spans]).repeat_interleave(sizes)
            table = tables[seats.to(device)]
        aligned = all(count % SHARED_READS == 0 for count in counts[:-1])
        positions = torch.arange(sum(counts)) - firsts + starts
        return self._prefill.run(
            tokens.to(device), positions.to(device), table, longest, (ends - 1).to(device),
            together=SHARED_READS if aligned else 1, bucket=bucket,
        )  # fmt: skip

    def _nothing(self) -> torch.Tensor:
        return torch.empty(0, 1, device=self._device)

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """On the executor's device and stream."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                yield


class _Replay:
    """A decode step on its way."""

    def __init__(self, executor: DeviceExecutor, given: _Rows, turn: int) -> None:
        self._executor, self._given, self._turn = executor, given, turn

    @property
    def logits(self) -> torch.Tensor:
        return self._given.bucket.step.logits[: len(self._given.rows)]

    def greedy(self) -> list[int]:
        tokens = self._given.bucket.chosen(self._turn)[: len(self._given.rows)]
        if self._executor._loaded is self._given:
            rows = zip(tokens, self._given.rows, strict=True)
            self._executor._expected = _Rows(
                self._given.bucket, tuple((token, position + 1, seat) for token, (_, position, seat) in rows)
            )
        return tokens


def _row(span: Span) -> tuple[int, int, int]:
    return span.tokens[0], span.start, span.seat
