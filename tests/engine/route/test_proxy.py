"""The router before engine pods that fail in every way; the good ones have real NIXL and a fake model."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from glm52_engine.route import legs
from tests.engine.serve.deployment import HEADERS, PROMPT, Builder, Deployment, body, builder, events, until, value
from tests.engine.serve.fakes import FakeEngine, expected_text

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest_asyncio.fixture
async def build(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> AsyncIterator[Builder]:
    async with builder(monkeypatch, tiny_checkpoint) as made:
        yield made


class BadPod:
    """Ready, and then does `handler` to every call, and `livez` when it is asked whether it lives."""

    def __init__(self, handler: Handler, livez: Handler | None = None) -> None:
        self.calls: list[str] = []
        self.handler = handler
        self.livez = livez or self._ready
        self.url = ""

    async def start(self) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/livez", self.livez)
        app.router.add_post("/internal/v1/{call:.*}", self._call)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _call(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.match_info["call"])
        return await self.handler(request)


Bad = Callable[..., Awaitable[BadPod]]


@pytest_asyncio.fixture
async def bad() -> AsyncIterator[Bad]:
    runners: list[web.AppRunner] = []

    async def make(handler: Handler, livez: Handler | None = None) -> BadPod:
        pod = BadPod(handler, livez)
        runners.append(await pod.start())
        return pod

    yield make
    for runner in runners:
        await runner.cleanup()


async def busy(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "draining", "code": "not_ready"}}, status=503)


async def broken(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def half_a_head(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 200 OK\r\ncontent-le")
    request.transport.close()
    return web.Response()


async def refuses(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no", "type": "x", "param": "p", "code": None}}, status=400)


async def bad_gateway(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no KV", "code": "kv_transfer_failed"}}, status=502)


async def half_a_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"choices": [')
    await asyncio.sleep(0.05)
    assert request.transport is not None
    request.transport.abort()
    return response


async def ask(made: Deployment, count: int = 1, **more: Any) -> list[Any]:
    answers = await asyncio.gather(*(made.post("/v1/completions", body(**more)) for _ in range(count)))
    return [(a.status, a.json()["choices"][0]["text"] if a.status == 200 else a.json()["error"]) for a in answers]


GOOD = (200, expected_text(PROMPT, 12))


@pytest.mark.parametrize("handler", [busy, broken, half_a_head], ids=lambda handler: handler.__name__)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_pod_that_fails_before_its_answer_is_replaced_by_another(
    build: Builder, bad: Bad, handler: Handler, role: str
) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine()], router=False)
    pod = await bad(handler)
    urls = {"prefill": [made.prefill[0].url], "decode": [made.decode[0].url]}
    urls[role].append(pod.url)
    made.url = await build.router(urls["prefill"], urls["decode"])
    assert await ask(made, 6) == [GOOD] * 6
    assert pod.calls
    await made.idle()


async def test_a_failed_hand_off_starts_again_from_the_prompt(build: Builder, bad: Bad) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine()], router=False)
    pod = await bad(bad_gateway)
    made.url = await build.router([made.prefill[0].url], [made.decode[0].url, pod.url])
    assert await ask(made, 4) == [GOOD] * 4
    await made.idle()


async def test_a_refusal_is_handed_on_and_not_repeated(build: Builder, bad: Bad) -> None:
    pod, idle = await bad(refuses), await bad(broken)
    made = Deployment(build.session, url=await build.router([pod.url], [idle.url]))
    assert await ask(made) == [(400, {"message": "no", "type": "x", "param": "p", "code": None})]
    assert (pod.calls.count("prefill"), idle.calls) == (1, [])


def answers(status: int) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = {"error": {"message": "said by the pod", "type": "x", "param": "p", "code": "c"}}
        return web.json_response(body, status=status)

    return handler


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_failing_leg_s_answer_is_the_client_s_and_the_other_leg_holds_nothing(
    build: Builder, bad: Bad, role: str
) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine()], router=False)
    pod = await bad(refuses)
    urls = {"prefill": made.prefill[0].url, "decode": made.decode[0].url, role: pod.url}
    made.url = await build.router([urls["prefill"]], [urls["decode"]])
    for status, stream in itertools.product([400, 404, 409, 413, 422, 500], [False, True]):
        pod.handler, before = answers(status), pod.calls.count(role)
        answer = await made.post("/v1/completions", body(stream=stream))
        assert (answer.status, answer.json()["error"]["message"]) == (status, "said by the pod")
        assert pod.calls.count(role) == before + 1
    await made.idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_that_says_nothing_ends_by_its_time_limit(
    build: Builder, bad: Bad, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    monkeypatch.setattr(legs, "SILENCE_SECONDS", 0.1)
    made = await build.deployment([FakeEngine()], [FakeEngine()], router=False)
    pod = await bad(silent)
    urls = {"prefill": made.prefill[0].url, "decode": made.decode[0].url, role: pod.url}
    made.url = await build.router([urls["prefill"]], [urls["decode"]])
    answer = await made.post("/v1/completions", body())
    assert (answer.status, answer.json()["error"]["code"]) == (503, f"{role}_unreachable")
    assert "retry-after" in answer.headers
    await made.idle()


async def test_a_client_that_leaves_during_prefill_is_told_to_the_pod_by_name(build: Builder, bad: Bad) -> None:
    """Closing the connection is not enough: the answer may be on its way, and then KV is held for it."""
    released: list[str] = []

    async def slow(request: web.Request) -> web.StreamResponse:
        if request.match_info["call"] == "kv/release":
            released.append((await request.json())["id"])
            return web.json_response({})
        await asyncio.sleep(60)
        return web.Response()

    pod = await bad(slow)
    made = Deployment(build.session, url=await build.router([pod.url], [pod.url]))
    request = asyncio.create_task(made.post("/v1/completions", body()))
    await until("prefill is called", lambda: "prefill" in pod.calls)
    request.cancel()
    await until("the pod is told", lambda: len(released) == 1)
    assert released[0].endswith(".0")


@pytest.mark.parametrize(
    "raw",
    [b"[]", b"{", b'{"kv": 3}', b'{"kv": {"agent": "x"}}', b"\xff"],
    ids=["array", "half", "number", "no address", "bytes"],
)
async def test_a_prefill_pod_that_answers_nonsense_is_a_502(build: Builder, bad: Bad, raw: bytes) -> None:
    async def nonsense(request: web.Request) -> web.StreamResponse:
        return web.Response(body=raw)

    pod = await bad(nonsense)
    made = Deployment(build.session, url=await build.router([pod.url], [pod.url]))
    assert [(status, error["code"]) for status, error in await ask(made)] == [(502, "prefill_lost")]


async def test_when_nobody_works_the_client_is_told_in_bounded_time(build: Builder, bad: Bad) -> None:
    pod, other = await bad(busy), await bad(busy)
    made = Deployment(build.session, url=await build.router([pod.url], [other.url]))
    began = time.monotonic()
    answer = await made.post("/v1/completions", body(stream=True))
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert pod.calls.count("prefill") == 3
    assert time.monotonic() - began < 10


async def test_without_a_ready_pod_a_request_waits_for_one_and_then_gives_up(build: Builder) -> None:
    url = await build.router(["http://127.0.0.1:9"], ["http://127.0.0.1:9"], wait_seconds=0.3, wait=False)
    await build.answers(url + "/livez")
    made = Deployment(build.session, url=url)
    assert [(status, error["code"]) for status, error in await ask(made)] == [(503, "no_prefill_pod")]


async def test_a_stream_that_is_cut_ends_with_an_error_and_without_done(build: Builder, bad: Bad) -> None:
    # Nobody pulls the prompt's KV here, and a drain waits for that: at most for the window.
    prefill = await build.pod("prefill", FakeEngine(), window=0)
    made = await build.deployment([], [], router=False)
    pod = await bad(half_a_stream)
    made.url = await build.router([prefill.url], [pod.url])
    answer = await made.post("/v1/completions", body(stream=True))
    assert answer.status == 200
    assert answer.raw.startswith(b'data: {"choices": [\n\ndata: {"error"')
    assert b"[DONE]" not in answer.raw
    assert b"decode_lost" in answer.raw


async def test_a_draining_pod_gets_no_new_requests_and_its_streams_finish(build: Builder) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine(step_seconds=0.05), FakeEngine(step_seconds=0.05)])
    streams = [asyncio.create_task(made.post("/v1/completions", body(max_tokens=40, stream=True))) for _ in range(2)]
    await until("both decode", lambda: all(pod.engine.decoded for pod in made.decode))
    ending = asyncio.create_task(made.decode[0].end())
    seen = len(made.decode[0].engine.decoded)
    assert await ask(made, 3) == [GOOD] * 3
    assert len(made.decode[0].engine.decoded) == seen
    assert [events((await stream).raw)[-1] for stream in streams] == [b"[DONE]"] * 2
    assert await ending == 0


async def test_text_and_tokens_are_asked_of_a_prefill_pod_and_of_another_if_that_one_fails(
    build: Builder, bad: Bad
) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine()], router=False)
    pod = await bad(busy)
    made.url = await build.router([made.prefill[0].url, pod.url], [made.decode[0].url])
    for _ in range(3):
        tokens = await made.post("/tokenize", {"prompt": "hi"})
        assert (tokens.status, tokens.json()["tokens"]) == (200, list(b"hi"))
        text = await made.post("/detokenize", {"tokens": list(b"hi")}, headers={"x-request-id": "mine"})
        assert (text.json(), text.headers["x-request-id"]) == ({"prompt": "hi"}, "mine")
    assert {"tokenize", "detokenize"} & set(pod.calls)
    refused = await made.post("/tokenize", {"model": "other", "prompt": "hi"})
    assert (refused.status, refused.json()["error"]["code"]) == (404, "model_not_found")
    wrong = await made.post("/detokenize", {"tokens": [-1]})
    assert (wrong.status, wrong.json()["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize("split", [0, 5])
async def test_a_client_that_leaves_with_a_whole_stream_was_answered(build: Builder, bad: Bad, split: int) -> None:
    """Many close as soon as they have read [DONE], before the router sees the pod's connection end."""
    left = asyncio.Event()

    async def whole_then_open(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in (b'data: {"choices": []}\n\ndata: [DO'[: -split or None], b"data: [DO"[-split:] * bool(split)):
            await response.write(piece)
        await response.write(b"NE]\n\n")
        await left.wait()
        return response

    made = await build.deployment([FakeEngine()], [], router=False)
    pod = await bad(whole_then_open)
    made.url = await build.router([made.prefill[0].url], [pod.url])

    async def answered() -> float:
        return await value(made, made.url, "glm52_router_requests_total", endpoint="completions", status="200")

    async with made.session.post(made.url + "/v1/completions", json=body(stream=True)) as response:
        text = b""
        while not text.endswith(b"[DONE]\n\n"):
            text += await response.content.readany()
        response.close()
    for _ in range(2000):
        if await answered():
            break
        await asyncio.sleep(0.01)
    left.set()
    assert (await answered(), await value(made, made.url, "glm52_router_aborted_total")) == (1, 0)


async def test_a_router_that_drains_lets_its_connections_go(build: Builder) -> None:
    """A client that keeps one would be refused here, or cut off, where another router would have served it."""
    made = await build.deployment([FakeEngine()], [FakeEngine(step_seconds=0.05)])
    before = await made.post("/v1/completions", body())
    seen = len(made.decode[0].engine.decoded)
    streaming = asyncio.create_task(made.post("/v1/completions", body(max_tokens=20)))
    await until("it decodes", lambda: len(made.decode[0].engine.decoded) > seen)
    drained = await made.post("/internal/v1/drain", {"wait_seconds": 0}, headers=HEADERS)
    late = await made.post("/v1/completions", body(stream=True))
    assert (before.status, before.headers.get("connection")) == (200, None)
    assert [(a.status, a.headers.get("connection")) for a in (drained, late)] == [(200, "close"), (503, "close")]
    last = await streaming
    assert (last.status, last.headers.get("connection")) == (200, "close")
