"""What clients do to a server all day: ask, stream, send nonsense, go away at every moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tests.engine.local.running import MODEL

LONGEST = 900
HEADS = 4
"""Prefixes that many prompts share."""

PROBES: tuple[tuple[list[int], int], ...] = (
    (list(b"x"), 24),
    (list(b"The decode pool keeps row "), 24),
    ([33 + n % 90 for n in range(64)], 16),
    ([33 + n % 90 for n in range(65)], 16),
    ([33 + n % 90 for n in range(64)] + list(b" and then another end"), 16),
    ([40 + n * 7 % 80 for n in range(700)], 24),
)
"""Prompts and lengths of greedy outputs that must never change: one token, one block, shared and long prefixes."""


@dataclass
class Tally:
    """What was done, and what should not have happened."""

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def bad_bodies() -> list[tuple[str, bytes | dict[str, Any], int]]:
    """Path, body, status."""
    fine = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
    return [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"[]", 400),
        ("/v1/completions", {**fine, "model": "other"}, 404),
        ("/v1/completions", {**fine, "max_tokens": -1}, 400),
        ("/v1/completions", {**fine, "max_tokens": 10**6}, 400),
        ("/v1/completions", {**fine, "prompt": [10**6]}, 400),
        ("/v1/completions", {**fine, "prompt": []}, 400),
        ("/v1/completions", {**fine, "temperature": "hot"}, 400),
        ("/v1/completions", {**fine, "prompt": [65] * 100_000}, 400),
        ("/v1/chat/completions", {"model": MODEL, "messages": []}, 400),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "nobody", "content": 1}]}, 400),
        ("/v1/nothing", fine, 404),
    ]


class Clients:
    """`workers` of them at once against one router, by one seed."""

    def __init__(self, url: str, session: aiohttp.ClientSession, seed: int) -> None:
        self.url = url
        self.session = session
        self.tally = Tally()
        self._random = random.Random(seed)
        self._heads = [[self._random.randrange(32, 127) for _ in range(LONGEST)] for _ in range(HEADS)]
        self._kinds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (6, self.whole),
            (6, self.stream),
            (2, self.chat),
            (3, self.leave_stream),
            (3, self.leave_early),
            (2, self.nonsense),
            (1, self.half_a_body),
        ]

    async def run(self, seconds: float, *, workers: int) -> None:
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        weights, kinds = zip(*self._kinds, strict=True)

        async def work() -> None:
            while loop.time() < ends:
                kind = self._random.choices(kinds, weights)[0]
                self.tally.done[kind.__name__] += 1
                try:
                    await kind()
                except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, OSError) as error:
                    self.wrong(f"{kind.__name__}: {type(error).__name__}: {error}")

        await asyncio.gather(*(work() for _ in range(workers)))

    def wrong(self, what: str) -> None:
        self.tally.wrong.append(what)

    async def probe(self) -> list[str]:
        """The outputs of the fixed prompts, asked one after the other."""
        texts = []
        for prompt, count in PROBES:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
            async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
                answer = await response.json()
                texts.append(str(answer["choices"][0]["text"]) if response.status == 200 else f"{answer}")
        return texts

    def body(self) -> dict[str, Any]:
        """A prompt with a shared start, a length from one token to hundreds, and an end of its own."""
        draw = self._random
        shared = draw.choice(self._heads)[: int(LONGEST ** draw.random())] if draw.random() < 0.7 else []
        own = [draw.randrange(32, 127) for _ in range(int(200 ** draw.random()))]
        options: dict[str, Any] = draw.choice(
            [{"temperature": 0}, {"temperature": 0.8, "seed": draw.randrange(99)}, {"top_p": 0.5}]
        )
        body = {"model": MODEL, "prompt": shared + own, "max_tokens": draw.choice([1, 2, 8, 24]), "ignore_eos": True}
        return {**body, **options, "priority": draw.choice([0, 0, 0, -1, 1])}

    async def whole(self) -> None:
        body = self.body()
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            answer = await response.json()
            self.check_usage(response.status, answer, body)

    def check_usage(self, status: int, answer: Any, body: dict[str, Any]) -> None:
        usage = answer.get("usage") if status == 200 else answer
        if status != 200 or (usage["prompt_tokens"], usage["completion_tokens"]) != (
            len(body["prompt"]),
            body["max_tokens"],
        ):
            self.wrong(f"{len(body['prompt'])} + {body['max_tokens']} tokens were answered with {status}: {usage}")

    async def stream(self) -> None:
        body = {**self.body(), "stream": True, "stream_options": {"include_usage": True}}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            lines = [line[6:].strip() async for line in response.content if line.startswith(b"data: ")]
        if lines[-1:] != [b"[DONE]"]:
            self.wrong(f"a stream ended with {lines[-1:]} (status {response.status})")
        else:
            self.check_usage(response.status, json.loads(lines[-2]), body)

    async def chat(self) -> None:
        messages = [{"role": "user", "content": self._random.choice(["Scale it.", "Drain — how?", "日本語 🙂"])}]
        body = {"model": MODEL, "messages": messages, "max_tokens": self._random.choice([1, 12])}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                self.wrong(f"chat was answered with {response.status}: {await response.text()}")

    async def leave_stream(self) -> None:
        """Reads a little of a long answer and hangs up, by FIN or by RST."""
        body = {**self.body(), "max_tokens": 400, "stream": True}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            for _ in range(self._random.randrange(4)):
                await response.content.readline()
            transport = response.connection.transport if response.connection is not None else None
            if transport is not None:
                self._random.choice([transport.close, transport.abort])()
            response.close()

    async def leave_early(self) -> None:
        """Gives up after a moment: in the queue, in prefill, in the hand-off or in decode."""
        call = asyncio.ensure_future(self.whole_long())
        await asyncio.wait({call}, timeout=self._random.random() ** 2 * 0.5)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call

    async def whole_long(self) -> None:
        body = {**self.body(), "max_tokens": 400}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            await response.read()

    async def nonsense(self) -> None:
        path, body, status = self._random.choice(bad_bodies())
        kind: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            kind = {"data": body, "headers": {"content-type": "application/json"}}
        async with self.session.post(self.url + path, **kind) as response:
            answer = await response.text()
            if response.status != status:
                self.wrong(f"{path} {str(body)[:80]}: expected {status}, found {response.status} {answer[:200]}")

    async def half_a_body(self) -> None:
        """A connection that ends in the middle of its request."""
        where = urlsplit(self.url)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
