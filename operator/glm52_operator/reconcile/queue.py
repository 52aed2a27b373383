"""A work queue keyed by deployment: each key once, one worker per key at a time, failures slower and slower.

Events only say *that* something changed; what to do is decided from the newest state when the key's turn comes. So an
event that arrives while its key is being worked on makes it run once more, and a hundred make it run once more, too.

What somebody has just edited does not wait behind thousands that only have to be looked at, as after a start.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from glm52_operator.reconcile.clock import Clock, Timer

K = TypeVar("K", bound=Hashable)

IN_A_ROW = 7
"""Urgent keys that go before the one that has waited longest among the others: these wait, and never for ever."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay after the n-th failure in a row: base × 2ⁿ⁻¹, at most cap; seconds."""

    base: float = 1.0
    cap: float = 60.0

    def delay(self, failures: int) -> float:
        return float(min(self.cap, self.base * 2 ** min(failures - 1, 32)))


class WorkQueue(Generic[K]):
    def __init__(self, clock: Clock, backoff: Backoff | None = None) -> None:
        self._clock = clock
        self._backoff = backoff or Backoff()
        self._ready: deque[K] = deque()
        self._urgent: deque[K] = deque()
        self._in_a_row = 0
        self._queued: dict[K, float] = {}
        self._active: dict[K, float] = {}
        self._again: set[K] = set()
        self._fresh: set[K] = set()
        self._timers: dict[K, Timer] = {}
        self._failures: dict[K, int] = {}
        self._wakeup = asyncio.Event()
        self._closed = False

    def add(self, key: K, *, fresh: bool = False) -> None:
        """Have the key worked on now; one that failed waits for its turn, unless `fresh` says the cause is gone.

        A fresh one is urgent, too.
        """
        if fresh:
            self._failures.pop(key, None)
        if key in self._active:
            self._again.add(key)
            if fresh:
                self._fresh.add(key)
        elif key not in self._failures:
            self._cancel_timer(key)
            self._push(key, urgent=fresh)

    async def get(self) -> K | None:
        """The next key, which then belongs to the caller until `done` or `failed`; None once the queue is closed."""
        while not self._closed:
            if self._queued:
                key = self._next()
                del self._queued[key]
                self._active[key] = self._clock.now()
                return key
            self._wakeup.clear()
            await self._wakeup.wait()
        return None

    def done(self, key: K, *, requeue_after: float | None = None) -> None:
        """The key's work is finished; failures before are forgotten."""
        self._failures.pop(key, None)
        self._release(key, requeue_after)

    def failed(self, key: K) -> float:
        """The key's work did not succeed; returns the seconds until the next attempt."""
        if key in self._fresh:
            # What failed was an older specification.
            self._release(key, None)
            return 0.0
        count = self._failures.get(key, 0) + 1
        self._failures[key] = count
        delay = self._backoff.delay(count)
        # Whatever arrived meanwhile was caused by the failing work or waits as it does: it must not shorten the delay.
        self._again.discard(key)
        self._release(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """The object is gone: no timer and no failure of it shall outlive it."""
        self._failures.pop(key, None)
        self._cancel_timer(key)

    def failures(self, key: K) -> int:
        return self._failures.get(key, 0)

    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._queued)

    def waiting(self) -> list[K]:
        """Them, each kind in its order, the urgent ones first."""
        return [*self._urgent, *self._ready]

    def oldest_waiting(self) -> float:
        """Seconds that the first of them has waited; 0 when none does."""
        return self._clock.now() - min(self._queued.values()) if self._queued else 0.0

    def longest_active(self) -> float:
        """Seconds that the oldest running work has taken; 0 when idle."""
        now = self._clock.now()
        return max((now - since for since in self._active.values()), default=0.0)

    def close(self) -> None:
        """No key is handed out any more; work that runs may finish."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._wakeup.set()

    def _next(self) -> K:
        urgent = bool(self._urgent) and (not self._ready or self._in_a_row < IN_A_ROW)
        self._in_a_row = self._in_a_row + 1 if urgent else 0
        return (self._urgent if urgent else self._ready).popleft()

    def _push(self, key: K, *, urgent: bool) -> None:
        if key not in self._queued:
            self._queued[key] = self._clock.now()
        elif urgent and key not in self._urgent:
            self._ready.remove(key)
        else:
            return
        (self._urgent if urgent else self._ready).append(key)
        self._wakeup.set()

    def _release(self, key: K, delay: float | None) -> None:
        del self._active[key]
        urgent = key in self._fresh
        self._fresh.discard(key)
        if key in self._again:
            self._again.discard(key)
            self._push(key, urgent=urgent)
        elif delay is not None and not self._closed:
            self._cancel_timer(key)
            self._timers[key] = self._clock.call_later(delay, lambda: self._due(key))

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        if key in self._active:
            self._again.add(key)
        else:
            self._push(key, urgent=False)

    def _cancel_timer(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
