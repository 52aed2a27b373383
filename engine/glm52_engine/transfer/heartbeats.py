"""Leases at prefill pods kept alive by one small call per pod and beat, by which a pod's silence is noticed as well."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from glm52_engine.transfer.pulls import TransferError

BEAT_SECONDS = 2.0

SILENCE_SECONDS = 8.0
"""Without an answer, after which a prefill pod counts as dead. Several beats, since a busy process pauses for one; and
shorter than a lease, so that a pull ends before prefill may give its blocks to another request."""


class PeerGone(TransferError):
    """Nobody is there who could hold the KV: waiting for an answer would be of no use."""


@dataclass(frozen=True, slots=True)
class At:
    """A prefill pod in one life of it."""

    address: str
    agent: str


@dataclass(frozen=True, slots=True)
class Beat:
    """What a prefill pod says it still holds, for `seconds` from when it was asked."""

    held: Collection[str]
    seconds: float


Ask = Callable[[At, Sequence[str]], Awaitable[Beat]]
"""One call. Raises PeerGone, or another TransferError where the next call may have an answer."""


@dataclass(slots=True, eq=False)
class Claim:
    """One reader's interest in a lease. `lost` fails with TransferError when the lease or the pod is gone.

    `until`: monotonic seconds for which the lease is certain, and with it that the blocks are this request's.
    """

    request_id: str
    lost: asyncio.Future[None]
    until: float

    def lose(self, error: TransferError) -> None:
        if not self.lost.done():
            self.lost.set_exception(error)
            # Nobody may look any more, and that is no error of its own.
            self.lost.exception()


@dataclass(slots=True)
class _Pulse:
    heard: float
    claims: set[Claim] = field(default_factory=set)
    task: asyncio.Task[None] | None = None


class Heartbeats:
    """One task for each prefill pod at which something is claimed."""

    def __init__(
        self,
        ask: Ask,
        *,
        beat: float = BEAT_SECONDS,
        silence: float = SILENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._beat_seconds = beat
        self._silence = silence
        self._clock = clock
        self._pulses: dict[At, _Pulse] = {}

    @contextlib.contextmanager
    def claim(self, at: At, request_id: str) -> Iterator[Claim]:
        """The lease is renewed while the block runs."""
        claim = Claim(request_id, asyncio.get_running_loop().create_future(), self._clock())
        pulse = self._pulses.setdefault(at, _Pulse(self._clock()))
        pulse.claims.add(claim)
        if pulse.task is None:
            pulse.task = asyncio.create_task(self._run(at, pulse))
        try:
            yield claim
        finally:
            pulse.claims.discard(claim)
            if not pulse.claims and pulse.task is not None:
                pulse.task.cancel()
                pulse.task = None
                self._pulses.pop(at, None)

    async def _run(self, at: At, pulse: _Pulse) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            await self._beat(at, pulse)

    async def _beat(self, at: At, pulse: _Pulse) -> None:
        """Asks until there is an answer, or the pod counts as dead."""
        asked = self._clock()
        claims = list(pulse.claims)
        try:
            async with asyncio.timeout(max(pulse.heard + self._silence - asked, 0)):
                beat = await self._ask(at, sorted({claim.request_id for claim in claims}))
        except PeerGone as error:
            _lose(pulse.claims, error)
            return
        except (TransferError, TimeoutError) as error:
            if self._clock() - pulse.heard >= self._silence:
                why = f"prefill {at.address} has not answered for {self._silence:g} s"
                _lose(pulse.claims, TransferError(f"{why}: {error}" if str(error) else why))
            return
        pulse.heard = asked
        for claim in claims:
            if claim.request_id in beat.held:
                claim.until = asked + beat.seconds
            else:
                claim.lose(TransferError(f"prefill {at.address} no longer holds the KV of {claim.request_id}"))


def _lose(claims: Collection[Claim], error: TransferError) -> None:
    for claim in list(claims):
        claim.lose(error)
