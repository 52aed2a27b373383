"""Outputs under a grammar, from prefill here and decode there."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm52_engine.runtime.sampler import Draw, Sampler
from glm52_engine.runtime.types import Request, Sampling, Token
from glm52_engine.structured import Grammar, GrammarCompiler, sources
from glm52_engine.tokenizer import Tokenizer
from tests.engine.model.support import prompt
from tests.engine.runtime.support import Maker, copy_blocks, generate, greedy, idle

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoint)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def asked(name: str, grammar: Grammar, seed: int) -> Request:
    request = greedy(name, tuple(prompt(20)), 200, temperature=1.0, seed=seed)
    return replace(request, constraint=grammar.matcher())


def after(request: Request, first: Token) -> Request:
    """What decode asks for: its matcher has taken in the token that prefill drew."""
    assert request.constraint is not None
    matcher = request.constraint.fork()
    if first.finish is None:
        matcher.accept(first.id)
    return replace(request, constraint=matcher)


async def test_the_output_fits_across_the_hand_off(
    maker: Maker, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = await compiler.compile(sources.json_schema(SCHEMA))
    plain = greedy("plain", tuple(prompt(20)), 12)
    async with maker.running() as source, maker.running() as target:
        alone = await generate(source, target, plain)

        async def constrained(seed: int) -> list[Token]:
            request = asked(f"r{seed}", grammar, seed)
            prefilled = await source.prefill(request)
            own = after(request, prefilled.token)
            blocks = await target.reserve(own)
            copy_blocks(source, prefilled, target, blocks)
            source.release(request.id)
            return [prefilled.token] + [token async for token in target.decode(own, blocks, prefilled.token)]

        *outputs, beside = await asyncio.gather(
            *(constrained(seed) for seed in range(4)), generate(source, target, replace(plain, id="beside"))
        )
        assert idle(source)
        assert idle(target)
    for output in outputs:
        assert output[-1].finish == "stop"
        found = json.loads(tokenizer.decode([token.id for token in output]))
        assert found["a"] in ("x", "yy")
        assert 0 <= found["n"] <= 99
    assert [token.id for token in beside] == [token.id for token in alone], "rows without a grammar are not touched"


def test_masks_come_before_the_filters_and_logprobs_do_not_see_them(tokenizer: Tokenizer) -> None:
    grammar = GrammarCompiler(tokenizer)._compile(sources.choice(["b", "c"]))
    sampler = Sampler(seats=1, vocab_bound=tokenizer.vocab_bound, eos_ids=tokenizer.eos_ids)
    sampling = Sampling(max_tokens=9, temperature=1.0, top_k=1, logprobs=1, min_tokens=5)
    logits = torch.zeros(1, tokenizer.vocab_bound)
    logits[0, ord("a")], logits[0, ord("c")] = 9.0, 1.0
    sampler.begin(0, sampling, (1,), (), grammar.matcher())
    (token,) = sampler.sample(logits, [Draw(0, 0, sampling, 0, 0)])
    assert token.id == ord("c")
    assert token.logprobs is not None
    assert [best for best, _ in token.logprobs.top] == [ord("a")]
    (end,) = sampler.sample(logits, [Draw(0, 0, sampling, 0, 1)])
    assert end.finish == "stop", "a grammar at its end beats min_tokens"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_row_that_is_no_number_fails_also_where_the_grammar_forbids_the_token(
    tokenizer: Tokenizer, broken: float
) -> None:
    """Its log probabilities would be none either, and its KV is not to be trusted."""
    grammar = GrammarCompiler(tokenizer)._compile(sources.choice(["b", "c"]))
    sampler = Sampler(seats=2, vocab_bound=tokenizer.vocab_bound, eos_ids=tokenizer.eos_ids)
    sampling = Sampling(max_tokens=9, temperature=0.0, logprobs=1)
    logits = torch.zeros(2, tokenizer.vocab_bound)
    logits[0, ord("a")] = broken
    for seat in range(2):
        sampler.begin(seat, sampling, (1,), (), grammar.matcher())
    found = sampler.sample(logits, [Draw(seat, seat, sampling, 0, 0) for seat in range(2)])
    assert [(token.finish, token.logprobs is None) for token in found] == [("error", True), (None, False)]


def test_first_tokens_of_several_choices(tokenizer: Tokenizer) -> None:
    grammar = GrammarCompiler(tokenizer)._compile(sources.choice(["b", "c"]))
    sampler = Sampler(seats=1, vocab_bound=tokenizer.vocab_bound, eos_ids=tokenizer.eos_ids)
    sampling = Sampling(max_tokens=9, temperature=1.0)
    sampler.begin(0, sampling, (1,), (), grammar.matcher())
    draws = [Draw(0, 0, sampling, 0, 0, choice=choice, shared=True) for choice in range(20)]
    tokens = sampler.sample(torch.zeros(1, tokenizer.vocab_bound), draws)
    assert {token.id for token in tokens} == {ord("b"), ord("c")}
    assert {token.finish for token in tokens} == {None}


def test_a_grammar_that_cannot_go_on_fails_its_row_alone(tokenizer: Tokenizer) -> None:
    grammar = GrammarCompiler(tokenizer)._compile(sources.choice(["b"]))
    sampler = Sampler(seats=2, vocab_bound=tokenizer.vocab_bound, eos_ids=tokenizer.eos_ids)
    sampling = Sampling(max_tokens=9, temperature=0.0)
    broken = grammar.matcher()
    broken.raw.consume_token(ord("x"))
    for seat, constraint in enumerate((broken, None)):
        sampler.begin(seat, sampling, (1,), (), constraint)
    logits = torch.zeros(2, tokenizer.vocab_bound)
    logits[0, min(tokenizer.eos_ids)] = -torch.inf
    found = sampler.sample(logits, [Draw(0, 0, sampling, 0, 0), Draw(1, 1, sampling, 0, 0)])
    assert [token.finish for token in found] == ["error", None]
