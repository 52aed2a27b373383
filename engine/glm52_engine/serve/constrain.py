"""From what a body says about the answer's form to the matcher that holds the engine to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from glm52_engine.runtime.types import Token
from glm52_engine.serve.errors import bad
from glm52_engine.serve.openai import Asked
from glm52_engine.structured import GrammarCompiler, GrammarError, Matcher
from glm52_engine.tokenizer import Thinking, Tokenizer, thinking_after


def thinking_of(asked: Asked, prompt: Sequence[int], tokenizer: Tokenizer) -> Thinking:
    """A completion has no turns: its text is text."""
    return thinking_after(prompt, tokenizer) if asked.endpoint == "chat" else Thinking.CLOSED


async def constraint_of(
    asked: Asked, prompt: Sequence[int], tokenizer: Tokenizer, grammars: GrammarCompiler
) -> Matcher | None:
    """At the start of the output; None where anything may come. Raises ApiError 400 that names the field."""
    field = asked.form.field
    if field is None:
        return None
    try:
        source = await asyncio.to_thread(asked.form.source, tokenizer.id_of)
        grammar = await grammars.compile(source)
    except GrammarError as error:
        raise bad(f"{field}: {error}", param=field) from error
    return grammar.matcher(reasons=thinking_of(asked, prompt, tokenizer) is Thinking.OPEN)


def continued(constraint: Matcher, first: Token) -> Matcher:
    """A matcher of its own that has taken in the token that prefill drew. Raises ApiError 400."""
    own = constraint.fork()
    try:
        if first.finish is None:
            own.accept(first.id)
    except GrammarError as error:
        raise bad(f"first_tokens: {first.id} does not fit: {error}", param="first_tokens") from error
    return own
