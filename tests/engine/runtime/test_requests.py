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
        (request((1, 2, -1, 60)), "token id -1 is outside"),
        (request(max_tokens=0), "max_tokens is 0; expected at least 1"),
        (request(temperature=-1), "temperature is -1; expected at least 0"),
        (request(temperature=float("nan")), "temperature is nan"),
        (request(top_p=0), "top_p is 0; expected above 0, up to 1"),
        (request(top_k=-1), "top_k is -1"),
        (request(min_p=1.5), "min_p is 1.5"),
        (request(presence_penalty=float("inf")), "presence_penalty is inf"),
        (request(frequency_penalty=float("nan")), "frequency_penalty is nan"),
        (request(repetition_penalty=0), "repetition_penalty is 0; expected above 0"),
        (request(logit_bias=((50, 1.0),)), "logit_bias of token 50 is 1.0; expected a number and an id below 50"),
        (request(min_tokens=4), "min_tokens is 4; expected 0 to max_tokens, 3"),
        (request((1,) * 98), "98 prompt tokens + 3 max_tokens = 101, more than the model length of 100"),
        (request((1,) * 38), "41 tokens need 11 blocks of 4; a rank has 10"),
    ],
)
def test_what_can_never_run_is_refused_with_the_arithmetic(wrong: Request, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        check_request(wrong, LIMITS, stored_tokens=len(wrong.prompt) + wrong.sampling.max_tokens)


def test_what_just_fits() -> None:
    check_request(request((1,) * 37), LIMITS, stored_tokens=40)
