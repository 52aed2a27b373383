"""One client request: prefill leg, decode leg, bytes passed on as they come. Retries only before the first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from glm52_engine.config import Role
from glm52_engine.route.legs import LegFailed, Legs, Next
from glm52_engine.route.pools import Pools
from glm52_engine.serve.errors import ApiError, unavailable
from glm52_engine.serve.openai import Endpoint

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Prefills of one request at most."""

DECODE_ATTEMPTS = 3
"""Decode pods that are offered the KV of one prefill at most."""

PAUSE_SECONDS = 0.2
"""Before a pod that has just failed is tried again because there is no other."""


@dataclass(slots=True)
class Exchange:
    """One client request in progress."""

    request: web.Request
    endpoint: Endpoint
    body: dict[str, Any]
    wait_seconds: float
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tried: set[str] = field(default_factory=set)
    retries: int = 0
    last: ApiError | None = None

    @property
    def public(self) -> str:
        return f"{'chatcmpl' if self.endpoint == 'chat' else 'cmpl'}-{self.id}"

    def note(self, failure: LegFailed) -> None:
        self.tried.add(failure.url)
        self.last = failure.error
        self.retries += 1
        log.warning("a leg failed: %s", failure, extra={"request": self.public, "next": failure.then.value})


class Proxy:
    def __init__(self, legs: Legs, pools: Pools) -> None:
        self._legs = legs
        self._pools = pools

    async def answer(self, exchange: Exchange) -> web.StreamResponse:
        """The client's answer; raises ApiError or Relayed when there is none."""
        for attempt in range(ATTEMPTS):
            call = {"id": f"{exchange.public}.{attempt}", "endpoint": exchange.endpoint, "body": exchange.body}
            url = await self._pick("prefill", exchange)
            try:
                async with self._prefilled(url, call) as prefilled:
                    return await self._decode(exchange, {**prefilled, **call})
            except LegFailed as failure:
                self._blame(exchange, failure)
        raise _given_up(exchange)

    @contextlib.asynccontextmanager
    async def _prefilled(self, url: str, call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Prefill's answer; leaving the block other than by a finished answer tells the pod to free the KV."""
        prefilled: dict[str, Any] = {}
        try:
            prefilled = await self._legs.prefill(url, call)
            yield prefilled
        except BaseException:
            if not prefilled or prefilled.get("kv"):
                self._legs.give_up(prefilled.get("kv"), url, call["id"])
            raise

    async def _decode(self, exchange: Exchange, call: dict[str, Any]) -> web.StreamResponse:
        for _ in range(DECODE_ATTEMPTS):
            url = await self._pick("decode", exchange)
            try:
                async with self._legs.decode(url, call) as response:
                    return await self._relay(exchange, url, response)
            except LegFailed as failure:
                if failure.then is not Next.OTHER_POD:
                    raise
                self._blame(exchange, failure)
        raise _given_up(exchange)

    async def _pick(self, role: Role, exchange: Exchange) -> str:
        url = await self._pools.wait_pick(role, exchange.tried, exchange.wait_seconds)
        if url is None:
            raise unavailable(f"no {role} pod is ready", f"no_{role}_pod")
        if url in exchange.tried:
            await asyncio.sleep(PAUSE_SECONDS)
        return url

    def _blame(self, exchange: Exchange, failure: LegFailed) -> None:
        exchange.note(failure)
        if failure.dead:
            self._pools.suspect(failure.url)

    async def _relay(self, exchange: Exchange, url: str, response: aiohttp.ClientResponse) -> web.StreamResponse:
        headers = {"content-type": response.headers.get("content-type", "application/json")}
        headers["x-request-id"] = exchange.public
        try:
            if response.content_type != "text/event-stream":
                # Whole answers are collected first: until then the request can still be repeated elsewhere.
                return web.Response(status=200, body=await response.read(), headers=headers)
            first = await response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _broken(url, error) from error
        if not first:
            raise _broken(url, EOFError())
        stream = web.StreamResponse(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        await stream.prepare(exchange.request)
        await stream.write(first)
        await self._pass_on(exchange, url, response, stream)
        await stream.write_eof()
        return stream

    async def _pass_on(
        self, exchange: Exchange, url: str, response: aiohttp.ClientResponse, stream: web.StreamResponse
    ) -> None:
        while True:
            try:
                chunk = await response.content.readany()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                log.warning("stream cut", extra={"request": exchange.public, "pod": url, "reason": repr(error)})
                self._pools.suspect(url)
                words = ApiError(502, "the decode pod went away in the middle of the answer", code="decode_lost")
                # The cut may lie in the middle of an event: the empty line ends what there was of it.
                await stream.write(b"\n\n" + words.event())
                return
            if not chunk:
                return
            await stream.write(chunk)


def _broken(url: str, error: Exception) -> LegFailed:
    words = ApiError(502, f"the decode pod went away before its answer ({type(error).__name__})", code="decode_lost")
    return LegFailed(url, words, Next.ANEW, dead=True)


def _given_up(exchange: Exchange) -> ApiError:
    error = exchange.last or unavailable("no pod answered")
    error.retry_after = error.retry_after or 2
    log.error("given up", extra={"request": exchange.public, "retries": exchange.retries, "reason": error.message})
    return error
