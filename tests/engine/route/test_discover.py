"""Discovery against a small API server: list, watch, bookmarks, 410, broken connections."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from aiohttp import web
from kubernetes.aio import client

from glm52_engine.config import DiscoveryConfig
from glm52_engine.route import discover
from glm52_engine.route.pools import Pools

SERVICES = DiscoveryConfig(namespace="ns", prefill_service="chat-prefill", decode_service="chat-decode")


def piece(version: int, *addresses: str) -> dict[str, Any]:
    endpoints = [{"addresses": [address], "conditions": {"ready": True}} for address in addresses]
    metadata = {"name": "chat-decode-x", "resourceVersion": str(version)}
    return {"metadata": metadata, "endpoints": endpoints, "ports": [{"name": "http", "port": 8000}]}


class ApiServer:
    """Lists `now`; a watch sends what is put into `events`: an object, or a way to end."""

    def __init__(self) -> None:
        self.now = piece(5, "10.0.0.1")
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.lists = 0
        self.watched_from: list[str] = []
        self.down = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.query["labelSelector"] == "kubernetes.io/service-name=chat-decode"
        if self.down:
            return web.json_response({"message": "etcd is away"}, status=503)
        if request.query.get("watch") != "True" and request.query.get("watch") != "true":
            self.lists += 1
            version = self.now["metadata"]["resourceVersion"]
            return web.json_response({"metadata": {"resourceVersion": version}, "items": [self.now]})
        self.watched_from.append(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            event = await self.events.get()
            if event == "end":
                return response
            if event == "break":
                assert request.transport is not None
                request.transport.abort()
                return response
            line = json.dumps(event).encode() + b"\n"
            # In two pieces: events need not arrive whole.
            await response.write(line[:20])
            await response.write(line[20:])


class Following:
    def __init__(self, server: ApiServer, pools: Pools) -> None:
        self.server = server
        self.pools = pools

    async def shows(self, *addresses: str) -> None:
        wanted = {f"http://{address}:8000" for address in addresses}
        limit = time.monotonic() + 8
        while self.pools.ready("decode") != wanted:
            assert time.monotonic() < limit, f"{self.pools.ready('decode')} is not {wanted}"
            await asyncio.sleep(0.01)

    async def change(self, kind: str, version: int, *addresses: str) -> None:
        self.server.now = piece(version, *addresses)
        await self.server.events.put({"type": kind, "object": self.server.now})


@pytest_asyncio.fixture
async def following() -> AsyncIterator[Following]:
    server = ApiServer()
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    pools = Pools()
    async with client.ApiClient(configuration) as api_client:
        task = asyncio.create_task(discover.follow(api_client, SERVICES, "decode", pools, lambda role: None))
        yield Following(server, pools)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await runner.cleanup()


async def test_pods_come_and_go(following: Following) -> None:
    await following.shows("10.0.0.1")
    await following.change("MODIFIED", 6, "10.0.0.1", "10.0.0.2")
    await following.shows("10.0.0.1", "10.0.0.2")
    await following.change("MODIFIED", 7, "10.0.0.2")
    await following.shows("10.0.0.2")
    assert following.server.lists == 1


async def test_a_watch_that_ends_goes_on_where_it_was(following: Following) -> None:
    await following.shows("10.0.0.1")
    await following.change("MODIFIED", 6, "10.0.0.2")
    await following.server.events.put({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}})
    await following.server.events.put("end")
    await following.change("MODIFIED", 10, "10.0.0.3")
    await following.shows("10.0.0.3")
    assert following.server.watched_from == ["5", "9"]
    assert following.server.lists == 1


async def test_a_version_that_is_too_old_means_a_new_list(following: Following) -> None:
    await following.shows("10.0.0.1")
    following.server.now = piece(50, "10.0.0.9")
    await following.server.events.put({"type": "ERROR", "object": {"code": 410, "reason": "Expired"}})
    await following.shows("10.0.0.9")
    assert following.server.lists == 2


async def test_a_broken_connection_means_a_new_list_and_keeps_the_pods(following: Following) -> None:
    await following.shows("10.0.0.1")
    following.server.down = True
    await following.server.events.put("break")
    await asyncio.sleep(0.5)
    await following.shows("10.0.0.1")
    following.server.now = piece(8, "10.0.0.4")
    following.server.down = False
    await following.shows("10.0.0.4")


async def test_lines_of_any_length() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for chunk in (b'{"a"', b": 1}\n\n", b"x" * 100_000, b"\n{}\nhalf"):
            yield chunk

    found = [len(line) async for line in discover.lines(chunks())]
    assert found == [8, 100_000, 2]
