"""A rank host's door: every connection gets one handshake, and at most one leader at a time is let in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from glm52_engine.lifecycle.start import InternalToken
from glm52_engine.ranks.frames import ProtocolError
from glm52_engine.ranks.handshake import HANDSHAKE_SECONDS, answer, challenge, known
from glm52_engine.ranks.link import Link, LinkLost
from glm52_engine.ranks.messages import Accepted, Hello, Refused, Terms
from glm52_engine.ranks.spans import RankSpan

log = logging.getLogger(__name__)

MOST_HANDSHAKES = 32
"""At once; who comes beyond that is dropped. A leader tries again, a flood of strangers must not use up the files."""


class Reception:
    """Whatever a connection says, the host stays ready for the next one."""

    def __init__(self, span: RankSpan, token: InternalToken) -> None:
        self.terms: asyncio.Future[Terms] = asyncio.get_running_loop().create_future()
        """Set once the checkpoint's headers are read: no leader can be answered before."""
        self._span, self._token = span, token
        self._leader: Link | None = None
        self._arrived = asyncio.Event()
        self._refusal = ""
        self._can_answer = asyncio.Event()
        self.terms.add_done_callback(lambda terms: self._can_answer.set())
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._connected, sock=listener)

    async def leader(self) -> Link:
        """The link of the leader that is here, or of the next one that is let in."""
        await self._arrived.wait()
        assert self._leader is not None
        return self._leader

    async def part(self) -> None:
        """Closes the leader's link; the next leader may come."""
        if self._leader is not None:
            await self._leader.close()
            self._leader = None
            self._arrived.clear()

    def refuse(self, reason: str) -> None:
        """From now on every leader is refused for good, and told why."""
        self._refusal = reason
        self._can_answer.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await self.part()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._receive(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port, *_ = writer.get_extra_info("peername") or ("a peer that is gone", 0)
        link = Link(f"the leader at {host}:{port}", reader, writer)
        taken = False
        try:
            if len(self._tasks) <= MOST_HANDSHAKES:
                taken = await self._handshake(link)
        except (LinkLost, ProtocolError) as error:
            log.warning("no handshake", extra={"peer": link.peer, "reason": str(error)})
        finally:
            if not taken:
                await link.close()

    async def _handshake(self, link: Link) -> bool:
        asked = challenge()
        await link.send(asked)
        said = await link.expect(Hello, HANDSHAKE_SECONDS)
        secret = known(said, asked, self._token)
        answered = secret if isinstance(secret, Refused) else await self._answer(said, secret)
        if isinstance(answered, Accepted):
            # Before the answer is sent: a second leader that asks meanwhile must find the place taken.
            self._leader = link
        try:
            await link.send(answered)
        except LinkLost:
            if self._leader is link:
                self._leader = None
            raise
        if isinstance(answered, Refused):
            log.warning("leader refused", extra={"peer": link.peer, "reason": answered.reason})
            return False
        log.info("leader accepted", extra={"peer": link.peer})
        link.keep_alive()
        self._arrived.set()
        return True

    async def _answer(self, said: Hello, secret: str) -> Accepted | Refused:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANDSHAKE_SECONDS / 2):
                await self._can_answer.wait()
        if self._refusal:
            return Refused(self._refusal)
        if not self.terms.done():
            return Refused("it still reads the checkpoint's headers", passing=True)
        if self._leader is not None:
            return Refused(f"it serves {self._leader.peer}", passing=True)
        return answer(said, self.terms.result(), self._span, secret)
