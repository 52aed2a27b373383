"""What one forward pass works on: flat token rows of many sequences, prefill chunks and decodes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence in a step: one token when decoding, a chunk when prefilling.

    `start` is the position of the first token; `seat` the row of the block table that belongs to the sequence.
    """

    seat: int
    start: int
    tokens: Sequence[int]
    wants_logits: bool

    @property
    def end(self) -> int:
        """Tokens in the context after this step."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A span of several rows: rows [first, first + rows) of the step, context of `length` tokens at its end."""

    first: int
    rows: int
    seat: int
    length: int


@dataclass(frozen=True, slots=True)
class Step:
    """T rows; the first `singles` rows are spans of one token each, batched together, then the chunks follow.

    tokens, positions, seats, blocks, offsets: int64 [T]; (block, offset) is where a row's KV is written.
    tables: int64 [seats, most blocks of a sequence], block ids in token order. logit_rows: int64, in span order.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    seats: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    tables: torch.Tensor
    block_size: int
    singles: int
    singles_length: int
    chunks: tuple[Chunk, ...]
    logit_rows: torch.Tensor


def build_step(spans: Sequence[Span], tables: torch.Tensor, block_size: int) -> Step:
    """Lay spans out as rows; `tables` is the caller's block table, read in place."""
    order = sorted(range(len(spans)), key=lambda index: len(spans[index].tokens) > 1)
    tokens: list[int] = []
    positions: list[int] = []
    seats: list[int] = []
    chunks: list[Chunk] = []
    last_row = [0] * len(spans)
    singles, singles_length = 0, 0
    for index in order:
        span = spans[index]
        if len(span.tokens) == 1:
            singles += 1
            singles_length = max(singles_length, span.end)
        else:
            chunks.append(Chunk(len(tokens), len(span.tokens), span.seat, span.end))
        tokens += span.tokens
        positions += range(span.start, span.end)
        seats += [span.seat] * len(span.tokens)
        last_row[index] = len(tokens) - 1
    position = torch.tensor(positions, dtype=torch.int64)
    seat = torch.tensor(seats, dtype=torch.int64)
    return Step(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=position,
        seats=seat,
        blocks=tables[seat, position // block_size],
        offsets=position % block_size,
        tables=tables,
        block_size=block_size,
        singles=singles,
        singles_length=singles_length,
        chunks=tuple(chunks),
        logit_rows=torch.tensor([last_row[i] for i, span in enumerate(spans) if span.wants_logits], dtype=torch.int64),
    )
