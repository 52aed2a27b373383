"""Asks pods that are silent with calls in progress whether they live, and cuts the calls of those that are frozen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

import aiohttp

from glm52_engine.config import LIVEZ
from glm52_engine.route import pulse
from glm52_engine.route.pools import Pools
from glm52_engine.route.pulse import Pulse

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0


class PodFrozen(ConnectionError):
    """The pod keeps its connections and answers nothing: to a call it is as one that went away."""


class Leg:
    """One call in progress, and how it is cut: before its answer begins by a time that is over, then by its stream."""

    def __init__(self) -> None:
        self.limit = asyncio.timeout(None)
        self.response: aiohttp.ClientResponse | None = None
        self.cut_by: PodFrozen | None = None

    def cut(self, error: PodFrozen) -> None:
        if self.cut_by is not None:
            return
        self.cut_by = error
        if self.response is None:
            self.limit.reschedule(asyncio.get_running_loop().time())
        else:
            # Whoever reads is woken; who waits for a slow client finds it with the next read.
            self.response.content.set_exception(error)


class Frozen:
    """`on_cut` is told of a pod's address and how many of its calls were cut."""

    def __init__(
        self, session: aiohttp.ClientSession, pools: Pools, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._pools = pools
        self._clock = clock
        self._pulses: dict[str, Pulse] = {}
        self._legs: dict[str, set[Leg]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self.on_cut: Callable[[str, int], None] = lambda url, calls: None

    @contextlib.contextmanager
    def following(self, url: str) -> Iterator[Leg]:
        """For as long as a call is in progress at that pod."""
        leg = Leg()
        if url not in self._pulses:
            self._pulses[url] = Pulse.begin(self._clock())
        self._legs.setdefault(url, set()).add(leg)
        try:
            yield leg
        finally:
            self._legs[url].remove(leg)
            if not self._legs[url]:
                del self._legs[url], self._pulses[url]

    def heard(self, url: str) -> None:
        """Something came from the pod."""
        known = self._pulses.get(url)
        if known is not None:
            self._pulses[url] = known.answered(self._clock())

    async def watch(self) -> None:
        """Runs for ever."""
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                self._look(self._clock())
        finally:
            for task in self._asking.values():
                task.cancel()

    def _look(self, now: float) -> None:
        for url, known in list(self._pulses.items()):
            if known.is_frozen(now):
                self._cut(url, now - known.heard)
            elif known.is_due(now) and url not in self._asking:
                self._pulses[url] = known.ask(now)
                self._asking[url] = asyncio.create_task(self._ask(url))

    def _cut(self, url: str, seconds: float) -> None:
        legs = [leg for leg in self._legs[url] if leg.cut_by is None]
        if not legs:
            return
        extra = {"pod": url, "calls": len(legs), "seconds": seconds}
        log.error("a pod is frozen: it keeps its connections and answers nothing; its calls are cut", extra=extra)
        self._pools.suspect(url)
        self.on_cut(url, len(legs))
        for leg in legs:
            leg.cut(PodFrozen(f"{url} answered nothing for {seconds:.0f} s"))

    async def _ask(self, url: str) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=pulse.ANSWER_SECONDS)
            async with self._session.get(url + LIVEZ, timeout=timeout):
                # Whatever it says: how it is judged is its kubelet's business.
                self.heard(url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            known = self._pulses.get(url)
            if known is not None:
                self._pulses[url] = known.silent()
                self._pools.suspect(url)
                log.warning("a silent pod does not answer", extra={"pod": url, "reason": repr(error)})
        finally:
            del self._asking[url]
