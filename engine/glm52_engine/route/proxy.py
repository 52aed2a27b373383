"""One client request: prefill leg, decode leg, bytes passed on as they come. Retries only before the first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
from aiohttp import web

from glm52_engine.config import Role
from glm52_engine.route.call import REQUEST_ID, Exchange
from glm52_engine.route.legs import Call, LegFailed, Legs, Next, PrefillAnswer, Relayed
from glm52_engine.route.pools import Pools
from glm52_engine.serve.errors import KV_MISMATCH, RETRY_AFTER_SECONDS, ApiError, unavailable

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Prefills of one request at most."""

DECODE_ATTEMPTS = 3
"""Decode pods that are offered the KV of one prefill at most."""

EARLY_BODY_BYTES = 32_768
"""From which a client's body may hold a prompt of several steps: the KV of a shorter one is here in a moment anyway."""

PAUSE_SECONDS = 0.2
"""Before a pod that has just failed is tried again because there is no other."""


class Proxy:
    """`on_first_byte` is called once per answer, before its head is sent."""

    def __init__(
        self, legs: Legs, pools: Pools, on_first_byte: Callable[[Exchange], None] = lambda exchange: None
    ) -> None:
        self._legs = legs
        self._pools = pools
        self._on_first_byte = on_first_byte

    async def answer(self, exchange: Exchange) -> web.StreamResponse:
        """The client's answer; raises ApiError or Relayed when there is none."""
        for attempt in range(ATTEMPTS):
            call = Call(f"{exchange.public}.{attempt}", exchange.endpoint, exchange.body, exchange.request_id)
            url = await self._pick("prefill", exchange)
            try:
                with self._early(exchange, call, url) as early:
                    async with self._prefilled(url, call, url in exchange.draining) as prefilled:
                        return await self._decode(exchange, call, prefilled, url, early)
            except LegFailed as failure:
                self._blame(exchange, failure)
        raise _given_up(exchange)

    async def relay(self, exchange: Exchange) -> web.Response:
        """One pod's answer to the client's body as it is."""
        call = Call(exchange.public, exchange.endpoint, exchange.body, exchange.request_id)
        for _ in range(ATTEMPTS):
            url = await self._pick("prefill", exchange)
            try:
                body = await self._legs.ask(url, call)
            except LegFailed as failure:
                self._blame(exchange, failure)
            else:
                self._on_first_byte(exchange)
                return web.Response(body=body, content_type="application/json")
        raise _given_up(exchange)

    @contextlib.asynccontextmanager
    async def _prefilled(self, url: str, call: Call, stay: bool) -> AsyncIterator[PrefillAnswer]:
        """Prefill's answer; leaving the block other than by a finished answer tells the pod to free the KV."""
        try:
            prefilled = await self._legs.prefill(url, call, stay=stay)
        except BaseException as error:
            refused = isinstance(error, Relayed) or (isinstance(error, LegFailed) and not error.dead)
            if not refused:
                # It may be computing, or its answer may be on the way: then only we know that nobody reads it.
                self._legs.give_up(None, url, call.id)
            raise
        try:
            yield prefilled
        except BaseException:
            if prefilled.kv:
                self._legs.give_up(prefilled.kv, url, call.id)
            raise

    @contextlib.contextmanager
    def _early(self, exchange: Exchange, call: Call, prefill: str) -> Iterator[Callable[[], str | None]]:
        """A decode pod is chosen before a long prompt is computed, so that it can read what is there already.

        What is given says, once, which one has begun to: it counts as busy with this request until then.
        """
        url = None
        if len(exchange.body) >= EARLY_BODY_BYTES:
            url = self._pools.pick("decode", exchange.tried, early=True)
        if url is None or url in exchange.tried:
            yield lambda: None
            return
        asked = self._legs.early(url, prefill, call)
        with contextlib.ExitStack() as held:
            held.callback(asked.cancel)
            busy = held.enter_context(contextlib.ExitStack())
            busy.enter_context(self._pools.busy(url))

            def chosen() -> str | None:
                busy.close()
                begun = asked.done() and not asked.cancelled() and asked.result()
                asked.cancel()
                return url if begun and url in self._pools.ready("decode") - exchange.tried else None

            yield chosen

    async def _decode(
        self,
        exchange: Exchange,
        call: Call,
        prefilled: PrefillAnswer,
        prefill: str,
        early: Callable[[], str | None],
    ) -> web.StreamResponse:
        first = early()
        for _ in range(DECODE_ATTEMPTS):
            url, first = first or await self._pick("decode", exchange), None
            exchange.picked["decode"] = url
            try:
                stay = url in exchange.draining
                async with self._legs.decode(url, call, prefilled, stay=stay) as response:
                    return await self._relay(exchange, url, response)
            except LegFailed as failure:
                if failure.then is not Next.OTHER_POD:
                    raise
                self._blame(exchange, failure)
                if failure.error.code == KV_MISMATCH and self._pools.ready("decode") <= exchange.tried:
                    # No decode pod is of this prefill pod's kind, as in the middle of an update.
                    raise LegFailed(prefill, failure.error, Next.ANEW) from failure
        raise _given_up(exchange)

    async def _pick(self, role: Role, exchange: Exchange) -> str:
        last = exchange.picked.get(role, "")
        if not self._pools.ready(role) and last in exchange.draining - exchange.gone:
            # Its successor may come only when it is gone: nobody else will serve this request in time.
            return last
        url = await self._pools.wait_pick(role, exchange.tried, exchange.wait_seconds)
        if url is None:
            raise unavailable(f"no {role} pod is ready", f"no_{role}_pod")
        exchange.picked[role] = url
        if url in exchange.tried:
            if exchange.last is not None and exchange.last.status == 429:
                # Every pod's queue is full: the client is told how long to stay away.
                raise exchange.last
            if url not in exchange.draining - exchange.gone:
                await asyncio.sleep(PAUSE_SECONDS)
        return url

    def _blame(self, exchange: Exchange, failure: LegFailed) -> None:
        exchange.note(failure)
        log.warning("a leg failed: %s", failure, extra={"next": failure.then.value})
        if failure.dead:
            self._pools.suspect(failure.url)

    async def _relay(self, exchange: Exchange, url: str, response: aiohttp.ClientResponse) -> web.StreamResponse:
        headers = {"content-type": response.headers.get("content-type", "application/json")}
        headers[REQUEST_ID] = exchange.request_id
        try:
            if response.content_type != "text/event-stream":
                # Whole answers are collected first: until then the request can still be repeated elsewhere.
                whole = await response.read()
                self._on_first_byte(exchange)
                return web.Response(status=200, body=whole, headers=headers)
            first = await response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _broken(url, error) from error
        if not first:
            raise _broken(url, EOFError())
        self._on_first_byte(exchange)
        stream = web.StreamResponse(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        await stream.prepare(exchange.request)
        await stream.write(first)
        exchange.sent(first)
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
                log.warning("stream cut", extra={"pod": url, "reason": repr(error)})
                self._pools.suspect(url)
                words = ApiError(502, "the decode pod went away in the middle of the answer", code="decode_lost")
                # The cut may lie in the middle of an event: the empty line ends what there was of it.
                await stream.write(b"\n\n" + words.event())
                return
            if not chunk:
                return
            self._legs.heard(url)
            await stream.write(chunk)
            exchange.sent(chunk)


def _broken(url: str, error: Exception) -> LegFailed:
    words = ApiError(502, f"the decode pod went away before its answer ({type(error).__name__})", code="decode_lost")
    return LegFailed(url, words, Next.ANEW, dead=True)


def _given_up(exchange: Exchange) -> ApiError:
    error = exchange.last or unavailable("no pod answered")
    error.retry_after = error.retry_after or RETRY_AFTER_SECONDS
    log.error("given up", extra={"retries": exchange.retries, "reason": error.message})
    return error
