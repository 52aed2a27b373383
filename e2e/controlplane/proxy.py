"""A TCP proxy between an operator and its API server that breaks connections in the ways networks do."""

from __future__ import annotations

import asyncio
import contextlib

from e2e.controlplane.cluster import Loop


class Proxy:
    """Listens on a port of loopback and hands on bytes. Every call returns when its effect is there."""

    def __init__(self, target_port: int, loop: Loop) -> None:
        self._loop = loop
        self._target = target_port
        self._connections: set[_Connection] = set()
        self._refusing = False
        self._server = loop.run(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.url = f"https://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Every connection breaks; new ones are taken."""
        self._loop.run(self._cut())

    def silence(self) -> None:
        """Of every connection that is there no byte comes any more, and none is told; new ones work.

        So does a load balancer that forgets a flow: the client's packets are acknowledged by somebody.
        """
        self._loop.run(self._silence())

    def refuse(self) -> None:
        """Every connection breaks, and no new one works until `accept`."""
        self._refusing = True
        self.cut()

    def accept(self) -> None:
        self._refusing = False

    def close(self) -> None:
        self.refuse()
        self._loop.run(self._close())

    async def _close(self) -> None:
        self._server.close()

    async def _cut(self) -> None:
        for connection in list(self._connections):
            connection.cut()

    async def _silence(self) -> None:
        for connection in self._connections:
            connection.silent = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection((reader, writer), there)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)


Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Connection:
    def __init__(self, here: Side, there: Side) -> None:
        self.silent = False
        self._here, self._there = here, there

    def cut(self) -> None:
        for _, writer in (self._here, self._there):
            writer.transport.abort()

    async def run(self) -> None:
        both = (self._copy(self._here[0], self._there[1]), self._copy(self._there[0], self._here[1]))
        tasks = [asyncio.create_task(each) for each in both]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        self.cut()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if not self.silent:
                    sink.write(data)
                    await sink.drain()
