"""A pod that is stopped in the middle of a call, and others that are only slow."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from glm52_engine.config import Role
from glm52_engine.route import frozen, pulse
from tests.engine.route.test_proxy import Bad, bad  # noqa: F401
from tests.engine.serve.deployment import PROMPT, Builder, Deployment, body, builder, until, value
from tests.engine.serve.fakes import FakeEngine, expected_text

Freezing = Callable[[str], Awaitable[str]]

FROZEN_SECONDS = 0.6


@pytest_asyncio.fixture
async def build(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> AsyncIterator[Builder]:
    monkeypatch.setattr(frozen, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(pulse, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(pulse, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(pulse, "FROZEN_SECONDS", FROZEN_SECONDS)
    async with builder(monkeypatch, tiny_checkpoint) as made:
        yield made


@pytest_asyncio.fixture
async def freezing() -> AsyncIterator[Freezing]:
    """Starts a pod that stops itself within a call: before its answer, in a stream, or in a whole answer."""
    children = []

    async def start(where: str) -> str:
        file = Path(__file__).with_name("frozen_pod.py")
        child = await asyncio.create_subprocess_exec(sys.executable, str(file), where, stdout=asyncio.subprocess.PIPE)
        children.append(child)
        assert child.stdout is not None
        while not (found := re.search(rb"http://\S+", await child.stdout.readline())):
            pass
        return found.group().decode()

    yield start
    for child in children:
        child.send_signal(signal.SIGKILL)
        await child.wait()


async def cut(made: Deployment) -> float:
    return await value(made, made.url, "glm52_router_frozen_total")


async def test_a_stream_of_a_frozen_pod_ends_with_an_error_and_the_log_names_it(
    build: Builder, freezing: Freezing, caplog: pytest.LogCaptureFixture
) -> None:
    # Nobody pulls the prompt's KV here, and a drain waits for that: at most for the window.
    prefill = await build.pod("prefill", FakeEngine(), window=0)
    made = await build.deployment([], [], router=False)
    url = await freezing("stream")
    made.url = await build.router([prefill.url], [url])
    answer = await made.post("/v1/completions", body(stream=True))
    assert answer.status == 200
    assert answer.raw.startswith(b'data: {"choices": []}\n\n\n\ndata: {"error"')
    assert b"decode_lost" in answer.raw
    assert b"[DONE]" not in answer.raw
    assert await cut(made) == 1
    assert [r.__dict__["pod"] for r in caplog.records if r.msg.startswith("a pod is frozen")] == [url]


@pytest.mark.parametrize(("role", "where"), [("decode", "head"), ("decode", "whole"), ("prefill", "head")])
async def test_what_has_sent_nothing_yet_is_served_by_another_pod(
    build: Builder, freezing: Freezing, role: Role, where: str
) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine()], router=False)
    urls = {"prefill": [made.prefill[0].url], "decode": [made.decode[0].url]}
    urls[role].append(await freezing(where))
    made.url = await build.router(urls["prefill"], urls["decode"])
    answers = await asyncio.gather(*(made.post("/v1/completions", body()) for _ in range(4)))
    assert [(a.status, a.json()["choices"][0]["text"]) for a in answers] == [(200, expected_text(PROMPT, 12))] * 4
    assert await cut(made) > 0
    await made.idle()


@pytest.mark.parametrize("streams", [True, False])
async def test_a_pod_that_answers_what_it_is_asked_may_be_silent_for_long(
    build: Builder,
    bad: Bad,  # noqa: F811
    streams: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt, or a full queue: its liveness is answered, however it is judged."""
    # This process may be held up itself.
    monkeypatch.setattr(pulse, "ANSWER_SECONDS", 5)
    asked, go_on = 0, asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        if request.match_info["call"] != "decode":
            return web.json_response({})
        response = web.StreamResponse(headers={"content-type": "text/event-stream" if streams else "application/json"})
        if streams:
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.prepare(request)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def wedged(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response({}, status=503)

    prefill = await build.pod("prefill", FakeEngine(), window=0)
    made = await build.deployment([], [], router=False)
    pod = await bad(slow, wedged)
    made.url = await build.router([prefill.url], [pod.url])
    request = asyncio.create_task(made.post("/v1/completions", body(stream=streams)))
    # A frozen one would long have been cut: it is asked no more often than that.
    await until("it was asked often", lambda: asked >= 2 * FROZEN_SECONDS / 0.1)
    go_on.set()
    assert (await request).raw.endswith(b"data: [DONE]\n\n")
    assert await cut(made) == 0


async def test_a_pod_that_answers_now_and_then_is_not_frozen(
    build: Builder,
    bad: Bad,  # noqa: F811
) -> None:
    asked, over = 0, asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await over.wait()
        return web.json_response({})

    async def every_other_time(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked % 2:
            await over.wait()
        return web.json_response({})

    prefill = await build.pod("prefill", FakeEngine(), window=0)
    made = await build.deployment([], [], router=False)
    pod = await bad(slow, every_other_time)
    made.url = await build.router([prefill.url], [pod.url])
    request = asyncio.create_task(made.post("/v1/completions", body()))
    await until("more questions stayed open than a frozen pod's", lambda: asked >= 4 * pulse.UNANSWERED)
    over.set()
    assert (await request).status == 200
    assert await cut(made) == 0


async def test_a_pod_that_streams_is_never_asked(build: Builder) -> None:
    """What comes from it says more than an answer."""
    made = await build.deployment([FakeEngine()], [FakeEngine(step_seconds=0.03)])
    asked = 0

    async def count(self: frozen.Frozen, url: str) -> None:
        nonlocal asked
        asked += url == made.decode[0].url

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pulse, "QUIET_SECONDS", 1.0)
        patch.setattr(frozen.Frozen, "_ask", count)
        answer = await made.post("/v1/completions", body(max_tokens=60, stream=True))
    assert answer.raw.endswith(b"data: [DONE]\n\n")
    assert asked == 0
