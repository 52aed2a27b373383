"""A prompt that cannot fit is refused after a look at its beginning: to tokenise all of 30 MB takes minutes."""

from __future__ import annotations

from collections.abc import Iterator

from glm52_engine.serve.errors import bad
from glm52_engine.serve.openai import Asked
from glm52_engine.tokenizer import Tokenizer

CHARACTERS_PER_TOKEN = 4
"""About what a token of common text has; where it has more, the prompt is tokenised whole and counted then."""

SLACK = 64
"""A text that is cut off in the middle of a word may have a few tokens more than the whole one."""


def refuse_hopeless(asked: Asked, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Raises ApiError 400 if the first characters of the client's texts alone are more tokens than the context has.

    What the chat template adds only makes the prompt longer.
    """
    left = max_model_len * CHARACTERS_PER_TOKEN
    if sum(map(len, _texts(asked))) <= left:
        return
    tokens = 0
    for text in _texts(asked):
        tokens += len(tokenizer.encode(text[:left]))
        left -= len(text)
        if tokens > max_model_len + SLACK:
            raise bad(
                f"this model's context is {max_model_len} tokens; the prompt has far more",
                param="messages" if asked.endpoint == "chat" else "prompt",
                code="context_length_exceeded",
            )
        if left <= 0:
            return


def _texts(asked: Asked) -> Iterator[str]:
    if isinstance(asked.prompt, str):
        yield asked.prompt
    yield from (text for message in asked.messages if isinstance(text := message.get("content"), str))
