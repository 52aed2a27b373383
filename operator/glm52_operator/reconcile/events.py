"""Events on a GLM52Deployment, for `kubectl describe`: a help, never a reason for a pass to fail."""

from __future__ import annotations

import datetime
import logging
import socket
from collections.abc import Callable, Iterable

from glm52_operator.desired.target import Object
from glm52_operator.plan.events import Aggregator, Notice
from glm52_operator.reconcile.apply import failure_of
from glm52_operator.reconcile.client import Api, ApiError
from glm52_operator.reconcile.kinds import EVENT_V1

log = logging.getLogger("glm52.events")


class Recorder:
    def __init__(self, api: Api, utcnow: Callable[[], datetime.datetime], instance: str | None = None) -> None:
        self._api = api
        self._utcnow = utcnow
        self._aggregator = Aggregator(instance or socket.gethostname())
        self._told: str | None = None

    async def record(self, resource: Object, notices: Iterable[Notice]) -> None:
        for notice in notices:
            event = self._aggregator.event(resource, notice, self._utcnow())
            if event is None:
                continue
            try:
                # Also for a repeat: an event that expired meanwhile is made again.
                await self._api.apply(EVENT_V1, event)
            except ApiError as error:
                self._complain(error)

    def forget(self, uid: str) -> None:
        self._aggregator.forget(uid)

    def _complain(self, error: ApiError) -> None:
        """Once for each kind of refusal: a missing permission fails for every event."""
        if error.code in (0, 404) or (error.code == 403 and "being terminated" in error.text):
            # The namespace goes, or nothing can be written anyway.
            log.debug("no event was written: %s", error)
        elif self._told != f"{error.verb} {error.code}":
            self._told = f"{error.verb} {error.code}"
            log.warning("events are missing from kubectl describe: %s", failure_of(error).message)
