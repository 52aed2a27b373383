"""The kubelet's probes of a rank host, which has no API: started, alive, and part of a replica."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict

from glm52_engine.config import LIVEZ, READYZ, STARTUPZ
from glm52_engine.lifecycle.phases import Phase
from glm52_engine.lifecycle.termination import host_name

REQUEST_SECONDS = 5.0
REQUEST_BYTES = 8192


@contextlib.asynccontextmanager
async def probes(
    host: str,
    port: int,
    *,
    started: Callable[[], bool],
    ready: Callable[[], bool],
    phases: Callable[[], Sequence[Phase]] = tuple,
) -> AsyncIterator[asyncio.Server]:
    """Answers GET on the paths of the engine's own probes with 200 or 503, and everything else with 404.

    `phases`: of the start, which its probe tells as a leader's does.
    """
    name = host_name()
    answers: Mapping[str, Callable[[], bool]] = {STARTUPZ: started, LIVEZ: lambda: True, READYZ: ready}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Whoever sends nonsense, nothing or too much is hung up on.
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            asked = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_SECONDS)
            method, _, rest = asked.decode("latin-1").partition(" ")
            path = rest.partition(" ")[0]
            holds = answers.get(path) if method == "GET" else None
            status = "404 Not Found" if holds is None else "200 OK" if holds() else "503 Service Unavailable"
            told = [{"host": name, **asdict(phase)} for phase in phases()] if path == STARTUPZ else []
            body = json.dumps({"phases": told}) if told else ""
            kind = "Content-Type: application/json\r\n" if body else ""
            head = f"HTTP/1.1 {status}\r\n{kind}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write((head + body).encode())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, host, port, limit=REQUEST_BYTES)
    async with server:
        yield server
