"""Carries out one step of a rollout: evicts or deletes what the plan names, if it is still what the plan saw."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from glm52_engine.config import Role
from glm52_operator import names
from glm52_operator.plan.budgets import charged_for, is_charged
from glm52_operator.plan.events import Notice
from glm52_operator.plan.failures import Failure
from glm52_operator.plan.rollout import Host, Replacement, State
from glm52_operator.reconcile.apply import failure_of
from glm52_operator.reconcile.client import Api, ApiError
from glm52_operator.reconcile.kinds import BUDGET, POD
from glm52_operator.reconcile.store import Key, Store
from glm52_operator.status.conditions import timestamp

log = logging.getLogger("glm52.rollout")

_GONE_OR_CHANGED = (404, 409)
"""Somebody was faster; the pod's own event brings the next pass."""


@dataclass(slots=True)
class Rolled:
    failures: list[Failure] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    held: dict[Role, str] = field(default_factory=dict)
    """What a role waits for, in the API server's words: a disruption budget that has no room."""


@dataclass(slots=True)
class Roller:
    api: Api
    store: Store
    utcnow: Callable[[], datetime.datetime]

    async def step(self, key: Key, replacements: Sequence[Replacement]) -> Rolled:
        rolled = Rolled()
        for replacement in replacements:
            sent = await self._send_all_off(key, replacement, rolled)
            if sent:
                rolled.notices.append(_notice(replacement, sent))
                log.info("%s/%s: %s", *key, rolled.notices[-1].note)
        return rolled

    async def _send_all_off(self, key: Key, replacement: Replacement, rolled: Rolled) -> list[Host]:
        """The hosts that were told to go. Of a replica that serves one is evicted: without it the others serve nobody,
        so that the budget has nothing more to say."""
        sent: list[Host] = []
        for host in replacement.hosts:
            if await self._send_off(key, replacement, host, rolled, follows=bool(sent)):
                sent.append(host)
            elif replacement.role in rolled.held:
                break
        return sent

    async def _send_off(self, key: Key, replacement: Replacement, host: Host, rolled: Rolled, *, follows: bool) -> bool:
        """Whether the pod was told to go; its preStop hook drains it. `follows`: another host of its replica was."""
        serves = replacement.state is State.SERVING
        try:
            if serves and not follows:
                await self._evict(key, replacement.role, host)
            else:
                await self.api.delete(POD, key[0], host.name, uid=host.uid, version=None if serves else host.version)
        except ApiError as error:
            if error.code not in _GONE_OR_CHANGED:
                rolled.held[replacement.role] = f"{host.name} is not let go: {self._reason(key, replacement, error)}"
                rolled.failures += [] if _is_budget(error) else [failure_of(error)]
            return False
        deadline = self.utcnow() + datetime.timedelta(seconds=host.grace)
        self.store.expect_leaving(POD, key[0], host.name, host.uid, timestamp(deadline))
        return True

    async def _evict(self, key: Key, role: Role, host: Host) -> None:
        try:
            await self.api.evict(POD, key[0], host.name, uid=host.uid)
        except ApiError as error:
            if not (error.code == 429 and await self._is_charged(key, role, host)):
                raise
            # An operator that ends in the middle of an eviction leaves the charge: the next one would wait for its own.
            await self.api.delete(POD, key[0], host.name, uid=host.uid)

    async def _is_charged(self, key: Key, role: Role, host: Host) -> bool:
        budget = names.role(key[1], role)
        known = self.store.get(BUDGET, key[0], budget)
        if known is None or not is_charged(known, host.name):
            return False
        # What is known may be of a while ago, and the charge be taken back since.
        now = await self.api.get(BUDGET, key[0], budget)
        return now is not None and is_charged(now, host.name)

    def _reason(self, key: Key, replacement: Replacement, error: ApiError) -> str:
        budget = self.store.get(BUDGET, key[0], names.role(key[1], replacement.role)) if _is_budget(error) else None
        more = charged_for(budget, self.store.owned(POD, key)) if budget else ""
        return f"{error.text.rstrip('.')}; {more}" if more else error.text


def _is_budget(error: ApiError) -> bool:
    """Refused for the sake of a disruption budget, or of two, which no eviction can serve: it is waited for."""
    return error.code == 429 or (error.code == 500 and "PodDisruptionBudget" in error.text)


def _notice(replacement: Replacement, sent: Sequence[Host]) -> Notice:
    names = ", ".join(host.name for host in sent)
    how = "drained and " if replacement.state is State.SERVING else "which does not serve, "
    note = f"{replacement.role} replica {replacement.replica}, {how}replaced by the newest revision: {names}."
    return Notice("Normal", "Replacing", "Rollout", note)
