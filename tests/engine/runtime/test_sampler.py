"""Draws: greedy, filtered, penalised, repeatable; every row as a plain loop over the vocabulary would choose."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_engine.runtime import sampler as module
from glm52_engine.runtime.sampler import Draw, Sampler, finish_of
from glm52_engine.runtime.types import Sampling, Token

SHARES = (0.1, 0.4, 0.2, 0.25, 0.05)
LOGITS = torch.tensor([math.log(p) for p in SHARES])
EOS = frozenset({4})


def sampling(**options: Any) -> Sampling:
    return Sampling(**{"max_tokens": 10_000, "ignore_eos": True, **options})


def one(logits: torch.Tensor, draw: Draw, *, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> Token:
    sampler = Sampler(seats=draw.seat + 1, vocab_bound=logits.shape[-1], eos_ids=EOS)
    sampler.begin(draw.seat, draw.sampling, prompt, output)
    return sampler.sample(logits.view(1, -1), [draw])[0]


def many(count: int, *, bound: int = 5, **options: Any) -> Counter[int]:
    sampler = Sampler(seats=1, vocab_bound=bound, eos_ids=EOS)
    how = sampling(**options)
    sampler.begin(0, how, (), ())
    draws = [Draw(row, 0, how, seed=3, index=row) for row in range(count)]
    return Counter(token.id for token in sampler.sample(LOGITS.expand(count, -1), draws))


def test_greedy_ignores_seeds_and_filters() -> None:
    assert many(20, temperature=0.0, top_k=3, min_p=0.5) == {1: 20}
    assert many(20, temperature=0.0, bound=1) == {0: 20}
    assert many(20, temperature=1e-300) == {1: 20}


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9999999}])
def test_frequencies(filters: dict[str, float]) -> None:
    counts = many(4000, **filters)
    for token, share in enumerate(SHARES):
        assert abs(counts[token] / 4000 - share) < 0.03


def test_filters() -> None:
    assert many(300, top_k=1) == {1: 300}
    assert set(many(300, top_k=2)) == {1, 3}
    assert set(many(300, top_p=0.6)) == {1, 3}
    assert set(many(300, top_p=0.66)) == {1, 2, 3}, "the token that crosses top_p stays in"
    assert set(many(300, top_p=1e-9)) == {1}
    assert set(many(300, min_p=0.4)) == {1, 2, 3}
    assert set(many(300, min_p=1.0)) == {1}
    assert set(many(300, bound=2)) == {0, 1}
    assert set(many(300, temperature=1e-4)) == {1}
    hot = many(2000, temperature=100.0)
    assert min(hot.values()) > 300


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    hows = [sampling(), sampling(top_p=0.9), sampling(temperature=0.0), sampling(top_k=3, logprobs=2)]
    hows += [sampling(presence_penalty=1.0), sampling(logit_bias=((0, 2.0),))]
    draws = [Draw(seat, seat, hows[seat % len(hows)], seed=seat, index=seat % 7) for seat in range(60)]
    sampler = Sampler(seats=60, vocab_bound=5, eos_ids=EOS)
    for draw in draws:
        sampler.begin(draw.seat, draw.sampling, (1,), (2, 2))
    together = sampler.sample(LOGITS.expand(60, -1), draws)
    alone = [one(LOGITS, Draw(0, 0, d.sampling, d.seed, d.index), prompt=(1,), output=(2, 2)) for d in draws]
    assert together == alone
    assert len({token.id for token in together}) > 2


def test_choices_of_one_prompt_draw_apart_from_the_same_row() -> None:
    how = sampling()
    sampler = Sampler(seats=1, vocab_bound=5, eos_ids=EOS)
    sampler.begin(0, how, (), ())
    logits = torch.stack([LOGITS.flip(0), LOGITS])
    drawn = [t.id for t in sampler.sample(logits, [Draw(1, 0, how, 3, 0, choice=choice) for choice in range(40)])]
    assert len(set(drawn)) > 2
    assert drawn == [one(LOGITS, Draw(0, 0, how, 3, 0, choice=choice)).id for choice in range(40)]


def oracle(logits: list[float], draw: Draw, prompt: Sequence[int], output: Sequence[int], eos: frozenset[int]) -> int:
    """One row, one token after the other."""
    how = draw.sampling
    scores = list(logits)
    for token, bias in how.logit_bias:
        scores[token] += bias
    if draw.index < how.min_tokens:
        for token in how.stop_token_ids | (frozenset() if how.ignore_eos else eos):
            scores[token] = -math.inf
    for token in range(len(scores)):
        if token in (*prompt, *output):
            better = scores[token] > 0
            scores[token] *= 1 / how.repetition_penalty if better else how.repetition_penalty
        scores[token] -= how.frequency_penalty * output.count(token) + how.presence_penalty * (token in output)
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if how.temperature < 1e-5:
        return order[0]
    weights = [math.exp((scores[token] - scores[order[0]]) / how.temperature) for token in order]
    kept = [place for place, weight in enumerate(weights) if weight >= how.min_p][: how.top_k or None]
    whole, sum_before, nucleus = sum(weights[place] for place in kept), 0.0, []
    for place in kept:
        if sum_before < how.top_p * whole:
            nucleus.append(place)
        sum_before += weights[place]
    if (how.top_k, how.top_p, how.min_p) == (0, 1, 0):
        nucleus.sort(key=lambda place: order[place])
    target = module._uniform(draw) * sum(weights[place] for place in nucleus)
    reached = 0.0
    for place in nucleus:
        reached += weights[place]
        if reached > target:
            return order[place]
    return order[nucleus[-1]]


VOCABULARY = 12
TOKENS = st.integers(0, VOCABULARY - 1)
# Sixteenths are exact in float32, and few of them often equal: ties must fall to the lowest id.
ROWS = st.tuples(st.integers(0, 10**6), st.sampled_from([2, 10, 40])).map(
    lambda made: [n / 16 for n in random.Random(made[0]).choices(range(-made[1], made[1] + 1), k=VOCABULARY)]
)
HOWS = st.builds(
    sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.93, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    min_p=st.sampled_from([0.0, 0.051, 0.31, 1.0]),
    presence_penalty=st.sampled_from([0.0, -1.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 2.0]),
    logit_bias=st.lists(st.tuples(TOKENS, st.sampled_from([-100.0, 2.0])), max_size=3, unique_by=lambda p: p[0]).map(
        tuple
    ),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.frozensets(TOKENS, max_size=3),
    ignore_eos=st.booleans(),
)
CASES = st.lists(
    st.tuples(ROWS, HOWS, st.integers(0, 9), st.lists(TOKENS, max_size=6), st.lists(TOKENS, max_size=4)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=80, deadline=None)
@given(cases=CASES, candidates=st.sampled_from([3, 7, 1024]))
def test_every_row_as_a_plain_loop_would_choose(cases: list[Any], candidates: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CANDIDATES", candidates)
        sampler = Sampler(seats=len(cases), vocab_bound=VOCABULARY, eos_ids=EOS)
        draws = []
        for seat, (_, how, seed, prompt, output) in enumerate(cases):
            sampler.begin(seat, how, prompt, output)
            draws.append(Draw(seat, seat, how, seed, index=len(output)))
        found = sampler.sample(torch.tensor([row for row, *_ in cases]), draws)
    expected = [
        oracle(row, draw, prompt, output, EOS) for draw, (row, _, _, prompt, output) in zip(draws, cases, strict=True)
    ]
    assert [token.id for token in found] == expected


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.9}, {"top_k": 900, "top_p": 0.5}])
def test_ties_at_the_border_of_the_candidates(monkeypatch: pytest.MonkeyPatch, filters: dict[str, float]) -> None:
    """A thousand equal logits, of which any could be among the first few: the draw is the one of a full sort."""
    logits = torch.zeros(1000)
    logits[torch.arange(0, 1000, 7)] = 1.0
    draws = [Draw(0, 0, sampling(**filters), seed, 0) for seed in range(30)]
    found = {}
    for candidates in (1, 16, 150, 10**6):
        monkeypatch.setattr(module, "CANDIDATES", candidates)
        found[candidates] = [one(logits, draw).id for draw in draws]
    assert found[1] == found[16] == found[150] == found[10**6]
    assert found[16] == [oracle(logits.tolist(), draw, (), (), EOS) for draw in draws]


def test_penalties_count_what_the_sampler_itself_chose() -> None:
    how = sampling(temperature=0.0, frequency_penalty=0.3, repetition_penalty=1.01)
    sampler = Sampler(seats=2, vocab_bound=5, eos_ids=EOS)
    sampler.begin(1, how, (0,), (3,))
    output = [3]
    for index in range(1, 12):
        draw = Draw(0, 1, how, 0, index)
        expected = oracle(LOGITS.tolist(), draw, (0,), output, EOS)
        assert [token.id for token in sampler.sample(LOGITS.view(1, -1), [draw])] == [expected]
        output.append(expected)
    assert len(set(output)) > 2
    # Whoever has the seat next starts from nothing.
    sampler.begin(1, how, (), ())
    assert sampler.sample(LOGITS.view(1, -1), [Draw(0, 1, how, 0, 0)])[0].id == 1


def test_nothing_that_ends_the_output_comes_before_min_tokens() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 5.0, 9.0])
    how = sampling(temperature=0.0, min_tokens=2, stop_token_ids=frozenset({3}), ignore_eos=False)
    assert [one(logits, Draw(0, 0, how, 0, index)).id for index in range(4)] == [2, 2, 4, 4]
    assert one(logits, Draw(0, 0, sampling(temperature=0.0, min_tokens=2), 0, 0)).id == 4, "an end that is ignored"


def test_log_probabilities_are_the_model_s_own() -> None:
    how = sampling(temperature=0.5, top_k=1, logit_bias=((4, 100.0),), presence_penalty=2.0, logprobs=3)
    token = one(LOGITS, Draw(0, 0, how, 0, 0), output=(1,))
    assert token.id == 4
    assert token.logprobs is not None
    assert token.logprobs.chosen == pytest.approx(math.log(0.05))
    assert [best for best, _ in token.logprobs.top] == [1, 3, 2]
    assert [value for _, value in token.logprobs.top] == pytest.approx([math.log(p) for p in (0.4, 0.25, 0.2)])
    bounded = one(LOGITS[:2], Draw(0, 0, sampling(temperature=0.0, logprobs=9), 0, 0)).logprobs
    assert bounded is not None
    assert sum(math.exp(value) for _, value in bounded.top) == pytest.approx(1.0), "over the decodable vocabulary"
    assert one(LOGITS, Draw(0, 0, sampling(logprobs=0), 0, 0)).logprobs is not None
    assert one(LOGITS, Draw(0, 0, sampling(), 0, 0)).logprobs is None


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_number_fails_alone(broken: float, temperature: float) -> None:
    how = sampling(temperature=temperature, top_p=0.9, logprobs=1)
    sampler = Sampler(seats=3, vocab_bound=5, eos_ids=EOS)
    for seat in range(3):
        sampler.begin(seat, how, (), ())
    logits = LOGITS.expand(3, -1).clone()
    logits[1, 2] = broken
    found = sampler.sample(logits, [Draw(seat, seat, how, 0, 0) for seat in range(3)])
    assert [token.finish for token in found] == [None, "error", None]
    assert found[1].logprobs is None


def test_why_an_output_ends() -> None:
    options = Sampling(max_tokens=3, stop_token_ids=frozenset({8}))
    eos = frozenset({9})
    assert [finish_of(1, index, options, eos) for index in range(3)] == [None, None, "length"]
    assert finish_of(8, 0, options, eos) == finish_of(9, 0, options, eos) == "stop"
    assert finish_of(9, 2, options, eos) == "stop", "a stop on the last token is a stop"
    assert finish_of(9, 0, Sampling(max_tokens=3, ignore_eos=True), eos) is None
