"""Our model against the published model code in float32: logits, selected tokens, greedy output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from glm52_engine.model import Span
from tests.engine.model.support import TOLERANCE, Ours, Theirs, prompt

K = 32
LENGTHS = (1, K - 1, K, K + 1, 5 * K + 3)


def test_k_is_the_checkpoints(tiny_checkpoint: Path) -> None:
    assert json.loads((tiny_checkpoint / "config.json").read_text())["index_topk"] == K


def test_the_checkpoint_loads_there_without_a_word(theirs: Theirs) -> None:
    assert not any(theirs.info.values()), theirs.info


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_and_selections(ours: Ours, theirs: Theirs, length: int) -> None:
    ids = prompt(length)
    trace: list[torch.Tensor] = []
    mine, reference = ours.all_logits(ids, trace), theirs.all_logits(ids)
    assert (mine - reference).abs().max() < TOLERANCE
    assert len(trace) == len(theirs.selected) == 8
    for layer, (chosen, expected) in enumerate(zip(trace, theirs.selected, strict=True)):
        for row in range(length):
            # The reference fills short rows up with future tokens, which its causal mask removes later.
            want = {position for position in expected[row].tolist() if position <= row}
            got = [position for position in chosen[row].tolist() if position >= 0]
            assert got == sorted(want), f"layer {layer}, row {row}"


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_output(ours: Ours, theirs: Theirs, length: int) -> None:
    ids = prompt(length, seed=length)
    tokens = ours.greedy(ids, 8, chunk=20)
    # One look at the whole: the best token after every prefix is the one that was generated.
    assert theirs.all_logits([*ids, *tokens])[length - 1 : -1].argmax(dim=1).tolist() == tokens


def test_tiny_is_fit_for_comparisons(ours: Ours) -> None:
    """Best and second-best logits are far apart in float32's terms, and the output is no loop and no constant."""
    prompts = [prompt(50, seed) for seed in range(4)]
    logits = ours.step([Span(seat, 0, ids, True) for seat, ids in enumerate(prompts)])
    outputs: list[list[int]] = []
    for position in range(50, 110):
        best = logits.topk(2)
        assert (best.values[:, 0] - best.values[:, 1]).min() > 5e-4
        outputs.append(best.indices[:, 0].tolist())
        logits = ours.step([Span(seat, position, [token], True) for seat, token in enumerate(outputs[-1])])
    sequences = list(zip(*outputs, strict=True))
    assert len(set(sequences)) == 4
    for output in sequences:
        assert len(set(output)) >= 8
        assert len({output[i : i + 4] for i in range(56)}) > 28
        assert max(output) < 256, "special tokens are out of reach of greedy output"
