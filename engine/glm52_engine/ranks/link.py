"""One control connection between a leader and a rank host. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TypeVar

from glm52_engine.lifecycle.start import notice_dead_peers
from glm52_engine.ranks.frames import HANDSHAKE_BYTES, MOST_BYTES, ProtocolError, frame, read_frame
from glm52_engine.ranks.messages import Beat, Message, decode, encode

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""Of a peer that beats every second: it is frozen, or its node is gone."""

T = TypeVar("T")


class LinkLost(Exception):
    """The peer is gone, or was not to be understood."""


def unexpected(message: Message, *kinds: type) -> ProtocolError:
    expected = " or ".join(kind.__name__ for kind in kinds)
    return ProtocolError(f"the peer says {type(message).__name__}; expected {expected}")


class Link:
    """Messages to and from `peer`, which is a name for people."""

    def __init__(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peer = peer
        self._reader, self._writer = reader, writer
        self._beats: asyncio.Task[None] | None = None
        found = writer.get_extra_info("socket")
        # A plan of a hundred bytes must not wait for the acknowledgement of the one before it.
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_dead_peers(found)

    @property
    def own_address(self) -> str:
        """The address of this end, at which the peer's machine reaches this one."""
        return str(self._writer.get_extra_info("sockname")[0])

    def keep_alive(self) -> None:
        """From now on beats go out, and the peer must not be silent for longer than SILENCE_SECONDS."""
        self._beats = asyncio.create_task(self._beat_forever())

    async def send(self, message: Message) -> None:
        """Raises LinkLost."""
        try:
            self._writer.write(frame(encode(message)))
            async with asyncio.timeout(SILENCE_SECONDS):
                await self._writer.drain()
        except TimeoutError:
            raise LinkLost(f"{self.peer} takes nothing in: it has been full for {SILENCE_SECONDS:g} s") from None
        except OSError as error:
            raise LinkLost(f"{self.peer} is gone: {error.strerror or error}") from None

    async def said_within(self, seconds: float) -> Message:
        """The next message of a handshake. Raises LinkLost and ProtocolError."""
        try:
            async with asyncio.timeout(seconds):
                return await self._read(HANDSHAKE_BYTES)
        except TimeoutError:
            raise LinkLost(f"{self.peer} said nothing for {seconds:g} s") from None

    async def expect(self, kind: type[T], seconds: float) -> T:
        """As `said_within`; any other kind of message is a ProtocolError."""
        message = await self.said_within(seconds)
        if not isinstance(message, kind):
            raise unexpected(message, kind)
        return message

    async def receive(self) -> Message:
        """The next message that is no beat. Raises LinkLost, also for a peer that is silent; and ProtocolError."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    message = await self._read(MOST_BYTES)
            except TimeoutError:
                raise LinkLost(f"{self.peer} has been silent for {SILENCE_SECONDS:g} s: frozen or cut off") from None
            if not isinstance(message, Beat):
                return message

    async def _read(self, limit: int) -> Message:
        try:
            payload = await read_frame(self._reader, limit)
        except OSError as error:
            raise LinkLost(f"{self.peer} is gone: {error.strerror or error}") from None
        if payload is None:
            raise LinkLost(f"{self.peer} closed the connection")
        return decode(payload)

    async def _beat_forever(self) -> None:
        with contextlib.suppress(LinkLost):  # whoever reads finds out as well, and says so
            while True:
                await self.send(Beat())
                await asyncio.sleep(BEAT_SECONDS)

    async def close(self) -> None:
        """Both directions end now: a peer that waits for either must not hang on a half-closed connection."""
        if self._beats is not None:
            self._beats.cancel()
        with contextlib.suppress(OSError):
            self._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
