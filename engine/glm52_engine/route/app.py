"""The router's HTTP face: OpenAI's endpoints, probes, metrics. Knows nothing about tokens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, get_args

from aiohttp import web

from glm52_engine.config import INTERNAL_TOKEN_HEADER, LIVEZ, READYZ, STARTUPZ, Role
from glm52_engine.lifecycle import trace
from glm52_engine.lifecycle.life import Life
from glm52_engine.lifecycle.logs import bound
from glm52_engine.lifecycle.start import InternalToken
from glm52_engine.lifecycle.states import Probe, Stage, ready_probe, startup_probe
from glm52_engine.route.call import REQUEST_ID, Exchange, PublicEndpoint
from glm52_engine.route.errors import as_answer
from glm52_engine.route.legs import Legs
from glm52_engine.route.metrics import CONTENT_TYPE, RouterMetrics
from glm52_engine.route.openapi import document
from glm52_engine.route.pools import Pools
from glm52_engine.route.proxy import Proxy
from glm52_engine.route.room import Room
from glm52_engine.serve.bodies import check_content_type, read
from glm52_engine.serve.errors import ApiError, bad
from glm52_engine.serve.fields import MAX_BODY_BYTES

log = logging.getLogger(__name__)

BODY_SECONDS = 300.0
"""For a client to send its body: one that never ends it would hold up a drain for ever."""

ROLES: tuple[Role, ...] = get_args(Role)

HEALTH = "/health"
"""vLLM's name for what tells a client that requests are served."""

EXCHANGE = web.RequestKey("exchange", Exchange)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    def __init__(
        self,
        *,
        model: str,
        max_model_len: int,
        token: InternalToken,
        life: Life,
        pools: Pools,
        legs: Legs,
        wait_seconds: float,
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.life = life
        self.pools = pools
        self._room = Room()
        self.metrics = RouterMetrics(pools, lambda: self._room.taken)
        self._token = token
        self._proxy = Proxy(legs, pools, on_first_byte=self._first_byte)
        self._wait_seconds = wait_seconds
        self._began = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._serving("chat")),
                web.post("/v1/completions", self._serving("completions")),
                web.post("/tokenize", self._serving("tokenize")),
                web.post("/detokenize", self._serving("detokenize")),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._one_model),
                web.get("/openapi.json", self._openapi),
                web.get(STARTUPZ, self._startupz),
                web.get(LIVEZ, self._livez),
                web.get(READYZ, self._readyz),
                web.get(HEALTH, self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/internal/v1/state", self._state),
                web.post("/internal/v1/drain", self._drain),
            ]
        )
        app.on_response_prepare.append(self._let_go)
        return app

    async def _let_go(self, request: web.Request, response: web.StreamResponse) -> None:
        """A client that keeps its connection never learns of other routers: it would be refused, or cut off, here."""
        if self.life.state.stage is Stage.DRAINING:
            response.force_close()
            # The headers are made before this is called.
            response.headers["connection"] = "close"

    def _serving(self, endpoint: PublicEndpoint) -> Handler:
        async def serve(request: web.Request) -> web.StreamResponse:
            exchange = Exchange(request, endpoint, b"", self._wait_seconds)
            request[EXCHANGE] = exchange
            attributes = {"glm52.request_id": exchange.request_id, "http.route": request.path}
            with (
                bound(request_id=exchange.request_id),
                trace.serving(f"POST {request.path}", request.headers, attributes) as span,
            ):
                status = 499
                try:
                    with self.life.serving():
                        response = await self._answer(exchange)
                    status = response.status
                    return response
                except (asyncio.CancelledError, ConnectionError):
                    if exchange.complete:
                        status = 200
                    else:
                        self.metrics.aborted.inc()
                    raise
                except Exception as error:
                    answer = as_answer(error, request)
                    status = answer.status
                    return answer
                finally:
                    span.answered(status)
                    self._done(exchange, status)

        return serve

    async def _answer(self, exchange: Exchange) -> web.StreamResponse:
        request = exchange.request
        # Of a body that is compressed, or comes in chunks, the size is known only when it is there.
        known = request.content_length if "content-encoding" not in request.headers else None
        with self._room.take(min(MAX_BODY_BYTES if known is None else known, MAX_BODY_BYTES)) as settle:
            exchange.body = await self._body(request, exchange.generates)
            settle(len(exchange.body))
            return await (self._proxy.answer(exchange) if exchange.generates else self._proxy.relay(exchange))

    async def _body(self, request: web.Request, needs_model: bool) -> bytes:
        """The client's body, known to be a JSON object that asks for our model, or for none where none is needed."""
        if (request.content_length or 0) > MAX_BODY_BYTES:
            # Before any of it is read: the client may be waiting for a 100 Continue.
            raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, request.content_length or 0)
        check_content_type(request.headers.get("content-type", ""))
        try:
            async with asyncio.timeout(BODY_SECONDS):
                raw = await request.read()
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} s", code="timeout") from error
        await read(raw, lambda body: self._check_model(body, needs_model))
        return raw

    def _check_model(self, body: dict[str, Any], needed: bool) -> None:
        """The one field that the router can judge without tokens: an unknown model needs no pod to be refused."""
        model = body.get("model")
        if isinstance(model, str) and model and model != self.model:
            raise _no_model(model, self.model)
        if not model and needed:
            raise bad(f"model: missing, expected {self.model!r}", param="model")

    def _first_byte(self, exchange: Exchange) -> None:
        self.metrics.first_byte.labels(exchange.endpoint).observe(time.monotonic() - exchange.began)

    def _done(self, exchange: Exchange, status: int) -> None:
        seconds = time.monotonic() - exchange.began
        self.metrics.retries.inc(exchange.retries)
        self.metrics.requests.labels(exchange.endpoint, str(status)).inc()
        self.metrics.whole.labels(exchange.endpoint).observe(seconds)
        extra = {"answer": exchange.public, "endpoint": exchange.endpoint, "status": status, "seconds": seconds}
        log.info("request", extra=extra)

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self._began,
            "owned_by": "glm52",
            "max_model_len": self.max_model_len,
        }

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self.model:
            raise _no_model(name, self.model)
        return web.json_response(self._card())

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.json_response(document(self.model))

    async def _startupz(self, request: web.Request) -> web.Response:
        return _probe(startup_probe(self.life.state))

    async def _livez(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def _readyz(self, request: web.Request) -> web.Response:
        probe = ready_probe(self.life.state, self.life.in_flight)
        if probe.status == 200 and not self.pools.complete:
            missing = [role for role in ROLES if not self.pools.ready(role)]
            probe = Probe(503, {"status": "not ready", "reason": f"no ready pod of: {', '.join(missing)}"})
        return _probe(probe)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def _state(self, request: web.Request) -> web.Response:
        self._authorize(request)
        pools = {
            role: [{"url": url, "in_flight": self.pools.in_flight(url)} for url in sorted(self.pools.ready(role))]
            for role in ROLES
        }
        stage = self.life.state.stage.value
        own = {"role": "router", "stage": stage, "draining": stage == "Draining", "in_flight": self.life.in_flight}
        return web.json_response({**own, **pools})

    async def _drain(self, request: web.Request) -> web.Response:
        self._authorize(request)
        raw = await request.read()
        body: dict[str, Any] = await read(raw, dict) if raw else {}
        return web.json_response(await self.life.drain_call(body))

    def _authorize(self, request: web.Request) -> None:
        given = request.headers.get(INTERNAL_TOKEN_HEADER, "").encode("utf-8", "surrogateescape")
        if not self._token.accepts(given):
            raise ApiError(401, f"{request.path} needs the deployment's {INTERNAL_TOKEN_HEADER}", code="unauthorized")

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except ConnectionError:
            raise
        except Exception as error:
            response = as_answer(error, request)
        if not response.prepared and EXCHANGE in request:
            response.headers[REQUEST_ID] = request[EXCHANGE].request_id
        return response


def _no_model(name: str, ours: str) -> ApiError:
    words = f"the model {name!r} does not exist here; this server has {ours!r}"
    return ApiError(404, words, param="model", code="model_not_found")


def _probe(probe: Probe) -> web.Response:
    return web.json_response(probe.body, status=probe.status)
