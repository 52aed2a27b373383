"""How rows are laid out in steps changes nothing: chunks, mixed batches, neighbours."""

from __future__ import annotations

import pytest
import torch

from glm52_engine.model import Span, build_step
from tests.engine.model.support import BLOCK, TOLERANCE, Ours, prompt


@pytest.mark.parametrize("chunk", [1, 7, BLOCK, 32, 33, 100])
def test_chunked_prefill(ours: Ours, chunk: int) -> None:
    ids = prompt(77)
    whole = ours.all_logits(ids)[-1]
    ours.pool.touch()
    assert (ours.prefill(ids, chunk=chunk) - whole).abs().max() < TOLERANCE


def test_a_mixed_batch_equals_its_parts(ours: Ours) -> None:
    lengths = (90, 3, 45, 70)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    alone = [ours.prefill(ids, chunk=1000, seat=seat) for seat, ids in enumerate(prompts)]
    ours.pool.touch()
    ours.step([Span(seat, 0, ids[:-1], False) for seat, ids in enumerate(prompts[:2])])
    ours.step([Span(2, 0, prompts[2][:20], False), Span(3, 0, prompts[3][:-1], False)])
    # A decode, a whole chunk, a decode on a short context and one on a long one, in this order.
    spans = [
        Span(0, 89, prompts[0][-1:], True),
        Span(2, 20, prompts[2][20:], True),
        Span(1, 2, prompts[1][-1:], True),
        Span(3, 69, prompts[3][-1:], True),
    ]
    logits = ours.step(spans)
    for row, seat in enumerate((0, 2, 1, 3)):
        assert (logits[row] - alone[seat]).abs().max() < TOLERANCE, f"seat {seat}"


def test_rows_without_logits_are_left_out(ours: Ours) -> None:
    spans = [Span(0, 0, prompt(5), False), Span(1, 0, [65], True), Span(2, 0, [66], False)]
    assert ours.step(spans).shape == (1, 320)
    assert ours.step([spans[0]]).shape == (0, 320)


def test_what_other_sequences_left_in_the_pool_is_never_read(ours: Ours) -> None:
    ids = prompt(60)
    clean = ours.prefill(ids, chunk=1000)
    ours.pool.tensor.view(torch.float32).fill_(float("nan"))
    assert torch.equal(ours.prefill(ids, chunk=1000), clean)
    for position in range(60, 64):
        assert ours.step([Span(0, position, [65], True)]).isfinite().all()


def test_where_rows_are_written() -> None:
    tables = torch.tensor([[5, 2], [7, 0]])
    step = build_step([Span(0, 3, [1, 2], False), Span(1, 4, [9], True)], tables, 4)
    assert step.tokens.tolist() == [9, 1, 2]
    assert step.positions.tolist() == [4, 3, 4]
    assert step.blocks.tolist() == [0, 5, 2]
    assert step.offsets.tolist() == [0, 3, 0]
    assert (step.singles, step.singles_length, step.logit_rows.tolist()) == (1, 5, [0])
