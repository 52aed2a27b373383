"""The trained preset on the engine: answers that make sense, and that end by themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path

from e2e.cluster.tour import QUESTION
from glm52_engine.tokenizer import Tokenizer
from tests.engine.runtime.support import Maker, generate, greedy

SCALING = (
    "Run `kubectl scale glm52 tiny --replicas=2`. It sets spec.decode.replicas; pods that go are drained first, so no "
    "request is lost."
)


async def test_the_tours_question_is_answered_and_the_answer_ends(demo_checkpoint: Path) -> None:
    tokenizer, maker = Tokenizer.load(demo_checkpoint), Maker(demo_checkpoint)

    async def ask(thinking: bool) -> str:
        messages = [{"role": "user", "content": QUESTION}]
        prompt = tuple(tokenizer.encode_chat(messages, enable_thinking=thinking))
        tokens = await generate(prefill, decode, greedy(f"thinking {thinking}", prompt, 100))
        assert tokens[-1].finish == "stop"
        assert tokens[-1].id == tokenizer.id_of("<|user|>")
        return tokenizer.decode(token.id for token in tokens)

    async with maker.running() as prefill, maker.running() as decode:
        answers = await asyncio.gather(ask(True), ask(False))
    assert answers == [f"<think>This is about scaling decode.</think>{SCALING}", SCALING]
