"""A rank's steps on a GPU in lock-step: all ranks of the replica replay the same graphs in the same order.

Which graph runs follows from the step's shape alone, never from the rows that this rank has. Imports the kernels, so
only where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from glm52_engine.model.step import Span
from glm52_engine.ranks.books import bucket_of
from glm52_engine.ranks.captures import Captures
from glm52_engine.ranks.lane import Lane
from glm52_engine.ranks.messages import Flags, Shape
from glm52_engine.runtime.device.gpus import CountedExecutor
from glm52_engine.runtime.executor import EagerWork, Work


class ShardedDeviceExecutor(CountedExecutor):
    """See `follower.LockStep`. `meet` comes before `warm_up`."""

    lane: Lane

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shape: Shape | None = None

    def meet(self, lane: Lane, captures: Captures) -> None:
        """The other ranks are there, and `captures` is shared by those of this process."""
        self.lane = lane
        for bucket in self._buckets.values():
            bucket.turn = captures.turn

    @torch.inference_mode()
    def launch(self, spans: Sequence[Span]) -> Work:
        shape = self._shape()
        with self._here():
            self.lane.enter(shape)
            self._settle_contexts(spans)
            work = self._pass(spans, shape.bucket) if shape.flags.prefill else self._decodes(spans, shape.bucket)
            self.lane.leave()
            return work

    def relaunch(self) -> Work:
        """The same graph once more: the next step's, which the coordinator has promised."""
        self.shape = shape = replace(self._shape(), number=self._shape().number + 1)
        with self._here():
            self.lane.enter(shape)
            work = super().relaunch()
            self._expect_nothing()
            self.lane.leave()
            return work

    def _shape(self) -> Shape:
        if self.shape is None:
            raise RuntimeError("a rank in lock-step was given rows without a shape")
        return self.shape

    def _decodes(self, spans: Sequence[Span], bucket: int) -> Work:
        """Single tokens; as many graphs as the rank with the most rows needs, also where here is none for them."""
        rows = [(span.tokens[0], span.start, span.seat) for span in spans]
        largest = max(self._buckets)
        if bucket <= largest:
            work = self._decode(rows, least=bucket)
            self._expect_nothing()
            return work
        parts = []
        for first in range(0, bucket, largest):
            part = self._decode(rows[first : first + largest], least=min(largest, bucket - first))
            parts.append(part.logits.clone())  # the next replay writes to the same place
        self._loaded = self._expected = None
        return EagerWork(torch.cat(parts), self._bound)

    def _expect_nothing(self) -> None:
        """Nobody asks for the tokens of a step without rows, and the next one of its kind needs nothing sent."""
        if self._loaded is not None and not self._loaded.rows:
            self._expected = self._loaded

    def _pass(self, spans: Sequence[Span], bucket: int) -> Work:
        """Rows of prompts on some rank: all rows of all ranks, single tokens too, go through one pass."""
        self._loaded = self._expected = None
        if self._prefill is None:
            raise RuntimeError("a rank with hot buffers was given a step with rows of a prompt: it only decodes")
        if not spans:
            self._prefill.idle(bucket)
            return EagerWork(self._nothing(), self._bound)
        logits = self._chunk(list(spans), bucket)
        wanted = [place for place, span in enumerate(spans) if span.wants_logits]
        return EagerWork(logits[wanted] if wanted else self._nothing(), self._bound)

    def _first_steps(self) -> Iterator[list[Span]]:
        """Of all ranks at once, with numbers below those of any plan."""
        steps = list(super()._first_steps())
        for number, spans in enumerate(steps, start=-len(steps)):
            count = sum(len(span.tokens) for span in spans)
            active, prefill = (count,) * self.lane.world, count > 1
            self.shape = Shape(number, bucket_of(count), active, Flags(prefill=prefill))
            yield spans
