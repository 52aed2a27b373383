"""From a valid request to prompt ids and sampling, and from tokens back to text."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from glm52_engine.runtime.types import Request, Sampling, Token
from glm52_engine.serve.errors import bad
from glm52_engine.serve.logprobs import Scores
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
    _check_variables(asked, tokenizer)
    try:
        return tuple(tokenizer.encode_chat(asked.messages, tools=asked.form.tools or None, **asked.template))
    except TemplateError as error:
        raise bad(str(error), param="messages") from error


def _check_variables(asked: Asked, tokenizer: Tokenizer) -> None:
    """A wish that the model's template does not know must not be lost without a word."""
    for name in asked.template.keys() - tokenizer.template_variables - {"add_generation_prompt"}:
        field = "reasoning_effort" if name == "reasoning_effort" else f"chat_template_kwargs.{name[:40]}"
        param = field.partition(".")[0]
        raise bad(f"{field}: this model's chat template does not know it", param=param, code="unsupported_parameter")


def prompt_text(asked: Asked, prompt: tuple[int, ...], tokenizer: Tokenizer) -> str:
    """What `echo` repeats."""
    return asked.prompt if isinstance(asked.prompt, str) else tokenizer.decode(prompt, skip_special=False)


def output_limit(asked: Asked, prompt_tokens: int, max_model_len: int) -> int:
    """Most tokens of the output; raises ApiError 400 when prompt and output cannot fit."""
    room = max_model_len - prompt_tokens
    if room < 1:
        raise bad(
            f"this model's context is {max_model_len} tokens and the output needs one; the prompt has {prompt_tokens}",
            param=asked.prompt_field,
            code="context_length_exceeded",
        )
    if asked.max_tokens is None:
        return room
    if asked.max_tokens > room:
        raise bad(
            f"this model's context is {max_model_len} tokens; the prompt has {prompt_tokens}"
            f" and {asked.max_tokens_field} asks for {asked.max_tokens}",
            param=asked.max_tokens_field,
            code="context_length_exceeded",
        )
    return asked.max_tokens


def new_seed() -> int:
    return secrets.randbits(62)


def engine_request(
    asked: Asked, request_id: str, prompt: tuple[int, ...], *, seed: int, max_model_len: int, tokenizer: Tokenizer
) -> Request:
    """The whole request, with all of its choices, but for its constraint; raises ApiError 400."""
    limit = output_limit(asked, len(prompt), max_model_len)
    if asked.min_tokens > limit:
        raise bad(f"min_tokens: found {asked.min_tokens}, expected at most {limit}, max_tokens", param="min_tokens")
    strange = next((token for token, _ in asked.logit_bias if token >= tokenizer.vocab_bound), None)
    if strange is not None:
        raise bad(f"logit_bias: token id {strange} is not below {tokenizer.vocab_bound}", param="logit_bias")
    # A grammar ends with an end token, and nothing could follow one that is ignored.
    ignore_eos = asked.ignore_eos and asked.form.field is None
    sampling = Sampling(
        max_tokens=limit,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=seed,
        stop_token_ids=asked.stop_token_ids | (frozenset() if ignore_eos else tokenizer.eos_ids),
        ignore_eos=ignore_eos,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias=asked.logit_bias,
        min_tokens=asked.min_tokens,
        logprobs=asked.logprobs,
    )
    return Request(request_id, prompt, sampling, priority=asked.priority, cache_salt=asked.cache_salt, choices=asked.n)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to the answer. `offset`: characters of the output's text before this token."""

    text: str
    token_id: int
    finish: str | None
    stop_reason: str | int | None = None
    scores: Scores | None = None
    offset: int = 0


class TextStream:
    """Tokens of one choice → text, cut at the first stop string. Counts the tokens for usage."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(skip_special=asked.skip_special)
        self._matcher = StopMatcher(asked.stop, include=asked.include_stop)
        self._length = 0
        self.tokens = 0

    def push(self, token: Token) -> Piece:
        self.tokens += 1
        offset = self._length
        # The token that ended the text by being a stop token is no part of it unless that was asked for.
        dropped = token.finish == "stop" and not self._asked.include_stop
        text = "" if dropped else self._detokenizer.push(token.id)
        if token.finish:
            text += self._detokenizer.flush()
        self._length += len(text)
        safe = self._matcher.push(text, armed=self.tokens > self._asked.min_tokens)
        hit = self._matcher.hit
        if token.finish and hit is None:
            safe += self._matcher.flush()
        scores = None if token.logprobs is None else Scores.of(token.id, token.logprobs, self._tokenizer)
        finish = token.finish if hit is None else "stop"
        return Piece(safe, token.id, finish, hit or self._stop_token(token), scores, offset)

    def _stop_token(self, token: Token) -> int | None:
        """The stop token if the client named it; an end of the model's own is no reason, as in vLLM."""
        return token.id if token.finish == "stop" and token.id in self._asked.stop_token_ids else None
