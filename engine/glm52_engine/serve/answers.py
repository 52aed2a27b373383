"""Answers in OpenAI's shape: whole, or chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm52_engine.serve.deltas import ChatText
from glm52_engine.serve.logprobs import chat_logprobs, completion_logprobs
from glm52_engine.serve.openai import Asked
from glm52_engine.serve.text import Piece
from glm52_engine.tokenizer import Thinking


def public_id(request_id: str) -> str:
    """The router numbers its attempts behind a dot; the client sees one id for all of them."""
    return request_id.partition(".")[0]


class Choice:
    """One choice of an answer. `echo` is what a completion repeats in front of its own text."""

    def __init__(self, asked: Asked, index: int, thinking: Thinking, echo: str = "") -> None:
        self._asked = asked
        self._index = index
        self._echo = echo
        self._chat = ChatText(thinking, asked.form.schemas) if asked.endpoint == "chat" else None
        self._began = False
        self._pieces: list[Piece] = []
        self._finish: str | None = None

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._chat is None else self._chat.reasoning_tokens

    def keep(self, piece: Piece) -> None:
        """For an answer that is sent as a whole."""
        self._pieces.append(piece)
        self._finish = piece.finish
        if self._chat is not None:
            _, self._finish = self._chat.push(piece.text, piece.finish)

    def whole(self) -> dict[str, Any]:
        if self._chat is None:
            said: dict[str, Any] = {"text": self._echo + "".join(piece.text for piece in self._pieces)}
        else:
            said = {"message": {"role": "assistant", **self._chat.message()}}
        head = self._head(self._finish, self._pieces)
        return {**head, "stop_reason": self._pieces[-1].stop_reason, **said}

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """None where there is nothing to tell yet."""
        finish, fields = piece.finish, {"text": piece.text} if piece.text else {}
        if self._chat is not None:
            fields, finish = self._chat.push(piece.text, piece.finish)
        if not (fields or finish or piece.scores or self._asked.return_token_ids or not self._began):
            return None
        if self._chat is None:
            said: dict[str, Any] = {"text": piece.text if self._began else self._echo + piece.text}
        else:
            # The first delta has a role, and content even when that is empty: clients read it without looking.
            said = {"delta": fields if self._began else {"role": "assistant", "content": "", **fields}}
        self._began = True
        chunk = {**self._head(finish, [piece]), **said}
        return {**chunk, "stop_reason": piece.stop_reason} if finish else chunk

    def _head(self, finish: str | None, pieces: Sequence[Piece]) -> dict[str, Any]:
        head = {"index": self._index, "finish_reason": finish, "logprobs": self._logprobs(pieces)}
        return {**head, "token_ids": [piece.token_id for piece in pieces]} if self._asked.return_token_ids else head

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self._asked.logprobs is None:
            return None
        scored = [(piece.scores, piece.offset) for piece in pieces if piece.scores is not None]
        scores = [each for each, _ in scored]
        if self._chat is not None:
            return chat_logprobs(scores)
        return completion_logprobs(scores, [offset for _, offset in scored])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of all choices so far."""

    all: int
    reasoning: int


class Shape:
    """What the objects of one answer share: id, model, time and usage."""

    def __init__(self, asked: Asked, request_id: str, *, prompt_tokens: int, cached_tokens: int) -> None:
        self._asked = asked
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = cached_tokens
        self._head = {"id": public_id(request_id), "created": int(time.time()), "model": asked.model}

    def whole(self, choices: list[dict[str, Any]], tokens: Tokens) -> dict[str, Any]:
        kind = "chat.completion" if self._asked.endpoint == "chat" else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(tokens)}

    def chunk(self, choice: dict[str, Any], tokens: Tokens) -> dict[str, Any]:
        return self._chunk([choice], self._usage(tokens) if self._asked.usage_in_chunks else None)

    def last(self, tokens: Tokens) -> dict[str, Any]:
        """The chunk with the totals, which has no choices."""
        return self._chunk([], self._usage(tokens))

    def _usage(self, tokens: Tokens) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens.all,
            "total_tokens": self._prompt_tokens + tokens.all,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": tokens.reasoning},
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._asked.endpoint == "chat" else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        return {**chunk, "usage": usage} if self._asked.include_usage else chunk
