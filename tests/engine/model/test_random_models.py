"""Random small models, every size drawn, against the published model code: prefill, chunks, mixed batches, decode."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from glm52_engine.model import Span
from tests.engine.checkpoint.configs import random_config
from tests.engine.checkpoint.support import random_tensors, spec_of, write
from tests.engine.model.support import Ours, Theirs

SEEDS = range(6)

TOLERANCE = 2e-4
"""Greatest difference of a logit (their standard deviation is 3) that rounding in float32 may make."""

NEAR = 3e-6
"""Two index scores closer than this may change places by rounding."""


@dataclass(frozen=True)
class Case:
    """One model twice. `logits` are the reference's for `ids`, one row a token: row r is what a prompt of r + 1 gives.

    Rows from `first_tie` on are left out: there, or in a row that they attend to, two scores at the border of the
    selection are equal, and the reference leaves open which of them it takes.
    """

    seed: int
    config: dict[str, Any]
    ours: Ours
    theirs: Theirs
    ids: list[int]
    logits: torch.Tensor
    selected: list[torch.Tensor]
    scores: list[torch.Tensor]
    first_tie: int

    @property
    def k(self) -> int:
        return int(self.config["index_topk"])

    def check(self, row: int, logits: torch.Tensor) -> None:
        """`logits` [vocab] are ours after ids[: row + 1]."""
        if row < self.first_tie:
            assert (logits - self.logits[row]).abs().max() < TOLERANCE, f"row {row}"


def first_tie(scores: list[torch.Tensor], k: int) -> int:
    rows = len(scores[0])
    for layer in scores:
        best = layer.topk(k + 1).values[k:rows]
        ties = (best[:, k - 1] - best[:, k] < NEAR).nonzero()
        rows = min(rows, k + int(ties[0])) if len(ties) else rows
    return rows


@pytest.fixture(scope="module", params=SEEDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    seed = request.param
    config = random_config(seed)
    checkpoint: Path = write(tmp_path_factory.mktemp("random") / "m", config, random_tensors(config, seed))
    ours, theirs = Ours(checkpoint), Theirs(checkpoint)
    assert not any(theirs.info.values()), theirs.info
    k = config["index_topk"]
    ids = random.Random(seed).choices(range(config["vocab_size"]), k=6 * k + 5)
    logits = theirs.all_logits(ids)
    return Case(seed, config, ours, theirs, ids, logits, [*theirs.selected], theirs.scores, first_tie(theirs.scores, k))


def chosen(row: torch.Tensor) -> list[int]:
    return [position for position in row.tolist() if position >= 0]


def test_logits_and_selections(case: Case) -> None:
    assert case.first_tie > 3 * case.k
    assert len(case.scores) == len(spec_of(case.config).full_layers)
    for length in (1, case.k - 1, case.k, case.k + 1, len(case.ids)):
        trace: list[torch.Tensor] = []
        logits = case.ours.all_logits(case.ids[:length], trace)
        for row in range(length):
            case.check(row, logits[row])
        for layer, (mine, theirs) in enumerate(zip(trace, case.selected, strict=True)):
            for row in range(min(length, case.first_tie)):
                # The reference fills short rows up with future tokens, which its causal mask removes later.
                want = sorted({position for position in theirs[row].tolist() if position <= row})
                assert chosen(mine[row]) == want, f"layer {layer}, row {row}"


def test_chunks_of_any_size(case: Case) -> None:
    draw = random.Random(case.seed)
    for longest, length in ((1, case.k + 3), (case.k, len(case.ids)), (2 * case.k + 1, len(case.ids))):
        start = 0
        while start < length:
            end = min(length, start + draw.randint(1, longest))
            logits = case.ours.step([Span(0, start, case.ids[start:end], True)])
            case.check(end - 1, logits[0])
            start = end


def test_mixed_batches(case: Case) -> None:
    """Four sequences at different places, each step a random mixture of chunks and single tokens."""
    draw = random.Random(case.seed)
    done = [0, 0, 0, 0]
    ends = [len(case.ids), case.k, case.k + 1, 2 * case.k + 3]
    # The reference's rows are those of one sequence: each seat has a prefix of it.
    while any(place < end for place, end in zip(done, ends, strict=True)):
        spans = []
        for seat in draw.sample(range(4), draw.randint(1, 4)):
            count = min(ends[seat] - done[seat], draw.choice((1, 1, 1, 5, case.k + 2)))
            if count:
                tokens = case.ids[done[seat] : done[seat] + count]
                spans.append(Span(seat, done[seat], tokens, draw.random() < 0.7))
                done[seat] += count
        if spans:
            logits = case.ours.step(spans)
            for span, row in zip((span for span in spans if span.wants_logits), logits, strict=True):
                case.check(span.end - 1, row)


def test_greedy_output(case: Case) -> None:
    """From below k, across k and across blocks. The reference reads the whole output once: its best token after every
    prefix must be the one that was generated."""
    start, count = case.k - 2, 3 * case.k + 4
    ids = case.ids[:start]
    tokens = case.ours.greedy(ids, count, chunk=4)
    logits = case.theirs.all_logits([*ids, *tokens])[start - 1 : -1]
    compared = first_tie(case.theirs.scores, case.k) - start
    assert compared >= case.k
    best = logits.topk(2).values
    for place in range(min(count, compared)):
        if best[place, 0] - best[place, 1] > TOLERANCE:
            assert tokens[place] == int(logits[place].argmax()), f"token {place}"


def test_equal_scores_go_to_the_lowest_position(tmp_path: Path) -> None:
    """With one index head half of all scores are exactly 0, and whole rows are decided by ties."""
    config = random_config(1) | {"index_n_heads": 1}
    checkpoint = write(tmp_path / "m", config, random_tensors(config))
    ours, theirs, k = Ours(checkpoint), Theirs(checkpoint), config["index_topk"]
    ids = random.Random(0).choices(range(config["vocab_size"]), k=60)
    theirs.all_logits(ids)
    trace: list[torch.Tensor] = []
    ours.all_logits(ids, trace)
    ties = 0
    # The first layer only: what the others see depends on the selection.
    for row in range(k, len(ids)):
        seen = theirs.scores[0][row, : row + 1].tolist()
        best = sorted(range(row + 1), key=lambda position: (-seen[position], position))
        gap = seen[best[k - 1]] - seen[best[k]]
        if gap == 0 or gap > NEAR:
            assert chosen(trace[0][row]) == sorted(best[:k]), f"row {row}"
            ties += gap == 0
    assert ties > 10
