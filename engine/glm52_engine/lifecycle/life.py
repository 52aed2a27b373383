"""The one mutable holder of a process's State: counts requests, begins the drain, wakes who waits for its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from glm52_engine.lifecycle.states import Stage, State

log = logging.getLogger(__name__)


class Refused(Exception):
    """The process takes no requests now; the message says why.

    `returns`: it had been taken, and if no other process takes it, this one will.
    """

    def __init__(self, why: str, *, returns: bool = False) -> None:
        super().__init__(why)
        self.returns = returns


class Life:
    """`held` counts what else must end before a drain is done: a prefill pod's KV that decode peers still need."""

    def __init__(
        self,
        *,
        window: float,
        propagation: float,
        held: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = State()
        self.requests = 0
        self.window = window
        self.propagation = propagation
        self.held = held
        self.clock = clock
        self.drain_began = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return self.requests + self.held()

    def enter(self, phase: str, *, held: bool = False) -> None:
        self.state = self.state.enter(phase, held=held)
        log.info("starting", extra={"phase": phase})

    def ready(self) -> None:
        self.state = self.state.ready()
        self.poke()

    def drain(self, why: str) -> None:
        before = self.state
        self.state = before.drain(self.clock(), window=self.window, propagation=self.propagation)
        if self.state is before:
            log.info("a drain is under way already", extra={"asked_by": why})
        else:
            log.info("drain begins", extra={"asked_by": why, "in_flight": self.in_flight, "window": self.window})
        self.drain_began.set()
        self.poke()

    def stop(self) -> None:
        self.state = self.state.stop()
        self.poke()

    def poke(self) -> None:
        """Something that a drain waits for may have ended."""
        self._changed.set()

    @contextlib.contextmanager
    def serving(self, *, stay: bool = False) -> Iterator[None]:
        """Around one request; raises Refused when none is admitted. `stay`: see `State.admits`."""
        why = self.state.why_not(self.clock(), stay=stay)
        if why:
            raise Refused(why)
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1
            self.poke()

    async def until_drained(self, limit: float | None = None) -> bool:
        """True: nothing is left in flight. False: the window (or `limit` seconds) is over first."""
        until = None if limit is None else self.clock() + limit
        while True:
            now, state = self.clock(), self.state
            if state.stage is Stage.STOPPED or state.drained(now, self.in_flight):
                return True
            if state.overdue(now) or (until is not None and now >= until):
                return False
            times = [t for t in (state.refuse_at, state.deadline, until) if t is not None and t > now]
            await self._wait(min(times) - now if times else None)

    async def drain_call(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /internal/v1/drain: begins the drain (once) and waits for its end, at most body's `wait_seconds`."""
        wait = body.get("wait_seconds", 0)
        self.drain("the drain endpoint")
        limit = float(wait) if isinstance(wait, int | float) and not isinstance(wait, bool) else 0.0
        drained = await self.until_drained(limit=max(0.0, limit))
        return {
            "draining": True,
            "drained": drained,
            "overdue": self.state.overdue(self.clock()),
            "in_flight": self.in_flight,
            "seconds_left": round(max(0.0, self.state.deadline - self.clock()), 1),
        }

    async def until_idle(self, limit: float) -> bool:
        """Until no request runs, at most `limit` seconds."""
        until = self.clock() + limit
        while self.requests and self.clock() < until:
            await self._wait(until - self.clock())
        return self.requests == 0

    async def _wait(self, seconds: float | None) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            # `held` may shrink by time alone (leases), so look again at least once a second.
            await asyncio.wait_for(self._changed.wait(), min(seconds, 1.0) if seconds is not None else 1.0)
