"""Log probabilities in OpenAI's two shapes. The values are the model's own, as `runtime.types.Logprobs` has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm52_engine.runtime.types import Logprobs
from glm52_engine.tokenizer import Tokenizer

Score = tuple[bytes, float]
"""The bytes of a token, special ones included, and its log probability."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one token of the output: its own, and the likeliest ones', best first, among which it is if there are any."""

    own: Score
    top: tuple[Score, ...]

    @classmethod
    def of(cls, token: int, logprobs: Logprobs, tokenizer: Tokenizer) -> Scores:
        def score(token: int, value: float) -> Score:
            return tokenizer.token_bytes(token, skip_special=False), value

        own = score(token, logprobs.chosen)
        top = tuple(score(*pair) for pair in logprobs.top)
        # OpenAI lists the chosen token behind the likeliest ones when it is none of them.
        return cls(own, top if not top or token in dict(logprobs.top) else (*top, own))


def token_text(data: bytes) -> str:
    """A token's text; escaped bytes for one that is no UTF-8 by itself, so that such tokens stay apart."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(scores: Sequence[Scores]) -> dict[str, Any]:
    content = [{**_entry(each.own), "top_logprobs": [_entry(score) for score in each.top]} for each in scores]
    return {"content": content, "refusal": None}


def completion_logprobs(scores: Sequence[Scores], offsets: Sequence[int]) -> dict[str, Any]:
    """`offsets`: of each token's text in the choice's text, in characters."""
    tops: list[dict[str, float]] = []
    for each in scores:
        top: dict[str, float] = {}
        for data, value in each.top or (each.own,):
            top.setdefault(token_text(data), value)
        tops.append(top)
    return {
        "tokens": [token_text(each.own[0]) for each in scores],
        "token_logprobs": [each.own[1] for each in scores],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def _entry(score: Score) -> dict[str, Any]:
    data, value = score
    return {"token": token_text(data), "logprob": value, "bytes": list(data)}
