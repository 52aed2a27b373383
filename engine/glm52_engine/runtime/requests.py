"""Which requests can never run, whatever else the engine is doing."""

from __future__ import annotations

from glm52_engine.runtime.types import Request, RequestError
from glm52_engine.schedule import Limits, blocks_for


def check_request(request: Request, limits: Limits, *, stored_tokens: int) -> None:
    """Refuse what can never run, with the arithmetic; `stored_tokens` is how many KV rows it will need at most."""
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        raise RequestError("the prompt has no tokens")
    bad = next((token for token in prompt if not 0 <= token < limits.vocab_size), None)
    if bad is not None:
        raise RequestError(f"token id {bad} is outside the model's vocabulary of {limits.vocab_size}")
    if sampling.max_tokens < 1:
        raise RequestError(f"max_tokens is {sampling.max_tokens}; expected at least 1")
    if not sampling.temperature >= 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise RequestError(
            f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}: "
            "expected temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0"
        )
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
