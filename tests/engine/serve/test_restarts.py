"""Pods that come back at the address that they had: known by what they are now, and at once."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from aiohttp import web

from glm52_engine.route.process import IDLE_SECONDS
from glm52_engine.serve.process import QuietServer
from tests.engine.serve.deployment import PROMPT, Builder, Deployment, Handoff, body
from tests.engine.serve.fakes import FakeEngine, expected_text


async def restart(build: Builder, made: Deployment, role: Any) -> None:
    pods = getattr(made, role)
    port = int(pods[0].url.rpartition(":")[2])
    assert await pods[0].end() == 0
    pods[0] = await build.pod(role, FakeEngine(), port=port)
    await build.answers(made.url + "/readyz")


async def test_a_pod_that_restarts_at_its_address_serves_at_once(build: Builder) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine()])
    hand = Handoff(made)
    assert (await made.post("/v1/completions", body())).status == 200
    old = await hand.prefill()
    assert (await hand.decode(old))[0] == 200
    # Decode knew the first prefill pod well; the second decode pod never met it.
    for role in ("prefill", "decode"):
        await restart(build, made, role)
        # Even where the successor holds the same prompt in the same blocks it is not the one that is meant: the
        # reference is refused, and nobody waits for the agent that is gone.
        call = await hand.prefill()
        call["kv"]["agent"] = old["kv"]["agent"]
        status, answer = await asyncio.wait_for(hand.decode(call), 5)
        assert (status, answer["error"]["code"]) == (502, "kv_transfer_failed")
        assert re.search("is gone|has restarted", answer["error"]["message"])
        answers = await asyncio.gather(*(made.post("/v1/completions", body()) for _ in range(3)))
        assert [answer.status for answer in answers] == [200] * 3
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {expected_text(PROMPT, 12)}
        await made.idle()


async def test_connections_that_died_while_idle_cost_no_request(build: Builder) -> None:
    """Hours later, or behind a firewall that forgets: as many dead ones as the last burst had requests."""
    kept: set[Any] = set()

    async def answer(request: web.Request) -> web.Response:
        kept.add(request.transport)
        return web.json_response({"kv": None} if request.path.endswith("prefill") else {"said": "it"})

    app = web.Application()
    app.router.add_get("/readyz", answer)
    app.router.add_post("/internal/v1/{call}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    urls = []
    for _ in range(2):
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[-1][1]}")
    try:
        made = Deployment(build.session, url=await build.router(urls[:1], urls[1:]))
        for _ in range(2):
            answers = await asyncio.gather(*(made.post("/v1/completions", body()) for _ in range(12)))
            assert [each.status for each in answers] == [200] * 12
            for transport in kept:
                transport.abort()
            kept.clear()
        async with made.session.get(made.url + "/metrics") as response:
            assert "glm52_router_aborted_total 0.0" in await response.text()
    finally:
        await runner.cleanup()


def test_the_router_is_the_one_that_closes_idle_connections() -> None:
    """A pod that closed one while a request is on its way there would lose it."""
    assert QuietServer(lambda scope, receive, send: None).config.timeout_keep_alive > 2 * IDLE_SECONDS  # type: ignore[arg-type, return-value]
