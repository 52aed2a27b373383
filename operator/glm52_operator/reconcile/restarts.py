"""Carries out what is decided about replicas that crashed, on pods that are still what the decision saw."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from glm52_operator import names
from glm52_operator.plan.failures import Failure
from glm52_operator.plan.restarts import Action, Restart
from glm52_operator.reconcile.apply import failure_of
from glm52_operator.reconcile.client import Api, ApiError
from glm52_operator.reconcile.kinds import POD
from glm52_operator.reconcile.store import Key, Store

log = logging.getLogger("glm52.restarts")

_GONE_OR_CHANGED = (404, 409, 422)
"""Somebody was faster; the pod's own event brings the next pass. 422: a pod of another uid has the name."""


@dataclass(slots=True)
class Restarter:
    api: Api
    store: Store

    async def act(self, key: Key, chosen: Sequence[Action]) -> list[Failure]:
        """What the API server refused."""
        failures = []
        for action in chosen:
            try:
                if isinstance(action, Restart):
                    log.info("%s/%s: pod %s %s", *key, action.pod, action.why)
                    await self.api.delete(
                        POD, key[0], action.pod, uid=action.uid, version=action.version or None, grace=action.grace
                    )
                else:
                    log.info("%s/%s: pod %s is held: %s", *key, action.pod, action.hold)
                    notes = {names.HOLD: action.hold}
                    found = await self.api.annotate(POD, key[0], action.pod, uid=action.uid, annotations=notes)
                    self.store.observe(POD, found)
            except ApiError as error:
                if error.code not in _GONE_OR_CHANGED:
                    failures.append(failure_of(error))
        return failures
