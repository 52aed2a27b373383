"""The router's picture of its pods: who is ready, how much each is doing, who failed a moment ago."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import get_args

from glm52_engine.config import Role
from glm52_engine.route.choose import Candidate, choose

log = logging.getLogger(__name__)

SUSPECT_SECONDS = 3.0


class Pools:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready: dict[Role, frozenset[str]] = {role: frozenset() for role in get_args(Role)}
        self._in_flight: Counter[str] = Counter()
        self._suspect_until: dict[str, float] = {}
        # By role: of a turn that both share, a request takes two, and one of two equal pods would get all requests.
        # Likewise of one for early picks, of which some are picked once more.
        self._turns: Counter[tuple[Role, bool]] = Counter()
        self._changed = asyncio.Event()

    def update(self, role: Role, urls: frozenset[str]) -> None:
        before = self._ready[role]
        if urls == before:
            return
        self._ready[role] = urls
        for url in urls - before:
            # A pod that became ready anew is a new one, also at an old address.
            self._suspect_until.pop(url, None)
        came, went = sorted(urls - before), sorted(before - urls)
        log.info("pods", extra={"role": role, "ready": len(urls), "came": ",".join(came), "went": ",".join(went)})
        self._changed.set()

    def ready(self, role: Role) -> frozenset[str]:
        return self._ready[role]

    @property
    def complete(self) -> bool:
        return all(self._ready.values())

    def in_flight(self, url: str) -> int:
        return self._in_flight[url]

    def suspect(self, url: str) -> None:
        self._suspect_until[url] = self._clock() + SUSPECT_SECONDS

    def pick(self, role: Role, tried: Collection[str] = (), *, early: bool = False) -> str | None:
        """`early`: long before it is called, and perhaps in vain."""
        now = self._clock()
        self._turns[role, early] += 1
        candidates = [
            Candidate(url, self._in_flight[url], self._suspect_until.get(url, 0.0) > now) for url in self._ready[role]
        ]
        chosen = choose(candidates, tried=tried, turn=self._turns[role, early])
        return chosen.url if chosen else None

    async def wait_pick(self, role: Role, tried: Collection[str], seconds: float) -> str | None:
        """A pod, or None when none became ready within `seconds`."""
        until = self._clock() + seconds
        while (url := self.pick(role, tried)) is None:
            left = until - self._clock()
            if left <= 0:
                return None
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        return url

    @contextlib.contextmanager
    def busy(self, url: str) -> Iterator[None]:
        self._in_flight[url] += 1
        try:
            yield
        finally:
            self._in_flight[url] -= 1
            if self._in_flight[url] <= 0:
                del self._in_flight[url]
