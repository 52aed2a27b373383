"""vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from glm52_engine.serve.errors import bad
from glm52_engine.serve.fields import Fields
from glm52_engine.serve.logprobs import token_text
from glm52_engine.serve.openai import check_model, read_request
from glm52_engine.serve.text import prompt_ids
from glm52_engine.tokenizer import Tokenizer


def tokenize(body: Mapping[str, Any], tokenizer: Tokenizer, *, model: str, max_model_len: int) -> dict[str, Any]:
    """Ids of a text, or of the prompt that a conversation becomes. CPU-heavy for long ones. Raises ApiError."""
    fields = _with_model(body, model)
    with_strings = fields.flag("return_token_strs")
    if body.get("messages") is None:
        prompt = fields.text("prompt")
        if prompt is None:
            raise bad("prompt: missing, expected a string, or messages", param="prompt")
        ids = tokenizer.encode(prompt)
    else:
        ids = _chat_ids(body, tokenizer, model)
    return {
        "count": len(ids),
        "max_model_len": max_model_len,
        "tokens": ids,
        "token_strs": [_string(token, tokenizer) for token in ids] if with_strings else None,
    }


def detokenize(body: Mapping[str, Any], tokenizer: Tokenizer, *, model: str, max_model_len: int) -> dict[str, Any]:
    """The text of token ids, special ones included. Raises ApiError."""
    fields = _with_model(body, model)
    if body.get("tokens") is None:
        raise bad("tokens: missing, expected an array of token ids", param="tokens")
    ids = fields.integers("tokens", high=tokenizer.vocab_bound - 1)
    try:
        return {"prompt": tokenizer.decode(ids, skip_special=False)}
    except ValueError as error:
        raise bad(f"tokens: {error}", param="tokens") from error


def _with_model(body: Mapping[str, Any], model: str) -> Fields:
    """The model may be left out here."""
    fields = Fields({"model": model, **{name: value for name, value in body.items() if value is not None}})
    check_model(fields, model)
    return fields


def _chat_ids(body: Mapping[str, Any], tokenizer: Tokenizer, model: str) -> list[int]:
    """By the same way as a chat request, so that the count is the one that its usage will show."""
    fields = Fields(body)
    generation = fields.flag("add_generation_prompt", True)
    rest = {name: fields.take(name) for name in fields.rest()}
    asked = read_request("chat", {**rest, "model": model}, model)
    template = {**asked.template, "add_generation_prompt": generation}
    return list(prompt_ids(replace(asked, template=template), tokenizer))


def _string(token: int, tokenizer: Tokenizer) -> str:
    return token_text(tokenizer.token_bytes(token, skip_special=False))
