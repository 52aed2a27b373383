"""Is the operator alive? Not "does its HTTP server answer" but "did it hear from the cluster, and does work finish"."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from glm52_operator.reconcile.clock import Clock
from glm52_operator.reconcile.kinds import Kind
from glm52_operator.reconcile.metrics import CONTENT_TYPE
from glm52_operator.reconcile.queue import WorkQueue
from glm52_operator.reconcile.store import Key

log = logging.getLogger("glm52.health")


@dataclass(slots=True)
class Health:
    clock: Clock
    queue: WorkQueue[Key]
    silence_limit: float
    """Seconds without an event or a finished resync after which the watches count as dead."""
    work_limit: float = 300.0
    """Seconds that one pass may take."""
    watch_limit: float = 90.0
    """Seconds that a watch may lag behind a list; longer than a quiet watch needs to notice that it is dead."""
    synced: bool = False
    _last: float | None = None
    _behind: dict[Kind, float] = field(default_factory=dict)
    """Kinds of which a list brought news, and since when their watch has not brought anything."""

    def progress(self) -> None:
        self._last = self.clock.now()

    def heard(self, kind: Kind) -> None:
        """A watch brought an event."""
        self.progress()
        self._behind.pop(kind, None)

    def listed_news(self, kind: Kind) -> None:
        """A list showed something that the watch has to bring, too."""
        self._behind.setdefault(kind, self.clock.now())

    def complaint(self) -> str | None:
        """What is wrong, or None."""
        now = self.clock.now()
        if self._last is None:
            self._last = now
        silent = now - self._last
        if silent > self.silence_limit:
            return f"no event and no finished resync for {silent:.0f} s (limit {self.silence_limit:.0f} s)"
        for kind, since in self._behind.items():
            if now - since > self.watch_limit:
                return (
                    f"the watch of {kind.plural} is dead: a list showed news {now - since:.0f} s ago, the watch did not"
                )
        working = self.queue.longest_active()
        if working > self.work_limit:
            return f"one pass has been running for {working:.0f} s (limit {self.work_limit:.0f} s)"
        return None


def application(health: Health, metrics: Callable[[], bytes]) -> web.Application:
    async def healthz(_: web.Request) -> web.Response:
        complaint = health.complaint()
        if complaint is not None:
            log.error("not healthy: %s", complaint)
            return web.Response(status=500, text=complaint + "\n")
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if health.synced:
            return web.Response(text="ok\n")
        return web.Response(status=503, text="the first list of the cluster's objects is not complete\n")

    async def shown(_: web.Request) -> web.Response:
        return web.Response(body=metrics(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", shown)])
    return app
