"""Logits → token ids. A draw depends on (seed, output index) alone, never on the batch it happened to run in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glm52_engine.runtime.types import FinishReason, Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of logits: how to choose, with which seed, and the index of the token in the output."""

    sampling: Sampling
    seed: int
    index: int


def sample(logits: torch.Tensor, draws: Sequence[Draw], *, vocab_bound: int) -> list[int]:
    """logits float32 [N, vocab_size] → N token ids below `vocab_bound` (the padding behind it is no text)."""
    logits = logits[:, :vocab_bound]
    chosen: list[int] = logits.argmax(dim=1).tolist()
    for row, draw in enumerate(draws):
        if draw.sampling.temperature > 0:
            chosen[row] = _draw(logits[row], draw)
    return chosen


def finish_of(token: int, index: int, sampling: Sampling, eos_ids: frozenset[int]) -> FinishReason | None:
    """Why the output ends with this token, if it does."""
    if token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos):
        return "stop"
    return "length" if index + 1 >= sampling.max_tokens else None


def _draw(logits: torch.Tensor, draw: Draw) -> int:
    """Inverse of the cumulative distribution in float64, over the tokens from likely to unlikely."""
    sampling = draw.sampling
    values, tokens = (logits.double() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        values, tokens = values[: sampling.top_k], tokens[: sampling.top_k]
    probabilities = values.softmax(dim=0)
    cumulative = probabilities.cumsum(dim=0)
    if sampling.top_p < 1:
        # The token that crosses top_p stays in, so that at least one always does.
        kept = int((cumulative - probabilities < sampling.top_p).sum())
        cumulative = cumulative[:kept]
    target = _uniform(draw.seed, draw.index) * cumulative[-1]
    place = int(torch.searchsorted(cumulative, target, right=True))
    return int(tokens[min(place, len(cumulative) - 1)])


def _uniform(seed: int, index: int) -> float:
    """In [0, 1), from a hash: the same on every machine and for every version of torch."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
