"""Requests that can never run."""

from __future__ import annotations

import re

import pytest

from glm52_engine.runtime.requests import check_request
from glm52_engine.runtime.types import Request, RequestError, Sampling
from glm52_engine.schedule import Limits

LIMITS = Limits(max_model_len=100, block_size=4, seats=2, blocks=10, vocab_size=50)


def request(prompt: tuple[int, ...] = (1, 2), **sampling: object) -> Request:
    return Request("r", prompt, Sampling(**{"max_tokens": 3, **sampling}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request(()), "the prompt has no tokens"),
        (request((1, 50)), "token id 50 is outside the model's vocabulary of 50"),
        (request((-1,)), "token id -1 is outside"),
        (request(max_tokens=0), "max_tokens is 0; expected at least 1"),
        (request(temperature=-1), "temperature -1"),
        (request(temperature=float("nan")), "temperature nan"),
        (request(top_p=0), "top_p 0"),
        (request(top_k=-1), "top_k -1"),
        (request((1,) * 98), "98 prompt tokens + 3 max_tokens = 101, more than the model length of 100"),
        (request((1,) * 38), "41 tokens need 11 blocks of 4; a rank has 10"),
    ],
)
def test_what_can_never_run_is_refused_with_the_arithmetic(wrong: Request, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        check_request(wrong, LIMITS, stored_tokens=len(wrong.prompt) + wrong.sampling.max_tokens)


def test_what_just_fits() -> None:
    check_request(request((1,) * 37), LIMITS, stored_tokens=40)
