"""Is the operator alive? Not "does its HTTP server answer" but "do its watches bring news, and does work finish".

At rest nothing may be asked and nothing comes, so silence says nothing. What the operator itself wrote has to come
back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from glm52_operator.desired.target import Object
from glm52_operator.reconcile.clock import Clock
from glm52_operator.reconcile.kinds import Kind
from glm52_operator.reconcile.metrics import CONTENT_TYPE
from glm52_operator.reconcile.queue import WorkQueue
from glm52_operator.reconcile.store import Key, version_of

log = logging.getLogger("glm52.health")

Stream = tuple[Kind, str]
"""A watch: of a kind, in one namespace or (empty) in all."""


@dataclass(slots=True)
class Health:
    clock: Clock
    queue: WorkQueue[Key]
    work_limit: float = 300.0
    """Seconds that one pass may take."""
    watch_limit: float = 90.0
    """Seconds after which a watch must have brought what the operator wrote; a watch that is cut is renewed before."""
    synced: bool = False
    scoped: bool = False
    """Whether every namespace has its own watch."""
    _heard: dict[Stream, int] = field(default_factory=dict)
    """The newest resource version that a watch brought."""
    _missing: dict[Stream, tuple[int, float]] = field(default_factory=dict)
    """The first write that a watch has not brought, and since when."""

    def heard(self, kind: Kind, obj: Object) -> None:
        """A watch brought an object."""
        stream, version = self._stream(kind, obj), version_of(obj) or 0
        self._heard[stream] = max(version, self._heard.get(stream, 0))
        missing = self._missing.get(stream)
        if missing is not None and version >= missing[0]:
            del self._missing[stream]

    def wrote(self, kind: Kind, obj: Object) -> None:
        """The API server took a write; unless it changed nothing, the watch has to bring it, too."""
        stream, version = self._stream(kind, obj), version_of(obj) or 0
        if version > self._heard.get(stream, 0):
            self._missing.setdefault(stream, (version, self.clock.now()))

    def complaint(self) -> str | None:
        """What is wrong, or None."""
        now = self.clock.now()
        for (kind, namespace), (_, since) in self._missing.items():
            if now - since > self.watch_limit:
                where = f" in {namespace}" if namespace else ""
                return (
                    f"the watch of {kind.plural}{where} is dead: it has not brought what the operator wrote "
                    f"{now - since:.0f} s ago"
                )
        working = self.queue.longest_active()
        if working > self.work_limit:
            return f"one pass has been running for {working:.0f} s (limit {self.work_limit:.0f} s)"
        return None

    def _stream(self, kind: Kind, obj: Object) -> Stream:
        return kind, obj["metadata"]["namespace"] if self.scoped else ""


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
