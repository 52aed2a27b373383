"""Draws: greedy, filtered, repeatable, and with the right frequencies."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from glm52_engine.runtime.sampler import Draw, finish_of, sample
from glm52_engine.runtime.types import Sampling

LOGITS = torch.tensor([math.log(p) for p in (0.1, 0.4, 0.2, 0.25, 0.05)])


def draws(count: int, *, bound: int = 5, **sampling: Any) -> Counter[int]:
    options = Sampling(**{"max_tokens": 9, **sampling})
    rows = [Draw(options, seed=3, index=index) for index in range(count)]
    return Counter(sample(LOGITS.expand(count, -1), rows, vocab_bound=bound))


def test_greedy_ignores_seeds_and_filters() -> None:
    assert draws(20, temperature=0.0) == {1: 20}
    assert draws(20, temperature=0.0, bound=1) == {0: 20}


def test_frequencies() -> None:
    counts = draws(4000)
    for token, probability in enumerate((0.1, 0.4, 0.2, 0.25, 0.05)):
        assert abs(counts[token] / 4000 - probability) < 0.03


def test_filters() -> None:
    assert draws(300, top_k=1) == {1: 300}
    assert set(draws(300, top_k=2)) == {1, 3}
    assert set(draws(300, top_p=0.6)) == {1, 3}
    assert set(draws(300, top_p=0.66)) == {1, 2, 3}, "the token that crosses top_p stays in"
    assert set(draws(300, top_p=1e-9)) == {1}
    assert set(draws(300, bound=2)) == {0, 1}
    assert set(draws(300, temperature=1e-6)) == {1}
    hot = draws(2000, temperature=100.0)
    assert min(hot.values()) > 300


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    options = Sampling(max_tokens=9)
    rows = [Draw(options, seed=seed, index=seed % 7) for seed in range(50)]
    together = sample(LOGITS.expand(50, -1), rows, vocab_bound=5)
    assert together == [sample(LOGITS.unsqueeze(0), [row], vocab_bound=5)[0] for row in rows]
    assert len(set(together)) > 2


def test_why_an_output_ends() -> None:
    options = Sampling(max_tokens=3, stop_token_ids=frozenset({8}))
    eos = frozenset({9})
    assert [finish_of(1, index, options, eos) for index in range(3)] == [None, None, "length"]
    assert finish_of(8, 0, options, eos) == finish_of(9, 0, options, eos) == "stop"
    assert finish_of(9, 2, options, eos) == "stop", "a stop on the last token is a stop"
    assert finish_of(9, 0, Sampling(max_tokens=3, ignore_eos=True), eos) is None
