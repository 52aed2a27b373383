"""Holds the Lease by which one operator acts at a time: takes it, renews it, gives it back."""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable
from typing import Protocol

from glm52_operator.desired.target import Object
from glm52_operator.plan.election import Candidate, Record, Timing, held, read, released
from glm52_operator.reconcile.client import Api, ApiError
from glm52_operator.reconcile.clock import Clock, sleep
from glm52_operator.reconcile.kinds import LEASE

log = logging.getLogger("glm52.lease")


class Leadership(Protocol):
    """Whether this process may act."""

    async def acquire(self) -> None:
        """Returns when it may."""

    async def keep(self) -> str:
        """Returns when it no longer may, with the reason."""

    async def release(self) -> None:
        """It ends, and somebody else may act at once."""

    def is_held(self) -> bool:
        """Whether it may act at this very moment, also right after the process was stopped for a while."""


class Alone:
    """No lease: for a process that somebody starts by hand."""

    async def acquire(self) -> None:
        return

    async def keep(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def release(self) -> None:
        return

    def is_held(self) -> bool:
        return True


class Lease:
    """`me` is the same after a restart of the same pod and never the same for two pods."""

    def __init__(
        self,
        api: Api,
        clock: Clock,
        utcnow: Callable[[], datetime.datetime],
        *,
        namespace: str,
        name: str,
        me: str,
        timing: Timing | None = None,
    ) -> None:
        self._api = api
        self._clock = clock
        self._utcnow = utcnow
        self._namespace, self._name = namespace, name
        self._candidate = Candidate(me)
        self._timing = timing or Timing()
        self._lease: Object = {}
        """As last read or written."""
        self._renewed: float | None = None
        self._told: str | None = None

    def is_held(self) -> bool:
        # By the clock and not by a flag: a process that was stopped runs on before its timers do.
        return self._renewed is not None and self._clock.now() - self._renewed < self._timing.deadline

    async def acquire(self) -> None:
        while not self.is_held():
            try:
                await self._look()
                delay = self._wait()
                if delay == 0:
                    await self._take()
                else:
                    self._tell(f"waiting for the lease {self._where}, held by {read(self._lease).holder}")
                    await self._until_changed(delay)
            except ApiError as error:
                if error.code == 409:
                    continue
                self._complain(error)
                await sleep(self._clock, self._timing.retry)
        log.info("holding the lease %s as %s", self._where, self._candidate.me)

    async def keep(self) -> str:
        delay = self._timing.renew
        while True:
            await sleep(self._clock, delay)
            if not self.is_held():
                return f"the lease {self._where} was not renewed for {self._timing.deadline:.0f} s"
            try:
                # Several times before the right to act is over: a connection may be dead without a word.
                await asyncio.wait_for(self._take(), self._timing.answer)
                delay = self._timing.renew
                self._told = None
            except (ApiError, TimeoutError) as error:
                if isinstance(error, TimeoutError):
                    await self._api.reconnect()
                lost = await self._lost_to()
                if lost:
                    self._renewed = None
                    return f"the lease {self._where} was taken by {lost}"
                if isinstance(error, ApiError) and error.code != 409:
                    self._complain(error)
                delay = self._timing.retry

    async def release(self) -> None:
        """Also where the process never held it: then nothing happens."""
        if not self.is_held():
            return
        self._renewed = None
        try:
            await asyncio.wait_for(self._write(released(read(self._lease), self._utcnow())), self._timing.retry)
        except (ApiError, TimeoutError) as error:
            log.warning("the lease %s was not given back; a successor waits until it runs out: %s", self._where, error)

    @property
    def _where(self) -> str:
        return f"{self._namespace}/{self._name}"

    async def _look(self) -> None:
        self._lease = await self._api.get(LEASE, self._namespace, self._name) or {}

    def _wait(self) -> float:
        if not self._lease:
            return 0.0
        version = str(self._lease["metadata"].get("resourceVersion"))
        return self._candidate.wait(read(self._lease), version, self._clock.now(), self._utcnow())

    async def _take(self) -> None:
        # The time before the request: what others see is no older.
        began = self._clock.now()
        before = read(self._lease) if self._lease else Record()
        await self._write(held(self._candidate.me, before, self._timing, self._utcnow()))
        self._renewed = began

    async def _write(self, spec: Object) -> None:
        """Refused with a 409 where somebody else wrote since the lease was last read."""
        body = {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"namespace": self._namespace, "name": self._name},
            "spec": spec,
        }
        if self._lease:
            body["metadata"] = {**self._lease["metadata"]}
            self._lease = await self._api.replace(LEASE, body)
        else:
            self._lease = await self._api.create(LEASE, self._namespace, body)

    async def _lost_to(self) -> str | None:
        """Who holds the lease instead; None where nobody does, or where that cannot be seen now."""
        try:
            await asyncio.wait_for(self._look(), self._timing.retry)
        except (ApiError, TimeoutError):
            return None
        holder = read(self._lease).holder if self._lease else ""
        return holder if holder and holder != self._candidate.me else None

    async def _until_changed(self, seconds: float) -> None:
        """Until the lease changes, at most so long: who waits learns at once that it was given back."""
        watching = asyncio.create_task(self._changed(seconds))
        over = asyncio.create_task(sleep(self._clock, seconds))
        try:
            await asyncio.wait((watching, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            over.cancel()

    async def _changed(self, seconds: float) -> None:
        version = str(self._lease["metadata"]["resourceVersion"])
        try:
            async for _ in self._api.watch(LEASE, self._namespace, self._name, version, seconds):
                return
        except ApiError as error:
            self._complain(error)
        # Without a watch the lease is looked at from time to time.
        await sleep(self._clock, self._timing.retry)

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            log.info("%s", text)

    def _complain(self, error: ApiError) -> None:
        """Once for each kind of trouble."""
        text = f"{error.verb} {error.code}"
        if text == self._told:
            return
        self._told = text
        if error.code == 403:
            log.error(
                "%s. Grant the operator's service account the verb %r on %r in %s: without a lease nothing is done",
                error,
                error.verb,
                LEASE.resource,
                self._namespace,
            )
        else:
            log.warning("the lease %s: %s", self._where, error)
