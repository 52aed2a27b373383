"""The driver: a constant load of streamed requests in a thread of its own, every answer recorded.

Prompts repeat from a small fixed set with greedy decoding, so an answer that differs from an earlier one to the same
prompt is a failure too: wrong tokens are worse than an error. So do the tokens of an answer that was cut off.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import uuid
from types import TracebackType

import aiohttp

from e2e.traffic.request import Answer, Failure, stream_completion
from e2e.traffic.windows import Window, windows

PROMPTS = tuple(f"Question {n}: " + "how does the decode pool keep its rows? " * (1 + n % 5) for n in range(12))

ANSWER_SECONDS = 240.0
"""A request that takes longer has failed; one whose pod hangs waits until the kubelet has killed it."""


class Traffic:
    """`with Traffic(url) as traffic: …` runs load until the block ends.

    `clients` send one request after the other; with `rate` they begin that many a second in all, at most.
    """

    def __init__(self, url: str, *, clients: int = 3, max_tokens: int = 24, rate: float | None = None) -> None:
        self.url = url
        self.clients = clients
        self.max_tokens = max_tokens
        self.answers: list[Answer] = []
        self.marks: list[tuple[float, str]] = []
        self._pause = clients / rate if rate else 0.0
        self._run_id = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()
        self._right: dict[str, list[int]] = {}
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic", daemon=True)

    def __enter__(self) -> Traffic:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """No request begins any more; returns when those that run have ended."""
        self._stop.set()
        self._thread.join(timeout=ANSWER_SECONDS)

    def mark(self, name: str) -> None:
        """A new window begins."""
        self.marks.append((time.monotonic(), name))

    def wait_for_more(self, count: int, timeout: float = 120) -> None:
        """Until `count` more requests have ended."""
        with self._changed:
            goal = len(self.answers) + count
        self.wait_for_all(goal, timeout)

    def wait_for_all(self, goal: int, timeout: float = 120) -> None:
        """Until `goal` requests have ended since the start."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.answers) >= goal, timeout):
                raise AssertionError(f"only {len(self.answers)} of {goal} requests ended within {timeout:.0f} s")

    def windows(self) -> list[Window]:
        with self._changed:
            answers = list(self.answers)
        return windows(self.marks, answers, began=self._began, now=time.monotonic())

    def failures(self) -> list[str]:
        """Every failed request with the mark it ran under."""
        return [f"{w.name}: {a.id} {a.prompt!r}: {a.error}" for w in self.windows() for a in w.failed]

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=10)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._client(session, n) for n in range(self.clients)))

    async def _client(self, session: aiohttp.ClientSession, n: int) -> None:
        # Apart from each other from the start, or they would come in bursts.
        due = time.monotonic() + n * self._pause / self.clients
        for turn in itertools.count(n):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if self._stop.is_set():
                return
            # A slow time is not made up for: the load after it would be another one.
            due = max(due, time.monotonic()) + self._pause
            prompt = PROMPTS[turn % len(PROMPTS)]
            request_id = f"{self._run_id}-{next(self._numbers)}"
            answer = await stream_completion(
                session, self.url, prompt, max_tokens=self.max_tokens, request_id=request_id
            )
            self._compare(prompt, answer)
            with self._changed:
                self.answers.append(answer)
                self._changed.notify_all()

    def _compare(self, prompt: str, answer: Answer) -> None:
        found = answer.token_ids
        if answer.failure is None and len(found) != self.max_tokens:
            answer.fail(Failure.WRONG, f"{len(found)} tokens instead of {self.max_tokens}")
        elif answer.failure is None:
            self._right.setdefault(prompt, found)
        right = self._right.get(prompt)
        if right is not None and found != right[: len(found)]:
            answer.fail(Failure.WRONG, f"other tokens than the first time: {found} instead of {right}")
