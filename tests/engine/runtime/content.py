"""A model whose next token is a hash of the context that it reads from the pool: one wrong block, one wrong token."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from glm52_engine.kv import Pool
from glm52_engine.model import Span
from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.executor import HostExecutor, Work

LETTERS = range(97, 123)


def next_token(context: Sequence[int]) -> int:
    return LETTERS[zlib.crc32(bytes(context)) % len(LETTERS)]


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What the model says after a prompt (ids below 256)."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


def stored(pool: Any, blocks: Sequence[int], count: int) -> list[int]:
    """The first `count` token ids in the rows of these blocks; -1 where a row belongs to another position."""
    rows = pool.mla[0][list(blocks)].flatten(0, 1)[:count]
    right = rows[:, 1] == torch.arange(count)
    ids: list[int] = torch.where(right, rows[:, 0].long(), -1).tolist()
    return ids


class ContentModel:
    """In place of `Model`; `vocab_size` is the width of its logits."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def forward(self, step: Any, pool: Pool) -> torch.Tensor:
        rows = pool.mla[0]
        rows[step.blocks, step.offsets, 0] = step.tokens.to(rows.dtype)
        rows[step.blocks, step.offsets, 1] = step.positions.to(rows.dtype)
        logits = torch.zeros(len(step.logit_rows), self.vocab_size)
        for index, row in enumerate(step.logit_rows.tolist()):
            blocks, count = step.tables[step.seats[row]].tolist(), int(step.positions[row]) + 1
            context = stored(pool, blocks[: -(-count // step.block_size)], count)
            assert -1 not in context, "a row was read that nobody had written"
            logits[index, next_token(context)] = 1
        return logits


class LateExecutor(HostExecutor):
    """A step ahead computes when somebody asks for its tokens: as late as a device may."""

    def relaunch(self) -> Any:
        assert self._work is not None
        late = LateWork(self, self._work, self._spans)
        self._work, self._spans = late, [Span(span.seat, span.end, span.tokens, True) for span in self._spans]  # type: ignore[assignment]
        return late

    def compute(self, spans: Sequence[Span]) -> list[int]:
        kept = self._work, self._spans
        tokens = self.launch(spans).greedy()
        self._work, self._spans = kept
        return tokens


class LateWork:
    def __init__(self, executor: LateExecutor, before: Work, spans: Sequence[Span]) -> None:
        self._executor, self._before, self._spans = executor, before, spans
        self._tokens: list[int] | None = None

    def greedy(self) -> list[int]:
        if self._tokens is None:
            pairs = zip(self._spans, self._before.greedy(), strict=True)
            self._tokens = self._executor.compute([Span(s.seat, s.end, (token,), True) for s, token in pairs])
        return self._tokens


def turn(engine: LocalEngine) -> None:
    """What the ranks' threads would do next, on this thread."""
    for rank in engine._ranks:
        rank.turn()
