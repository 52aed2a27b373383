"""A clock that only moves when a test says so."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("glm52-operator", deadline=None)
settings.load_profile("glm52-operator")


class FakeTimer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    def __init__(self) -> None:
        self._now = 1000.0
        self._timers: list[tuple[float, int, FakeTimer, Callable[[], None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def call_later(self, delay: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer()
        heapq.heappush(self._timers, (self._now + delay, next(self._order), timer, callback))
        return timer

    def advance(self, seconds: float) -> None:
        """Run everything that falls due, each at its own time."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            self._now, _, timer, callback = heapq.heappop(self._timers)
            if not timer.cancelled:
                callback()
        self._now = end


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
