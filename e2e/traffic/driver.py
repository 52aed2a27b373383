"""The driver: a fixed number of clients, each sending one streamed request after the other, every answer recorded.

Prompts repeat from a small fixed set with greedy decoding, so an answer that differs from an earlier one to the same
prompt is a failure too: wrong tokens are worse than an error.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

PROMPTS = tuple(f"Question {n}: " + "how does the decode pool keep its rows? " * (1 + n % 5) for n in range(12))


@dataclass(slots=True)
class Answer:
    """One request's outcome; times are monotonic seconds."""

    prompt: str
    began: float
    ended: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    error: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


async def stream_completion(
    session: aiohttp.ClientSession, url: str, prompt: str | list[int], *, max_tokens: int, model: str = "glm-5.2"
) -> Answer:
    """POST /v1/completions, greedy and streamed; a stream that ends without [DONE] is an error."""
    answer = Answer(str(prompt)[:60], time.monotonic())
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
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            else:
                await _read_stream(response, answer)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.monotonic()
    return answer


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    done = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            answer.error = f"error in the stream: {event['error']}"
        for choice in event.get("choices", []):
            answer.text += choice.get("text") or ""
            answer.token_ids += choice.get("token_ids") or []
        answer.usage = event.get("usage") or answer.usage
    if not done and not answer.error:
        answer.error = "the stream ended without [DONE]"


class Traffic:
    """`with Traffic(url) as traffic: …` runs load in a thread of its own until the block ends."""

    def __init__(self, url: str, *, clients: int = 3, max_tokens: int = 24) -> None:
        self.url = url
        self.clients = clients
        self.max_tokens = max_tokens
        self.answers: list[Answer] = []
        self.marks: list[tuple[float, str]] = []
        self._first: dict[str, list[int]] = {}
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic", daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=120)

    def mark(self, name: str) -> None:
        self.marks.append((time.monotonic(), name))

    def wait_for_more(self, count: int, timeout: float = 120) -> None:
        """Until `count` more requests have ended."""
        with self._changed:
            goal = len(self.answers) + count
            if not self._changed.wait_for(lambda: len(self.answers) >= goal, timeout):
                raise AssertionError(f"only {len(self.answers)} of {goal} requests ended within {timeout:.0f} s")

    def failures(self) -> list[str]:
        """Every failed request with the mark it ran under."""
        return [f"{self._window(a.began)}: {a.prompt!r}: {a.error}" for a in self.answers if a.error]

    def _window(self, when: float) -> str:
        return next((name for began, name in reversed(self.marks) if began <= when), "start")

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=120, sock_connect=10)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._client(session, n) for n in range(self.clients)))

    async def _client(self, session: aiohttp.ClientSession, n: int) -> None:
        turn = n
        while not self._stop.is_set():
            prompt = PROMPTS[turn % len(PROMPTS)]
            turn += 1
            answer = await stream_completion(session, self.url, prompt, max_tokens=self.max_tokens)
            if not answer.error:
                self._compare(prompt, answer)
            with self._changed:
                self.answers.append(answer)
                self._changed.notify_all()

    def _compare(self, prompt: str, answer: Answer) -> None:
        first = self._first.setdefault(prompt, answer.token_ids)
        if len(answer.token_ids) != self.max_tokens:
            answer.error = f"{len(answer.token_ids)} tokens instead of {self.max_tokens}"
        elif answer.token_ids != first:
            answer.error = f"other tokens than the first time: {answer.token_ids} instead of {first}"
