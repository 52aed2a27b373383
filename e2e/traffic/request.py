"""One streamed request, and what became of it."""

from __future__ import annotations

import enum
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp


class Failure(enum.StrEnum):
    """How a request failed."""

    REFUSED = "refused"
    """An answer that is no 200, with an error in OpenAI's shape."""
    CUT = "cut"
    """An error in OpenAI's shape in the middle of the stream."""
    BROKEN = "broken"
    """The connection was refused, or broke, or the stream ended without [DONE]."""
    WRONG = "wrong"
    """Other tokens than they should be, or an error that no client of OpenAI understands: never to be excused."""


@dataclass(slots=True)
class Answer:
    """One request's outcome; times are monotonic seconds, `id` is what x-request-id said."""

    prompt: str
    began: float
    id: str = ""
    ended: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    failure: Failure | None = None
    error: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    def fail(self, failure: Failure, error: str) -> None:
        """The first failure is the one that is told, but that nothing excuses a wrong one."""
        if self.failure is None or failure is Failure.WRONG:
            self.failure, self.error = failure, error


async def stream_completion(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str | list[int],
    *,
    max_tokens: int,
    model: str = "glm-5.2",
    request_id: str = "",
) -> Answer:
    """POST /v1/completions, greedy and streamed; a stream that ends without [DONE] is an error."""
    answer = Answer(str(prompt)[:60], time.monotonic(), request_id)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"x-request-id": request_id} if request_id else {}
    try:
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                text = await response.text()
                kind = Failure.REFUSED if is_openai_error(text) else Failure.WRONG
                answer.fail(kind, f"HTTP {response.status}: {text[:300]}")
            else:
                await _read_stream(response, answer)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer.fail(Failure.BROKEN, f"{type(error).__name__}: {error}")
    answer.ended = time.monotonic()
    return answer


def is_openai_error(text: str) -> bool:
    """Whether a body, or an event, is an error that OpenAI's clients understand."""
    try:
        error = json.loads(text)["error"]
        return {"message", "type", "param", "code"} == set(error) and bool(error["message"])
    except (ValueError, KeyError, TypeError):
        return False


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    done = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            done = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            # An event that was cut in the middle; what follows says why.
            answer.fail(Failure.BROKEN, f"half an event: {data[:100]!r}")
            continue
        if "error" in event:
            kind = Failure.CUT if is_openai_error(data.decode()) else Failure.WRONG
            answer.fail(kind, f"error in the stream: {event['error']}")
        for choice in event.get("choices", []):
            answer.token_ids += choice.get("token_ids") or []
        answer.usage = event.get("usage") or answer.usage
    if not done:
        answer.fail(Failure.BROKEN, "the stream ended without [DONE]")
