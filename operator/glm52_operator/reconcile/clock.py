"""Time as something that is handed in, so that tests need not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a clock that never jumps."""
        ...

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer: ...


async def sleep(clock: Clock, seconds: float) -> None:
    """Until so much time has passed on that clock."""
    over = asyncio.Event()
    timer = clock.call_later(seconds, over.set)
    try:
        await over.wait()
    finally:
        timer.cancel()


class LoopClock:
    """The running event loop's own clock."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(delay, callback)
