"""A pod of a replica of several hosts: what it is by its name, and how it answers its probes."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import pytest

from glm52_engine import cli
from glm52_engine.config import ConfigError
from glm52_engine.lifecycle.phases import Phase
from glm52_engine.ranks.health import probes
from glm52_engine.ranks.place import Place, place_of


@pytest.mark.parametrize(
    ("pod", "index", "others"),
    [
        ("chat-decode-0", 0, ("chat-decode-1", "chat-decode-2")),
        ("chat-decode-3", 0, ("chat-decode-4", "chat-decode-5")),
        ("chat-decode-11", 2, ("chat-decode-10", "chat-decode-11")),
    ],
)
def test_a_pods_number_says_which_host_it_is_and_where_the_others_are(
    pod: str, index: int, others: tuple[str, ...]
) -> None:
    domain = "chat-decode-hosts.ns.svc"
    assert place_of(pod, 3, domain) == Place(index, tuple(f"{other}.{domain}:8001" for other in others))


@pytest.mark.parametrize("pod", ["", "chat-decode", "chat-decode-", "chat-decode-x"])
def test_a_pod_without_a_number_is_refused(pod: str) -> None:
    with pytest.raises(ConfigError, match="POD_NAME"):
        place_of(pod, 2, "d")


@pytest.mark.parametrize(("pod", "leads"), [("chat-decode-2", True), ("chat-decode-3", False)])
def test_serve_leads_or_hosts_ranks_by_the_pods_number(monkeypatch: pytest.MonkeyPatch, pod: str, leads: bool) -> None:
    ran: list[Any] = []
    monkeypatch.setenv("POD_NAME", pod)
    monkeypatch.setattr(cli, "_leave", lambda code: None)
    monkeypatch.setattr("glm52_engine.serve.process.serve", ran.append)
    monkeypatch.setattr("glm52_engine.ranks.process.rank_host", ran.append)
    before = signal.getsignal(signal.SIGTERM)
    try:
        cli.main(["serve", "--role", "decode", "--hosts", "2", "--domain", "d", "--port", "9"])
    finally:
        signal.signal(signal.SIGTERM, before)
    (options,) = ran
    if leads:
        assert options.rank_hosts == ("chat-decode-3.d:8001",)
    else:
        assert (options.index, options.hosts, options.port, options.probe_port) == (1, 2, 8001, 9)


async def ask(port: int, request: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer.decode().partition("\r\n")[0].removeprefix("HTTP/1.1 ")


async def test_a_rank_host_tells_the_phases_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "chat-decode-1")
    phases = [Phase("reading weights", 0.5, 2.5)]
    async with probes("127.0.0.1", 0, started=lambda: False, ready=lambda: False, phases=lambda: phases) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /startupz HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, text = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
    assert head.startswith("HTTP/1.1 503 ")
    assert f"Content-Length: {len(text)}" in head
    assert json.loads(text) == {
        "phases": [{"host": "chat-decode-1", "name": "reading weights", "began": 0.5, "ended": 2.5}]
    }


async def test_a_rank_host_answers_the_probes_of_an_engine_pod() -> None:
    state = {"started": False, "ready": False}
    async with probes("127.0.0.1", 0, started=lambda: state["started"], ready=lambda: state["ready"]) as server:
        port = server.sockets[0].getsockname()[1]

        async def get(path: str, method: str = "GET") -> int:
            return int((await ask(port, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).split()[0])

        assert [await get(path) for path in ("/startupz", "/livez", "/readyz")] == [503, 200, 503]
        state["started"] = True
        assert [await get(path) for path in ("/startupz", "/livez", "/readyz")] == [200, 200, 503]
        state["ready"] = True
        assert await get("/readyz") == 200
        # What a drain hook asks of an engine: it takes no for an answer.
        assert [await get("/internal/v1/drain", "POST"), await get("/")] == [404, 404]
        assert await ask(port, b"x" * 20_000 + b"\r\n\r\n") == ""
