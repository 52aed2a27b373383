"""From a valid request to prompt ids and sampling, and from tokens back to text."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from glm52_engine.runtime.types import Request, Sampling, Token
from glm52_engine.serve.errors import bad
from glm52_engine.serve.openai import Asked
from glm52_engine.serve.stops import StopMatcher
from glm52_engine.tokenizer import TemplateError, Tokenizer


def prompt_ids(asked: Asked, tokenizer: Tokenizer) -> tuple[int, ...]:
    """CPU-heavy for long prompts: run it off the event loop. Raises ApiError 400."""
    if isinstance(asked.prompt, tuple):
        too_large = [token for token in asked.prompt if token >= tokenizer.vocab_bound]
        if too_large:
            raise bad(f"prompt: token id {too_large[0]} is not below {tokenizer.vocab_bound}", param="prompt")
        return asked.prompt
    if asked.endpoint == "completions":
        return tuple(tokenizer.encode(asked.prompt))
    try:
        return tuple(tokenizer.encode_chat(asked.messages, **asked.template))
    except TemplateError as error:
        raise bad(str(error), param="messages") from error


def output_limit(asked: Asked, prompt_tokens: int, max_model_len: int) -> int:
    """Most tokens of the output; raises ApiError 400 when prompt and output cannot fit."""
    param = "messages" if asked.endpoint == "chat" else "prompt"
    room = max_model_len - prompt_tokens
    if room < 1:
        raise bad(
            f"this model's context is {max_model_len} tokens and the output needs one; the prompt has {prompt_tokens}",
            param=param,
            code="context_length_exceeded",
        )
    if asked.max_tokens is None:
        return room
    if asked.max_tokens > room:
        raise bad(
            f"this model's context is {max_model_len} tokens; the prompt has {prompt_tokens}"
            f" and max_tokens asks for {asked.max_tokens}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return asked.max_tokens


def new_seed() -> int:
    return secrets.randbits(62)


def engine_request(
    asked: Asked, request_id: str, prompt: tuple[int, ...], *, seed: int, max_model_len: int, tokenizer: Tokenizer
) -> Request:
    ends = frozenset() if asked.ignore_eos else tokenizer.eos_ids
    sampling = Sampling(
        max_tokens=output_limit(asked, len(prompt), max_model_len),
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=seed,
        stop_token_ids=asked.stop_token_ids | ends,
        ignore_eos=asked.ignore_eos,
    )
    return Request(request_id, prompt, sampling)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to the answer."""

    text: str
    token_id: int
    finish: str | None


class TextStream:
    """Tokens of one request → text, cut at the first stop string. Counts the tokens for usage."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(asked.stop)
        self.tokens = 0

    def push(self, token: Token) -> Piece:
        self.tokens += 1
        # The token that ended the text by being a stop token is no part of it.
        text = "" if token.finish == "stop" else self._detokenizer.push(token.id)
        safe = self._matcher.push(text)
        if token.finish and not self._matcher.hit:
            safe += self._matcher.push(self._detokenizer.flush())
            safe += self._matcher.flush()
        return Piece(safe, token.id, "stop" if self._matcher.hit else token.finish)
