"""The leader's way to its rank hosts: all handshakes at once, and either all of them hold or none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glm52_engine.ranks.frames import ProtocolError
from glm52_engine.ranks.handshake import HANDSHAKE_SECONDS, HandshakeError, check, hello
from glm52_engine.ranks.link import Link, LinkLost
from glm52_engine.ranks.messages import Challenge, Terms
from glm52_engine.ranks.spans import RankHost, RankSpan, rank_spans

RETRY_SECONDS = 0.5
LAST_TRY_SECONDS = 2.0
"""How long the others get once one host has failed for good: enough to tell their own reasons too."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A rank host that has accepted, and the ranks that it has."""

    span: RankSpan
    link: Link


class ConnectError(Exception):
    """Some rank hosts cannot be had; the message has host, ranks and reason of each. `final`: nor by trying again."""

    def __init__(self, reasons: Sequence[tuple[RankSpan, str]], *, final: bool) -> None:
        super().__init__("; ".join(f"rank host {span.host} ({span}): {reason}" for span, reason in reasons))
        self.reasons = tuple(reasons)
        self.final = final


async def connect_hosts(
    local_ranks: int,
    hosts: Sequence[RankHost],
    terms: Terms,
    secret: str,
    *,
    seconds: float | None,
    missing: Callable[[str, str], None] = lambda host, why: None,
) -> list[Remote]:
    """A link to every host, in the order given, whoever answers first. No host: nothing is opened.

    A host that is not there yet is tried again for `seconds`, or as long as it takes; `missing` is told host and
    reason, each reason once, and no reason when it is there. Every attempt has ended before this returns or raises;
    where one fails the links of the others are closed. Raises ConnectError, and ValueError as `rank_spans`.
    """
    spans = rank_spans(local_ranks, hosts)[1:]
    if not spans:
        return []
    calls = [_Call(host, span, terms, secret, missing) for host, span in zip(hosts, spans, strict=True)]
    hopeless = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call.run(seconds, hopeless)) for call in calls]
            watch = group.create_task(_end_soon_after(hopeless, tasks))
            await asyncio.wait(tasks)
            watch.cancel()
    except BaseException:
        await _close(calls)
        raise
    failed = [(call.span, call.reason) for call in calls if call.link is None]
    if failed:
        await _close(calls)
        raise ConnectError(failed, final=hopeless.is_set())
    return [Remote(call.span, call.link) for call in calls if call.link is not None]


@dataclass(slots=True)
class _Call:
    """One host's handshake, tried until it holds, fails for good, or the time is over."""

    host: RankHost
    span: RankSpan
    terms: Terms
    secret: str
    missing: Callable[[str, str], None]
    link: Link | None = None
    reason: str = "it has not answered yet"
    tries: int = 0

    async def run(self, seconds: float | None, hopeless: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(seconds):
                told = ""
                while not await self._try(hopeless):
                    if self.reason != told:
                        told = self.reason
                        self.missing(self.span.host, told)
                    await asyncio.sleep(RETRY_SECONDS)
                self.missing(self.span.host, "")
        except TimeoutError:
            self.reason += f" (tried {self.tries} times)"
        except asyncio.CancelledError:
            if not hopeless.is_set():
                raise

    async def _try(self, hopeless: asyncio.Event) -> bool:
        """True when there is nothing more to try."""
        self.tries += 1
        try:
            self.link = await _dial(self.host, self.span, self.terms, self.secret)
            return True
        except HandshakeError as error:
            self.reason = str(error)
            if error.passing:
                return False
            hopeless.set()
            return True
        except ProtocolError as error:
            # Something else listens there, or a broken host: the same bytes would come again.
            self.reason = str(error)
            hopeless.set()
            return True
        except (LinkLost, OSError) as error:
            self.reason = _words(error)
            return False


async def _dial(host: RankHost, span: RankSpan, terms: Terms, secret: str) -> Link:
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            reader, writer = await asyncio.open_connection(host.host, host.port)
    except TimeoutError:
        raise LinkLost(f"it does not answer within {HANDSHAKE_SECONDS:g} s") from None
    link = Link(host.name, reader, writer)
    try:
        asked = await link.expect(Challenge, HANDSHAKE_SECONDS)
        said = hello(asked, terms, span, secret)
        await link.send(said)
        check(await link.said_within(HANDSHAKE_SECONDS), said, secret)
    except BaseException:
        await link.close()
        raise
    link.keep_alive()
    return link


async def _end_soon_after(hopeless: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    """One refusal for good decides the matter: nobody then waits for a host that may come in ten minutes."""
    await hopeless.wait()
    await asyncio.wait(tasks, timeout=LAST_TRY_SECONDS)
    for task in tasks:
        task.cancel()


async def _close(calls: Sequence[_Call]) -> None:
    await asyncio.gather(*(call.link.close() for call in calls if call.link is not None))


def _words(error: LinkLost | OSError) -> str:
    """asyncio's own text hides the cause: "Connect call failed"."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number and number > 0 else getattr(error, "strerror", None) or str(error)
