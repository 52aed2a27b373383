"""One HTTP answer as one coroutine that owns all its resources, cancelled the moment the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glm52_engine.serve.errors import ApiError

log = logging.getLogger(__name__)


def _encode(body: dict[str, Any]) -> bytes:
    # Non-ASCII text as it is: clients read UTF-8, and escapes would triple the size of Chinese.
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


class Sender:
    """What a coroutine may say to its client: one whole answer, or a stream of events."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.began = False
        self.ended = False

    async def whole(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        await self.written(status, _encode(body), headers)

    async def written(self, status: int, raw: bytes, headers: dict[str, str] | None = None) -> None:
        """An answer that is JSON already."""
        await self._head(status, "application/json", headers or {})
        await self._body(raw, more=False)

    async def error(self, error: ApiError) -> None:
        """As an answer, or as the stream's last event when a stream has begun: never a 200 that pretends success."""
        if self.ended:
            return
        if self.began:
            await self._body(error.event(), more=False)
        else:
            await self.whole(error.status, error.body(), error.headers())

    async def event(self, body: dict[str, Any]) -> None:
        data = b"data: " + _encode(body) + b"\n\n"
        await self._begin_stream()
        await self._body(data, more=True)

    async def done(self) -> None:
        await self._begin_stream()
        await self._body(b"data: [DONE]\n\n", more=False)

    async def _begin_stream(self) -> None:
        if not self.began:
            await self._head(200, "text/event-stream", {"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def _head(self, status: int, kind: str, headers: dict[str, str]) -> None:
        self.began = True
        pairs = {"content-type": kind, "x-request-id": self._request_id, **headers}
        encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in pairs.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _body(self, data: bytes, *, more: bool) -> None:
        self.ended = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class Answering(Response):
    """Runs `work` while watching for a disconnect. `failed` maps an exception to what the client is told."""

    def __init__(
        self,
        work: Callable[[Sender], Awaitable[None]],
        *,
        request_id: str,
        failed: Callable[[Exception], ApiError],
        on_disconnect: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._work = work
        self._request_id = request_id
        self._failed = failed
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = Sender(send, self._request_id)
        work = asyncio.create_task(self._answer(sender))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not sender.ended:
                self._on_disconnect()
                log.info("client is gone", extra={"request": self._request_id})
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
        finally:
            work.cancel()
            gone.cancel()

    async def _answer(self, sender: Sender) -> None:
        try:
            await self._work(sender)
        except Exception as error:
            await sender.error(self._failed(error))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
