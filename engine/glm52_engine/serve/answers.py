"""Answers in OpenAI's shape: whole, or chunk by chunk."""

from __future__ import annotations

import time
from typing import Any

from glm52_engine.serve.openai import Asked
from glm52_engine.serve.text import Piece


def public_id(request_id: str) -> str:
    """The router numbers its attempts behind a dot; the client sees one id for all of them."""
    return request_id.partition(".")[0]


class Shape:
    """Builds every object of one answer: they share id, model and time."""

    def __init__(self, asked: Asked, request_id: str, prompt_tokens: int) -> None:
        self._asked = asked
        self._chat = asked.endpoint == "chat"
        self._prompt_tokens = prompt_tokens
        self._head = {"id": public_id(request_id), "created": int(time.time()), "model": asked.model}
        self._said_role = False

    def usage(self, completion_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
        }

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        choice: dict[str, Any] = {"index": 0, "finish_reason": pieces[-1].finish, "logprobs": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        if self._asked.return_token_ids:
            choice["token_ids"] = [piece.token_id for piece in pieces]
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": self.usage(len(pieces))}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": piece.finish, "logprobs": None}
        if self._chat:
            choice["delta"] = self._delta(piece)
        else:
            choice["text"] = piece.text
        if self._asked.return_token_ids:
            choice["token_ids"] = [piece.token_id]
        return self._chunk([choice], None)

    def last(self, completion_tokens: int) -> dict[str, Any]:
        """The chunk with the totals, which has no choices."""
        return self._chunk([], self.usage(completion_tokens))

    def worth_sending(self, piece: Piece) -> bool:
        return bool(piece.text or piece.finish or self._asked.return_token_ids or not self._said_role)

    def _delta(self, piece: Piece) -> dict[str, str]:
        delta = {} if self._said_role else {"role": "assistant"}
        # The first delta has content even when it is empty: clients read it without looking.
        if piece.text or not self._said_role:
            delta["content"] = piece.text
        self._said_role = True
        return delta

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> dict[str, Any]:
        self._said_role = True
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        return {**chunk, "usage": usage} if self._asked.include_usage else chunk
