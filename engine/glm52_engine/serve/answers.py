"""Answers in OpenAI's shape: whole, or chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from glm52_engine.serve.deltas import ChatText
from glm52_engine.serve.logprobs import chat_logprobs, completion_logprobs
from glm52_engine.serve.openai import Asked
from glm52_engine.serve.text import Piece


def public_id(request_id: str) -> str:
    """The router numbers its attempts behind a dot; the client sees one id for all of them."""
    return request_id.partition(".")[0]


class Choice:
    """One choice of an answer. `echo` is what a completion repeats in front of its own text."""

    def __init__(self, asked: Asked, index: int, echo: str = "") -> None:
        self._asked = asked
        self._index = index
        self._echo = echo
        self._chat = ChatText() if asked.endpoint == "chat" else None
        self._began = False

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        last = pieces[-1]
        text, finish = "".join(piece.text for piece in pieces), last.finish
        if self._chat is None:
            said: dict[str, Any] = {"text": self._echo + text}
        else:
            self._chat.push(text)
            _, finish = self._chat.end(finish or "")
            said = {"message": {"role": "assistant", **self._chat.message()}}
        return {**self._head(finish, pieces), "stop_reason": last.stop_reason, **said}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        finish = piece.finish
        if self._chat is None:
            said: dict[str, Any] = {"text": piece.text if self._began else self._echo + piece.text}
        else:
            delta = self._chat.push(piece.text)
            if finish:
                rest, finish = self._chat.end(finish)
                delta |= rest
            # The first delta has a role, and content even when that is empty: clients read it without looking.
            said = {"delta": delta if self._began else {"role": "assistant", "content": "", **delta}}
        self._began = True
        chunk = {**self._head(finish, [piece]), **said}
        return {**chunk, "stop_reason": piece.stop_reason} if finish else chunk

    def worth_sending(self, piece: Piece) -> bool:
        asked = self._asked
        return bool(piece.text or piece.finish or piece.scores or asked.return_token_ids or not self._began)

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


class Shape:
    """What the objects of one answer share: id, model, time and usage."""

    def __init__(self, asked: Asked, request_id: str, *, prompt_tokens: int, cached_tokens: int) -> None:
        self._asked = asked
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = cached_tokens
        self._head = {"id": public_id(request_id), "created": int(time.time()), "model": asked.model}

    def whole(self, choices: list[dict[str, Any]], completion_tokens: int) -> dict[str, Any]:
        kind = "chat.completion" if self._asked.endpoint == "chat" else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(completion_tokens)}

    def chunk(self, choice: dict[str, Any], completion_tokens: int) -> dict[str, Any]:
        usage = self._usage(completion_tokens) if self._asked.usage_in_chunks else None
        return self._chunk([choice], usage)

    def last(self, completion_tokens: int) -> dict[str, Any]:
        """The chunk with the totals, which has no choices."""
        return self._chunk([], self._usage(completion_tokens))

    def _usage(self, completion_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._asked.endpoint == "chat" else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        return {**chunk, "usage": usage} if self._asked.include_usage else chunk
