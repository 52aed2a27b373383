"""The kubelet's probes of a rank host, which has no API: started, alive, and part of a replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from glm52_engine.config import LIVEZ, READYZ, STARTUPZ

REQUEST_SECONDS = 5.0
REQUEST_BYTES = 8192


@contextlib.asynccontextmanager
async def probes(
    host: str, port: int, *, started: Callable[[], bool], ready: Callable[[], bool]
) -> AsyncIterator[asyncio.Server]:
    """Answers GET on the paths of the engine's own probes with 200 or 503, and everything else with 404."""
    answers: Mapping[str, Callable[[], bool]] = {STARTUPZ: started, LIVEZ: lambda: True, READYZ: ready}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Whoever sends nonsense, nothing or too much is hung up on.
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_SECONDS)
            method, _, rest = head.decode("latin-1").partition(" ")
            holds = answers.get(rest.partition(" ")[0]) if method == "GET" else None
            status = "404 Not Found" if holds is None else "200 OK" if holds() else "503 Service Unavailable"
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, host, port, limit=REQUEST_BYTES)
    async with server:
        yield server
