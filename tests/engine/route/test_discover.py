"""The watch as it goes over the wire: list, changes, the server's hang-up, a stale version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client

from glm52_engine.route.discover import follow


def slice_of(*addresses: str, version: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "s", "namespace": "n", "resourceVersion": version},
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [a], "conditions": {"ready": True, "serving": True, "terminating": False}} for a in addresses
        ],
        "ports": [{"name": "http", "port": 8000}],
    }


class ApiServer:
    """Answers lists with the current slice and each watch with the next script of events."""

    def __init__(self) -> None:
        self.current = slice_of("10.0.0.1", version="5")
        self.watches: list[list[dict[str, Any]]] = []
        self.asked: list[dict[str, str]] = []
        self.hold = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        if request.query.get("watch") != "true":
            return web.json_response({"metadata": {"resourceVersion": "5"}, "items": [self.current]})
        response = web.StreamResponse()
        await response.prepare(request)
        if not self.watches:
            await self.hold.wait()
            return response
        for event in self.watches.pop(0):
            await response.write(json.dumps(event).encode() + b"\n")
        return response


class Recorder:
    """Pools as the watch sees them."""

    def __init__(self) -> None:
        self.seen: list[frozenset[str]] = []
        self.changed = asyncio.Event()

    def update(self, role: str, urls: frozenset[str]) -> None:
        self.seen.append(frozenset(urls))
        self.changed.set()

    async def until(self, *addresses: str) -> None:
        wanted = frozenset(f"http://{a}:8000" for a in addresses)
        async with asyncio.timeout(10):
            while not self.seen or self.seen[-1] != wanted:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def server() -> AsyncIterator[tuple[ApiServer, client.ApiClient]]:
    api = ApiServer()
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/n/endpointslices", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    configuration = client.Configuration(host=f"http://127.0.0.1:{port}")
    async with client.ApiClient(configuration) as api_client:
        yield api, api_client
    api.hold.set()
    await runner.cleanup()


async def test_changes_arrive_through_hang_ups_and_stale_versions(
    server: tuple[ApiServer, client.ApiClient],
) -> None:
    api, api_client = server
    api.watches = [
        [{"type": "MODIFIED", "object": slice_of("10.0.0.1", "10.0.0.2", version="6")}],
        [{"type": "BOOKMARK", "object": {"kind": "EndpointSlice", "metadata": {"resourceVersion": "9"}}}],
        [{"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}],
    ]
    pools = Recorder()
    following = asyncio.create_task(follow(api_client, "n", "svc", "decode", pools, lambda role: None))  # type: ignore[arg-type]
    await pools.until("10.0.0.1", "10.0.0.2")
    api.current = slice_of("10.0.0.3", version="12")
    await pools.until("10.0.0.3")
    following.cancel()
    versions = [q["resourceVersion"] for q in api.asked if q.get("watch") == "true"][:3]
    assert versions == ["5", "6", "9"]
    assert all(q["labelSelector"] == "kubernetes.io/service-name=svc" for q in api.asked)
