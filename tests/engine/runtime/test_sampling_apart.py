"""Every way to sample gives with prefill and decode apart what one place gives: a loop over the same model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm52_engine.model import Span
from glm52_engine.runtime.sampler import Draw, Sampler
from glm52_engine.runtime.types import Request, Sampling, Token
from tests.engine.model.support import Ours, prompt
from tests.engine.runtime.support import Maker, copy_blocks, generate, greedy, idle

PROMPT = tuple(prompt(37))
LENGTH = 10


@pytest.fixture(scope="module")
def ours(tiny_checkpoint: Path) -> Ours:
    return Ours(tiny_checkpoint)


def in_one_place(ours: Ours, maker: Maker, request: Request) -> list[Token]:
    sampler = Sampler(seats=1, vocab_bound=maker.bound, eos_ids=maker.eos)
    how = request.sampling
    sampler.begin(0, how, request.prompt, ())
    logits = ours.prefill(request.prompt, chunk=1000)
    tokens: list[Token] = []
    while not tokens or tokens[-1].finish is None:
        assert how.seed is not None
        tokens += sampler.sample(logits.view(1, -1), [Draw(0, 0, how, how.seed, len(tokens), how.choice)])
        position = len(request.prompt) + len(tokens) - 1
        logits = ours.step([Span(0, position, [tokens[-1].id], True)])[0]
    return tokens


def request(**sampling: Any) -> Request:
    return Request("r", PROMPT, Sampling(**{"max_tokens": LENGTH, "seed": 5, **sampling}))


WAYS: dict[str, dict[str, Any]] = {
    "random": {},
    "filtered": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.7},
    "biased": {"temperature": 0.0, "logit_bias": ((97, 60.0), (98, 60.0)), "presence_penalty": 2.0},
    "scored": {"logprobs": 5, "repetition_penalty": 0.8},
    "not before": {"temperature": 0.0, "min_tokens": 4},
}


@pytest.mark.parametrize("way", WAYS)
async def test_tokens_are_the_same_apart(maker: Maker, ours: Ours, way: str) -> None:
    options = WAYS[way]
    if way == "not before":
        options = {**options, "logit_bias": tuple((end, 100.0) for end in maker.eos)}
    asked = request(**options)
    neighbours = [greedy(f"n{n}", tuple(prompt(5 + n, seed=n)), 12, temperature=float(n % 2)) for n in range(4)]
    async with maker.running() as source, maker.running() as target:
        *_, found = await asyncio.gather(*(generate(source, target, each) for each in (*neighbours, asked)))
    expected = in_one_place(ours, maker, asked)
    assert [(t.id, t.index, t.finish) for t in found] == [(t.id, t.index, t.finish) for t in expected]
    if way == "not before":
        assert (len(found), found[-1].finish) == (5, "stop")
    for mine, other in zip(found, expected, strict=True):
        assert (mine.logprobs is None) == (other.logprobs is None) == (way != "scored")
        if mine.logprobs and other.logprobs:
            assert mine.logprobs.chosen == pytest.approx(other.logprobs.chosen, abs=1e-3)
            assert [token for token, _ in mine.logprobs.top] == [token for token, _ in other.logprobs.top]


async def test_choices_of_one_prefill_go_on_apart(maker: Maker, ours: Ours) -> None:
    asked = request(frequency_penalty=0.5)
    async with maker.running() as source, maker.running(ranks=2) as target:
        prefilled = await source.prefill(replace(asked, choices=4))
        assert source.stats().prompt_tokens_computed == len(PROMPT)
        outputs = []
        for choice, first in enumerate((prefilled.token, *prefilled.others)):
            own = Request(f"r/{choice}", PROMPT, replace(asked.sampling, choice=choice))
            blocks = await target.reserve(own)
            copy_blocks(source, prefilled, target, blocks)
            outputs.append([first] + [token async for token in target.decode(own, blocks, first)])
        source.release("r")
        assert idle(source)
        assert idle(target)
    expected = [
        in_one_place(ours, maker, replace(asked, sampling=replace(asked.sampling, choice=choice)))
        for choice in range(4)
    ]
    assert outputs == expected
    assert len({tuple(token.id for token in output) for output in outputs}) == 4
