"""Parity on trained weights: peaked logits, and contexts that repeat themselves far beyond index_topk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm52_engine.checkpoint import read_model_spec
from glm52_engine.tokenizer import Tokenizer
from tests.engine.model.support import TOLERANCE, Ours, Theirs

QUESTIONS = ("How do I scale decode?", "What is a prefill pod?", "How do I scale decode?")
ANSWER = "Run `kubectl scale glm52 NAME --replicas=3`."
REPEATED = 5


@pytest.fixture(scope="module")
def conversation(demo_checkpoint: Path) -> list[int]:
    """The same turns again and again: many tokens of the context are alike but for their position."""
    messages = []
    for question in QUESTIONS * REPEATED:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": ANSWER}]
    ids = Tokenizer.load(demo_checkpoint).encode_chat([*messages, messages[0]])
    assert len(ids) > 10 * read_model_spec(demo_checkpoint).index_topk
    return ids


@pytest.fixture(scope="module")
def demo_theirs(demo_checkpoint: Path) -> Theirs:
    return Theirs(demo_checkpoint)


def test_logits_and_selections(demo_checkpoint: Path, demo_theirs: Theirs, conversation: list[int]) -> None:
    assert not any(demo_theirs.info.values()), demo_theirs.info
    trace: list[torch.Tensor] = []
    mine, reference = Ours(demo_checkpoint).all_logits(conversation, trace), demo_theirs.all_logits(conversation)
    assert (mine - reference).abs().max() < TOLERANCE
    for layer, (chosen, expected) in enumerate(zip(trace, demo_theirs.selected, strict=True)):
        for row in range(len(conversation)):
            want = sorted(position for position in expected[row].tolist() if position <= row)
            assert [position for position in chosen[row].tolist() if position >= 0] == want, f"layer {layer}, row {row}"


def test_greedy_output(demo_checkpoint: Path, demo_theirs: Theirs, conversation: list[int]) -> None:
    tokens = Ours(demo_checkpoint).greedy(conversation, 20, chunk=100)
    logits = demo_theirs.all_logits([*conversation, *tokens])[len(conversation) - 1 : -1]
    assert logits.argmax(dim=1).tolist() == tokens
    # What random weights never give: the model is sure of nearly every token.
    assert logits.softmax(-1).amax(-1).median() > 0.99
