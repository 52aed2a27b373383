"""The router's HTTP face: OpenAI's endpoints, probes, metrics. Knows nothing about tokens."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glm52_engine.config import INTERNAL_TOKEN_HEADER, LIVEZ, READYZ, STARTUPZ, Role
from glm52_engine.lifecycle.life import Life, Refused
from glm52_engine.lifecycle.states import Probe, ready_probe, startup_probe
from glm52_engine.route.legs import Relayed
from glm52_engine.route.pools import Pools
from glm52_engine.route.proxy import Exchange, Proxy
from glm52_engine.serve.errors import ApiError, bad, no_route, unavailable
from glm52_engine.serve.fields import MAX_BODY_BYTES, parse_object
from glm52_engine.serve.openai import Endpoint

log = logging.getLogger(__name__)

disable_created_metrics()  # type: ignore[no-untyped-call]

PARSE_ON_THREAD_BYTES = 256 << 10
"""A longer body would hold up every stream while it is parsed."""

ROLES: tuple[Role, ...] = ("prefill", "decode")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PodsCollector(Collector):
    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("glm52_router_ready_pods", "Pods that take new requests", labels=["role"])
        busy = GaugeMetricFamily("glm52_router_in_flight", "Calls in progress by pod", labels=["role", "pod"])
        for role in ROLES:
            urls = self._pools.ready(role)
            ready.add_metric([role], len(urls))
            for url in sorted(urls):
                busy.add_metric([role, url], self._pools.in_flight(url))
        yield ready
        yield busy


class Router:
    def __init__(
        self, *, model: str, max_model_len: int, token: str, life: Life, pools: Pools, proxy: Proxy, wait_seconds: float
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.life = life
        self.pools = pools
        self._token = token
        self._proxy = proxy
        self._wait_seconds = wait_seconds
        self._began = int(time.time())
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(PodsCollector(pools))
        self._requests = Counter(
            "glm52_router_requests", "Client requests by status", ["endpoint", "status"], registry=self._registry
        )
        self._retries = Counter("glm52_router_retries", "Legs that were tried again", registry=self._registry)
        self._aborted = Counter("glm52_router_aborted", "Requests whose client went away", registry=self._registry)
        self._seconds = Histogram(
            "glm52_router_request_seconds",
            "Whole time of a client request",
            ["endpoint"],
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
            registry=self._registry,
        )

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._serving("chat")),
                web.post("/v1/completions", self._serving("completions")),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._one_model),
                web.get(STARTUPZ, self._startupz),
                web.get(LIVEZ, self._livez),
                web.get(READYZ, self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/internal/v1/state", self._state),
                web.post("/internal/v1/drain", self._drain),
            ]
        )
        return app

    def _serving(self, endpoint: Endpoint) -> Handler:
        async def serve(request: web.Request) -> web.StreamResponse:
            began, status = time.monotonic(), "499"
            try:
                with self.life.serving():
                    response = await self._answer(request, endpoint)
                status = str(response.status)
                return response
            except asyncio.CancelledError:
                self._aborted.inc()
                raise
            except (ApiError, Relayed) as error:
                status = str(error.status)
                raise
            except Refused:
                status = "503"
                raise
            except Exception:
                status = "500"
                raise
            finally:
                self._requests.labels(endpoint, status).inc()
                self._seconds.labels(endpoint).observe(time.monotonic() - began)

        return serve

    async def _answer(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        raw = await request.read()
        on_thread = len(raw) > PARSE_ON_THREAD_BYTES
        body = await asyncio.to_thread(parse_object, raw) if on_thread else parse_object(raw)
        self._check_model(body)
        exchange = Exchange(request, endpoint, body, self._wait_seconds)
        began = time.monotonic()
        try:
            return await self._proxy.answer(exchange)
        finally:
            self._retries.inc(exchange.retries)
            seconds = time.monotonic() - began
            log.info("request", extra={"request": exchange.public, "endpoint": endpoint, "seconds": seconds})

    def _check_model(self, body: dict[str, Any]) -> None:
        """The one field that the router can judge without tokens: an unknown model needs no pod to be refused."""
        model = body.get("model")
        if isinstance(model, str) and model and model != self.model:
            raise _no_model(model, self.model)
        if not model:
            raise bad(f"model: missing, expected {self.model!r}", param="model")

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

    async def _startupz(self, request: web.Request) -> web.Response:
        return _probe(startup_probe(self.life.state))

    async def _livez(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def _readyz(self, request: web.Request) -> web.Response:
        probe = ready_probe(self.life.state)
        if probe.status == 200 and not self.pools.complete:
            missing = [role for role in ROLES if not self.pools.ready(role)]
            probe = Probe(503, {"status": "not ready", "reason": f"no ready pod of: {', '.join(missing)}"})
        return _probe(probe)

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=generate_latest(self._registry), headers=headers)

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
        return web.json_response(await self.life.drain_call(parse_object(raw) if raw else {}))

    def _authorize(self, request: web.Request) -> None:
        given = request.headers.get(INTERNAL_TOKEN_HEADER, "").encode()
        if not hmac.compare_digest(given, self._token.encode()):
            raise ApiError(401, f"{request.path} needs the deployment's {INTERNAL_TOKEN_HEADER}", code="unauthorized")

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return _error(error)
        except Relayed as error:
            return web.Response(status=error.status, body=error.body, content_type="application/json")
        except Refused as error:
            return _error(unavailable(f"this router takes no requests: {error}", "not_ready"))
        except web.HTTPRequestEntityTooLarge:
            return _error(ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="body_too_large"))
        except web.HTTPException as error:
            if error.status in (404, 405):
                return _error(no_route(request.method, request.path, known=error.status == 405))
            return _error(ApiError(error.status, error.reason))
        except ConnectionError:
            raise
        except Exception as error:
            log.error("request failed", exc_info=error)
            return _error(ApiError(500, "the router failed on this request; its log has the reason"))


def _no_model(name: str, ours: str) -> ApiError:
    words = f"the model {name!r} does not exist here; this server has {ours!r}"
    return ApiError(404, words, param="model", code="model_not_found")


def _probe(probe: Probe) -> web.Response:
    return web.json_response(probe.body, status=probe.status)


def _error(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status, body=error.encode(), content_type="application/json", headers=error.headers()
    )
