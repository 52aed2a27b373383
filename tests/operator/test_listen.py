"""Asking pods that leave how far they are: beside the passes, as long as they leave, and never in the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from glm52_engine.lifecycle.states import Stage, State, ready_probe
from glm52_operator.plan.drains import Heard
from glm52_operator.reconcile import listen
from glm52_operator.reconcile.listen import ASK_SECONDS, AT_ONCE, Listener, over_http, read
from tests.operator.asking import Pods, until
from tests.operator.conftest import FakeClock

KEY = ("ns", "chat")


@pytest_asyncio.fixture
async def made(clock: FakeClock) -> AsyncIterator[tuple[Listener, Pods[Heard], list[Any]]]:
    pods, news = Pods[Heard](), list[Any]()
    listener = Listener(clock, pods.ask, news.append)
    yield listener, pods, news
    await listener.close()


async def test_news_bring_a_pass_and_the_same_again_does_not(made: Any, clock: FakeClock) -> None:
    listener, pods, news = made
    pods.says["a"] = Heard(3)
    listener.follow(KEY, {"uid": "a"})
    await until(lambda: news == [KEY])
    assert listener.heard(KEY) == {"uid": Heard(3)}
    for says, asked, told in ((Heard(3), 2, 1), (Heard(2), 3, 2), (None, 4, 2)):
        pods.says["a"] = says
        clock.advance(ASK_SECONDS)
        await until(lambda asked=asked: len(pods.asked) == asked and not pods.under_way)
        await asyncio.sleep(0.01)
        assert len(news) == told
    # A pod too busy to answer has not lost what it said.
    assert listener.heard(KEY) == {"uid": Heard(2)}


async def test_what_does_not_leave_any_more_is_not_asked(made: Any, clock: FakeClock) -> None:
    listener, pods, _ = made
    pods.says |= {"a": Heard(1), "b": Heard(1)}
    listener.follow(KEY, {"first": "a", "second": "b"})
    await until(lambda: len(listener.heard(KEY)) == 2)
    listener.follow(KEY, {"second": "b"})
    clock.advance(ASK_SECONDS)
    await until(lambda: pods.asked == ["a", "b", "b"])
    await until(lambda: set(listener.heard(KEY)) == {"second"})
    listener.follow(KEY, {})
    assert listener.heard(KEY) == {}
    clock.advance(10 * ASK_SECONDS)
    await asyncio.sleep(0.01)
    assert len(pods.asked) == 3


async def test_many_pods_are_not_asked_all_at_once(made: Any) -> None:
    listener, pods, _ = made
    for number in range(5):
        listener.follow(("ns", f"d{number}"), {f"u{n}": f"{number}.{n}" for n in range(40)})
    await until(lambda: len(pods.asked) == 200)
    assert pods.most <= AT_ONCE


def test_a_pods_own_words_are_understood() -> None:
    state = State().ready()
    assert read(ready_probe(state, 3).body) is None
    draining = state.drain(1.0, window=30, propagation=5)
    assert read(ready_probe(draining, 3).body) == Heard(3)
    assert read(ready_probe(draining.stop(), 1).body) == Heard(1, stopped=True)
    assert {Stage.DRAINING.value, Stage.STOPPED.value} == {"Draining", "Stopped"}


@pytest.mark.parametrize(
    "body",
    [None, [], "x", {}, {"stage": "Ready"}, {"stage": "Draining"}, {"stage": "Draining", "in_flight": "3"},
     {"stage": "Draining", "in_flight": True}, {"stage": "Draining", "in_flight": -1}],
)  # fmt: skip
def test_anything_else_says_nothing(body: Any) -> None:
    assert read(body) is None


@pytest.mark.parametrize("answer", [b"no JSON", b"\xff\xfe", b"[]", b""])
async def test_over_http(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [b'{"stage": "Draining", "in_flight": 2}', answer]

    async def readyz(request: web.Request) -> web.Response:
        return web.Response(body=answers.pop(0), status=503, content_type="application/json")

    app = web.Application()
    app.router.add_get("/readyz", readyz)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(listen, "API_PORT", runner.addresses[0][1])
    async with aiohttp.ClientSession() as session:
        ask = over_http(session, read)
        assert await ask("127.0.0.1") == Heard(2)
        assert await ask("127.0.0.1") is None
        await runner.cleanup()
        # Nobody listens any more.
        assert await ask("127.0.0.1") is None
