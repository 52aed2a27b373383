"""The two calls behind one client request, and what each way to fail means for the next attempt."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from glm52_engine.config import INTERNAL_TOKEN_HEADER, Role
from glm52_engine.lifecycle import trace
from glm52_engine.route.frozen import Frozen
from glm52_engine.route.pools import Pools
from glm52_engine.serve.bodies import read
from glm52_engine.serve.errors import KV_MISMATCH, RETRY_AFTER_SECONDS, ApiError, unavailable

log = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
SILENCE_SECONDS = 900.0
"""A leg that says nothing for so long hangs, though its pod answers what it is asked meanwhile; long prompts and full
queues are slower than one thinks."""


class Next(enum.Enum):
    """What may still be tried after a leg failed before the client got a byte."""

    OTHER_POD = "the same call at another pod"
    ANEW = "from the prompt"
    NOTHING = "the client gets the answer as it is"


class LegFailed(Exception):
    """`dead`: the pod did not answer, so that it may hold the request still."""

    def __init__(self, url: str, error: ApiError, then: Next, *, dead: bool = False) -> None:
        super().__init__(f"{url}: {error.message}")
        self.url = url
        self.error = error
        self.then = then
        self.dead = dead


class Relayed(Exception):
    """An engine's refusal, handed to the client byte for byte."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        super().__init__(str(status))
        self.status = status
        self.body = body
        self.headers = headers


def after(leg: str, status: int) -> Next:
    """By status of an answer that came before anything was sent to the client."""
    if status in (429, 503):
        return Next.OTHER_POD
    if status == 502 and leg == "decode":
        return Next.ANEW
    return Next.NOTHING


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt at a request; `body` is the client's own, a JSON object in UTF-8."""

    id: str
    endpoint: str
    body: bytes
    request_id: str

    def encode(self, answer: bytes = b"", *, stay: bool = False) -> bytes:
        """The body of a leg's call. `answer`: prefill's, whose fields a decode call has as well.

        The client's bytes are wrapped, not parsed and written anew: that would take as long as a step, for nothing.
        """
        fields = answer.strip()[1:-1].strip()
        head = json.dumps({"id": self.id, "endpoint": self.endpoint, **({"stay": True} if stay else {})}).encode()
        return b"".join((b"{", fields, b"," if fields else b"", head[1:-1], b',"body":', self.body, b"}"))


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    raw: bytes
    kv: dict[str, Any] | None


class Legs:
    def __init__(self, session: aiohttp.ClientSession, pools: Pools, token: str, frozen: Frozen) -> None:
        self._session = session
        self._pools = pools
        self._frozen = frozen
        self._headers = {INTERNAL_TOKEN_HEADER: token}
        self._background: set[asyncio.Task[None]] = set()

    async def prefill(self, url: str, call: Call, *, stay: bool = False) -> PrefillAnswer:
        """Prefill's answer; whatever is lost here can be repeated. `stay`: also of a pod that drains."""
        async with self._call("prefill", "prefill", url, call, call.encode(stay=stay)) as response:
            return await _prefilled(url, response)

    def heard(self, url: str) -> None:
        """A piece of an answer came from that pod."""
        self._frozen.heard(url)

    async def ask(self, url: str, call: Call) -> bytes:
        """What a prefill pod answers to the client's own body, at the internal endpoint of the same name."""
        async with self._call("prefill", call.endpoint, url, call, call.body) as response:
            try:
                return await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise _unreachable("prefill", url, error) from error

    @contextlib.asynccontextmanager
    async def decode(
        self, url: str, call: Call, prefilled: PrefillAnswer, *, stay: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The open answer (status 200). Leaving the block early closes the connection: that cancels the request."""
        async with self._call("decode", "decode", url, call, call.encode(prefilled.raw, stay=stay)) as response:
            yield response

    @contextlib.asynccontextmanager
    async def _call(
        self, leg: Role, path: str, url: str, call: Call, body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        attributes = {"glm52.call": call.id, "server.address": url}
        step = trace.step(f"{path} leg", attributes, "CLIENT")
        with self._pools.busy(url), self._frozen.following(url) as cut, step as span:
            headers = {
                **self._headers,
                **trace.outgoing(),
                "content-type": "application/json",
                "x-request-id": call.request_id,
            }
            try:
                where = f"{url}/internal/v1/{path}"
                async with cut.limit:
                    response = await self._session.post(where, data=body, headers=headers, timeout=timeout)
                cut.response = response
                self._frozen.heard(url)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failed = _unreachable(leg, url, cut.cut_by or error)
                span.answered(failed.error.status, failed.error.message)
                raise failed from error
            del body  # A stream may last for minutes: only the client's own bytes are held for it.
            try:
                span.answered(response.status)
                if response.status != 200:
                    await _refuse(leg, url, response)
                yield response
            finally:
                response.close() if not response.content.at_eof() else response.release()

    def early(self, decode: str, prefill: str, call: Call) -> asyncio.Task[bool]:
        """Tells a decode pod of a prompt that it may read while it is computed; True where it begins to.

        Nothing depends on it: a call that is lost costs the time that it would have saved.
        """
        return asyncio.create_task(self._early(decode, prefill, call))

    async def _early(self, decode: str, prefill: str, call: Call) -> bool:
        timeout = aiohttp.ClientTimeout(total=5, sock_connect=CONNECT_SECONDS)
        told = {"id": call.id, "address": prefill.partition("://")[2]}
        try:
            async with self._session.post(
                decode + "/internal/v1/early", json=told, headers=self._headers, timeout=timeout
            ) as response:
                # A pod of a version that knows nothing of it says so, too.
                return response.status == 200 and (await response.json()).get("begun") is True
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError):
            return False

    def give_up(self, kv: dict[str, Any] | None, url: str, request_id: str) -> None:
        """Frees what a prefill pod may hold for this request; in the background, its lease is the safety net."""
        task = asyncio.create_task(self._release(f"http://{kv['address']}" if kv else url, request_id))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def settle(self) -> None:
        if self._background:
            await asyncio.wait(self._background, timeout=2)

    async def _release(self, url: str, request_id: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            timeout = aiohttp.ClientTimeout(total=5)
            path = "/internal/v1/kv/release"
            async with self._session.post(
                url + path, json={"id": request_id}, headers=self._headers, timeout=timeout
            ) as response:
                await response.read()


def _unreachable(leg: str, url: str, error: Exception) -> LegFailed:
    words = unavailable(f"the {leg} pod could not be reached ({type(error).__name__})", f"{leg}_unreachable")
    # A call that never reached the pod leaves the KV where it is; after a break anything may have happened to it.
    untouched = leg == "prefill" or isinstance(error, aiohttp.ClientConnectorError)
    return LegFailed(url, words, Next.OTHER_POD if untouched else Next.ANEW, dead=True)


async def _refuse(leg: str, url: str, response: aiohttp.ClientResponse) -> None:
    try:
        body = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _unreachable(leg, url, error) from error
    then = after(leg, response.status)
    if then is Next.NOTHING:
        if response.status in (401, 404, 405) and not _is_ours(body):
            raise LegFailed(url, ApiError(502, f"the {leg} pod answers {response.status}"), Next.OTHER_POD)
        kept = {name: response.headers[name] for name in ("retry-after",) if name in response.headers}
        raise Relayed(response.status, body, kept)
    told = _error_of(response.status, body, response.headers)
    raise LegFailed(url, told, Next.OTHER_POD if told.code == KV_MISMATCH else then)


def _is_ours(body: bytes) -> bool:
    return b'"error"' in body[:20]


def _error_of(status: int, body: bytes, headers: Mapping[str, str]) -> ApiError:
    try:
        fields = json.loads(body)["error"]
        error = ApiError(status, str(fields["message"]), code=fields.get("code"))
    except (ValueError, KeyError, TypeError):
        error = ApiError(status, f"an engine pod answers {status}")
    seconds = headers.get("retry-after", "")
    if status in (429, 503):
        error.retry_after = int(seconds) if seconds.isascii() and seconds.isdigit() else RETRY_AFTER_SECONDS
    return error


async def _prefilled(url: str, response: aiohttp.ClientResponse) -> PrefillAnswer:
    try:
        raw = await response.read()
        # A long prompt's answer lists its tokens.
        kv = await read(raw, lambda answer: answer.get("kv"), internal=True)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _unreachable("prefill", url, error) from error
    except ApiError as error:
        words = ApiError(502, f"the prefill pod's answer is of no use: {error.message}", code="prefill_lost")
        raise LegFailed(url, words, Next.OTHER_POD) from error
    if kv is not None and not (isinstance(kv, dict) and isinstance(kv.get("address"), str)):
        words = ApiError(502, "the prefill pod's answer has a kv without address", code="prefill_lost")
        raise LegFailed(url, words, Next.OTHER_POD)
    return PrefillAnswer(raw, kv)
