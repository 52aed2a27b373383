"""The traffic driver finds every way in which an answer can be wrong, and knows when it was."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from e2e.traffic import Answer, Failure, Traffic, stream_completion
from e2e.traffic.windows import windows

ERROR = {"error": {"message": "gone", "type": "server_error", "param": None, "code": "decode_lost"}}
DONE = b"data: [DONE]\n\n"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def tokens(*ids: int) -> bytes:
    return event({"choices": [{"token_ids": list(ids)}]})


def stream(*parts: bytes) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    return handle


def answer(status: int, body: Any) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return handle


@contextlib.asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def ask(handle: Handler) -> Answer:
    async with serving(handle) as url, aiohttp.ClientSession() as session:
        return await stream_completion(session, url, "x", max_tokens=2)


@pytest.mark.parametrize(
    ("handle", "failure"),
    [
        pytest.param(stream(tokens(1), tokens(2), DONE), None, id="whole"),
        pytest.param(answer(503, ERROR), Failure.REFUSED, id="an error of OpenAI's form"),
        pytest.param(answer(500, {"detail": "oops"}), Failure.WRONG, id="an error that no client understands"),
        pytest.param(answer(500, {"error": "oops"}), Failure.WRONG, id="an error without its fields"),
        pytest.param(stream(tokens(1), event(ERROR)), Failure.CUT, id="cut with a word"),
        pytest.param(stream(tokens(1), b'data: {"cho\n\n', event(ERROR)), Failure.BROKEN, id="cut in an event"),
        pytest.param(stream(tokens(1), event({"error": "oops"}), DONE), Failure.WRONG, id="cut with a wrong word"),
        pytest.param(stream(tokens(1)), Failure.BROKEN, id="cut without a word"),
    ],
)
async def test_what_a_request_became(handle: Handler, failure: Failure | None) -> None:
    found = await ask(handle)
    assert found.failure == failure, found.error
    assert found.ended >= found.began


async def test_a_refused_connection_is_a_failed_request() -> None:
    async with aiohttp.ClientSession() as session:
        found = await stream_completion(session, "http://127.0.0.1:9", "x", max_tokens=2)
    assert found.failure is Failure.BROKEN


class Server:
    """A server in a thread of its own, as the driver is; its answers change while it runs."""

    def __init__(self) -> None:
        self.handle: Handler = stream(tokens(1, 2), DONE)
        self.ids: list[str] = []
        self.url = ""
        self._up, self._down = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._up.wait(30)
        return self

    def __exit__(self, *error: object) -> None:
        self._down.set()
        self._thread.join(30)

    def _run(self) -> None:
        import asyncio

        async def main() -> None:
            async with serving(self._answer) as self.url:
                self._up.set()
                await asyncio.to_thread(self._down.wait)

        asyncio.run(main())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.ids.append(request.headers["x-request-id"])
        return await self.handle(request)


@pytest.mark.parametrize(
    ("then", "failure"),
    [
        pytest.param(stream(tokens(1, 3), DONE), Failure.WRONG, id="other tokens"),
        pytest.param(stream(tokens(1), DONE), Failure.WRONG, id="too few tokens"),
        pytest.param(stream(tokens(1), event(ERROR)), Failure.CUT, id="a beginning"),
        pytest.param(stream(tokens(2), event(ERROR)), Failure.WRONG, id="a beginning of something else"),
    ],
)
def test_answers_are_held_against_the_first_one_to_the_same_prompt(then: Handler, failure: Failure) -> None:
    with Server() as server, Traffic(server.url, clients=2, max_tokens=2) as traffic:
        traffic.wait_for_more(40)
        assert traffic.failures() == []
        server.handle = then
        traffic.mark("later")
        traffic.wait_for_more(10)
        traffic.stop()
        before, after = traffic.windows()
    assert {a.failure for a in before.answers} <= {None, failure}
    assert {a.failure for a in after.answers} == {failure}
    assert {a.id for a in traffic.answers} == set(server.ids)
    assert len(server.ids) == len(set(server.ids))


def test_windows_hold_what_began_in_them_and_the_longest_time_without_an_answer() -> None:
    answers = [
        Answer("a", 0.5, ended=1.0),
        Answer("b", 1.9, ended=9.0, failure=Failure.CUT),
        Answer("c", 2.0, ended=4.0),
        Answer("d", 8.0, ended=9.0),
        Answer("e", 9.0, ended=12.0),
    ]
    start, kill = windows([(2.0, "kill")], answers, began=0.0, now=10.0)
    assert ([a.prompt for a in start.answers], [a.prompt for a in kill.answers]) == (["a", "b"], ["c", "d", "e"])
    assert ([a.prompt for a in start.failed], kill.failed) == (["b"], [])
    assert (start.longest_gap, kill.longest_gap) == (1.0, 5.0)
    assert str(start) == "start: 2 in 2 s, failed: 1 cut, longest gap 1.0 s"
