"""The HTTP face of an engine pod. It answers from the first moment of the process, also while weights load."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from glm52_engine.config import INTERNAL_TOKEN_HEADER, LIVEZ, READYZ, STARTUPZ
from glm52_engine.lifecycle import trace
from glm52_engine.lifecycle.logs import bound
from glm52_engine.lifecycle.start import InternalToken
from glm52_engine.lifecycle.states import Probe, live_probe, ready_probe, startup_probe
from glm52_engine.serve.bodies import read
from glm52_engine.serve.decode import decode
from glm52_engine.serve.errors import ApiError, no_route, wrong_method
from glm52_engine.serve.fields import MAX_BODY_BYTES
from glm52_engine.serve.metrics import CONTENT_TYPE
from glm52_engine.serve.pod import DecodeCall, EarlyCall, Pod, PrefillCall, read_call, told
from glm52_engine.serve.prefill import heartbeat, prefill, progress, release_lease, renew_lease
from glm52_engine.serve.sender import Answering, Sender
from glm52_engine.serve.tokenize import detokenize, tokenize
from glm52_engine.serve.watch import Watch
from glm52_engine.transfer.peers import (
    AGENT_PATH,
    BEAT_PATH,
    LEASE_PATH,
    PROGRESS_PATH,
    RELEASE_PATH,
    BeatCall,
    LeaseCall,
    ProgressCall,
    agent_card,
)

INTERNAL_BODY_BYTES = MAX_BODY_BYTES * 2
"""A decode call carries the client's body and the prompt's token ids."""

T = TypeVar("T")


def make_app(pod: Pod) -> ASGIApp:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _probes(app, pod)
    _internal(app, pod)
    _text_routes(app, pod)
    if pod.role == "prefill":
        _prefill_routes(app, pod)
    else:
        _decode_routes(app, pod)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unforeseen)
    return InternalOnly(app, pod.token)


class InternalOnly:
    """Refuses every /internal/ request without the deployment's secret, before its body is read."""

    def __init__(self, app: ASGIApp, token: InternalToken) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/internal/") and not self._knows(scope):
            error = ApiError(
                401, f"{scope['path']} needs the deployment's {INTERNAL_TOKEN_HEADER}", code="unauthorized"
            )
            await _answer(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        wanted = INTERNAL_TOKEN_HEADER.lower().encode()
        given = next((value for name, value in scope["headers"] if name == wanted), b"")
        return self._token.accepts(given)


async def read_body(request: Request, use: Callable[[dict[str, Any]], T]) -> T:
    """`use` of the body as an object; 413 as soon as it is longer than INTERNAL_BODY_BYTES."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > INTERNAL_BODY_BYTES:
            raise ApiError(413, f"the body is longer than {INTERNAL_BODY_BYTES} bytes", code="body_too_large")
        chunks.append(chunk)
    return await read(b"".join(chunks), use, internal=True)


def state(pod: Pod) -> dict[str, Any]:
    """GET /internal/v1/state."""
    life, kv = pod.life, pod.counters
    stats = pod.loaded.engine.stats() if pod.loaded else None
    return {
        "role": pod.role,
        "host": pod.host,
        "stage": life.state.stage.value,
        "phase": life.state.phase,
        "draining": life.state.stage.value == "Draining",
        "in_flight": life.in_flight,
        "running": stats.running if stats else 0,
        "waiting": stats.waiting if stats else 0,
        "blocks_total": stats.blocks_total if stats else 0,
        "blocks_free": stats.blocks_free if stats else 0,
        "prefix_cache_hits": stats.prefix_cache_hits if stats else 0,
        "prompt_tokens_computed": stats.prompt_tokens_computed if stats else 0,
        "tokens_generated": stats.tokens_generated if stats else 0,
        "steps": stats.steps if stats else 0,
        "per_rank_running": list(stats.per_rank_running) if stats else [],
        "kv_bytes_in": kv.bytes_in,
        "kv_bytes_out": kv.bytes_out,
        "kv_bytes_early": kv.bytes_early,
        "kv_leases": life.held(),
        "kv_leases_expired": kv.expired,
        "kv_handed_over": kv.handed_over,
        "kv_given_up": kv.given_up,
        "kv_pulls": kv.pulls,
        "kv_pulls_failed": kv.pulls_failed,
        "agent": pod.loaded.agent.name if pod.loaded else None,
        "fingerprint": pod.loaded.fingerprint if pod.loaded else None,
    }


def _probes(app: FastAPI, pod: Pod) -> None:
    def answer(probe: Probe) -> JSONResponse:
        return JSONResponse(probe.body, status_code=probe.status)

    @app.get(STARTUPZ)
    async def startupz() -> JSONResponse:
        return answer(startup_probe(pod.life.state, pod.start_phases()))

    @app.get(LIVEZ)
    async def livez() -> JSONResponse:
        stuck = pod.loaded.engine.seconds_without_progress() if pod.loaded else 0.0
        return answer(live_probe(stuck, pod.failure))

    @app.get(READYZ)
    async def readyz() -> JSONResponse:
        probe = ready_probe(pod.life.state, pod.life.in_flight)
        paths = pod.counters.rates.card()
        # The operator makes an event of a slow one: this pod has no token of the API.
        return answer(replace(probe, body=probe.body | {"kv_paths": paths}) if paths else probe)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(pod.metrics.text(), media_type=CONTENT_TYPE)


def _internal(app: FastAPI, pod: Pod) -> None:
    @app.get("/internal/v1/state")
    async def read_state() -> JSONResponse:
        return JSONResponse(state(pod))

    @app.post("/internal/v1/drain")
    async def drain(request: Request) -> JSONResponse:
        return JSONResponse(await pod.life.drain_call(await read_body(request, dict)))


def _text_routes(app: FastAPI, pod: Pod) -> None:
    """What needs the tokenizer and nothing else."""

    async def answer(request: Request, use: Callable[..., dict[str, Any]]) -> JSONResponse:
        body = await read_body(request, dict)
        with pod.life.serving():
            limits = {"model": pod.config.model.name, "max_model_len": pod.config.model.max_model_len}
            work = partial(use, body, pod.parts().tokenizer, **limits)
            # The answer is written there too: a long text's ids take a while.
            return await asyncio.to_thread(lambda: JSONResponse(work()))

    @app.post("/internal/v1/tokenize")
    async def post_tokenize(request: Request) -> JSONResponse:
        return await answer(request, tokenize)

    @app.post("/internal/v1/detokenize")
    async def post_detokenize(request: Request) -> JSONResponse:
        return await answer(request, detokenize)


def _prefill_routes(app: FastAPI, pod: Pod) -> None:
    @app.post("/internal/v1/prefill")
    async def post_prefill(request: Request) -> Response:
        call = await read_body(request, partial(read_call, PrefillCall))

        async def work(sender: Sender, watch: Watch) -> None:
            await prefill(pod, call, sender, watch)

        return _answering(pod, request, call.id, work)

    @app.get(AGENT_PATH)
    async def agent() -> JSONResponse:
        return JSONResponse(agent_card(pod.parts().agent.described).model_dump())

    @app.post(LEASE_PATH)
    async def lease(request: Request) -> JSONResponse:
        call = await read_body(request, partial(read_call, LeaseCall))
        return JSONResponse((await renew_lease(pod, call)).model_dump())

    @app.post(BEAT_PATH)
    async def beat(request: Request) -> JSONResponse:
        call = await read_body(request, partial(read_call, BeatCall))
        return JSONResponse(heartbeat(pod, call).model_dump())

    @app.post(PROGRESS_PATH)
    async def look(request: Request) -> Response:
        card = await progress(pod, await read_body(request, partial(read_call, ProgressCall)))
        raw = card.model_dump_json() if card.prompt is None else await asyncio.to_thread(card.model_dump_json)
        return Response(raw, media_type="application/json")

    @app.post(RELEASE_PATH)
    async def release(request: Request) -> JSONResponse:
        return JSONResponse(release_lease(pod, await read_body(request, dict)))


def _decode_routes(app: FastAPI, pod: Pod) -> None:
    @app.post("/internal/v1/decode")
    async def post_decode(request: Request) -> Response:
        call = await read_body(request, partial(read_call, DecodeCall))

        async def work(sender: Sender, watch: Watch) -> None:
            await decode(pod, call, sender, watch)

        return _answering(pod, request, call.id, work)

    @app.post("/internal/v1/early")
    async def post_early(request: Request) -> JSONResponse:
        call = await read_body(request, partial(read_call, EarlyCall))
        with pod.life.serving():
            return JSONResponse({"id": call.id, "begun": pod.parts().early.begin(call.id, call.address)})


def _answering(pod: Pod, request: Request, call_id: str, work: Callable[[Sender, Watch], Awaitable[None]]) -> Response:
    """The answer to one leg of a request: watched, traced, and cancelled when the router goes away."""
    request_id = request.headers.get("x-request-id") or call_id

    def failed(error: Exception) -> ApiError:
        answer = told(error, call_id, pod.loaded.stopped) if pod.loaded else told(error, call_id)
        pod.metrics.failed.labels(pod.metrics.model, str(answer.status)).inc()
        return answer

    async def watched(sender: Sender) -> None:
        attributes = {"glm52.request_id": request_id, "glm52.call": call_id, "gen_ai.request.model": pod.metrics.model}
        with bound(request_id=request_id), trace.serving(pod.role, request.headers, attributes) as span:
            try:
                await work(sender, Watch(pod.metrics, span))
            except Exception as error:
                answer = failed(error)
                span.answered(answer.status, answer.message)
                raise answer from error

    # What `watched` raises is told already.
    same = partial(told, request_id=call_id)
    return Answering(watched, request_id=request_id, failed=same, on_disconnect=pod.metrics.aborted.inc)


def _answer(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _answer(no_route(request.method, request.url.path))
    if error.status_code == 405:
        return _answer(wrong_method(request.method, request.url.path, (error.headers or {}).get("Allow", "")))
    return _answer(ApiError(error.status_code, str(error.detail)))


async def _unforeseen(request: Request, error: Exception) -> Response:
    return _answer(told(error, "-"))
