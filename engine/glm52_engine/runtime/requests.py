"""Which requests can never run, whatever else the engine is doing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from glm52_engine.runtime.types import Request, RequestError, Sampling
from glm52_engine.schedule import Limits, blocks_for


def check_request(request: Request, limits: Limits, *, stored_tokens: int) -> None:
    """Refuse what can never run, with the arithmetic; `stored_tokens` is how many KV rows it will need at most."""
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        raise RequestError("the prompt has no tokens")
    least, greatest = min(prompt), max(prompt)
    if least < 0 or greatest >= limits.vocab_size:
        bad = least if least < 0 else greatest
        raise RequestError(f"token id {bad} is outside the model's vocabulary of {limits.vocab_size}")
    if sampling.max_tokens < 1:
        raise RequestError(f"max_tokens is {sampling.max_tokens}; expected at least 1")
    _check_sampling(sampling, limits.vocab_size)
    total = len(prompt) + sampling.max_tokens
    if total > limits.max_model_len:
        raise RequestError(
            f"{len(prompt)} prompt tokens + {sampling.max_tokens} max_tokens = {total}, "
            f"more than the model length of {limits.max_model_len}"
        )
    needed = blocks_for(stored_tokens, limits.block_size)
    if needed > limits.blocks:
        raise RequestError(
            f"{stored_tokens} tokens need {needed} blocks of {limits.block_size}; a rank has {limits.blocks}"
        )


def salt_of(request: Request, layout: Mapping[str, str | int]) -> bytes:
    """What requests must have in common, beside their tokens, to share KV."""
    return json.dumps([layout, request.cache_salt], sort_keys=True).encode()


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    s, finite = sampling, math.isfinite
    ranges = (
        ("temperature", s.temperature, s.temperature >= 0, "at least 0"),
        ("top_p", s.top_p, 0 < s.top_p <= 1, "above 0, up to 1"),
        ("top_k", s.top_k, s.top_k >= 0, "at least 0"),
        ("min_p", s.min_p, 0 <= s.min_p <= 1, "0 to 1"),
        ("presence_penalty", s.presence_penalty, finite(s.presence_penalty), "a finite number"),
        ("frequency_penalty", s.frequency_penalty, finite(s.frequency_penalty), "a finite number"),
        ("repetition_penalty", s.repetition_penalty, 0 < s.repetition_penalty < math.inf, "above 0"),
        ("min_tokens", s.min_tokens, 0 <= s.min_tokens <= s.max_tokens, f"0 to max_tokens, {s.max_tokens}"),
    )
    for name, value, fits, expected in ranges:
        if not fits:
            raise RequestError(f"{name} is {value}; expected {expected}")
    for token, value in s.logit_bias:
        if not 0 <= token < vocab_size or not finite(value):
            raise RequestError(
                f"logit_bias of token {token} is {value}; expected a number and an id below {vocab_size}"
            )
