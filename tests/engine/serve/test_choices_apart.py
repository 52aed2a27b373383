"""Choices that wait for places, that lose their client, that fail: each deployment is one of its own."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from tests.engine.serve.deployment import MODEL, PROMPT, Builder, body, events, until
from tests.engine.serve.fakes import FakeEngine, expected_text


async def test_more_choices_than_fit_at_once_take_turns(build: Builder) -> None:
    """Two requests whose choices held places while they wait for more would wait for each other for ever."""
    made = await build.deployment([FakeEngine()], [FakeEngine(num_blocks=20)])
    for _ in range(2):
        for answer in await asyncio.gather(*(made.post("/v1/completions", body(n=5)) for _ in range(2))):
            texts = [choice["text"] for choice in answer.json()["choices"]]
            assert texts == [expected_text(PROMPT, 12, choice) for choice in range(5)]
    await made.idle()


async def test_odd_strings_anywhere_break_nothing(build: Builder, caplog: pytest.LogCaptureFixture) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine()])
    half = "a\ud83d b\u0000"
    sent = {"stop": half, "user": half, "cache_salt": half, half: half, "chat_template_kwargs": None}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": half, half: half}], "max_tokens": 4, **sent}
    with caplog.at_level(logging.WARNING):
        for more in ({}, {"stream": True}):
            raw, kind = json.dumps({**chat, **more}).encode(), {"content-type": "application/json"}
            answer = await made.post("/v1/chat/completions", raw, headers=kind)
            assert answer.status == 200, answer.raw
            answer.raw.decode()
    told = [record for record in caplog.records if "does not know" in record.getMessage()]
    assert [record.__dict__["fields"] for record in told] == [["a\ufffd b\u0000"]] * 2
    await made.idle()


async def test_a_lost_client_frees_every_choice(build: Builder) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine(step_seconds=0.05, num_blocks=40)])
    request = asyncio.create_task(made.post("/v1/completions", body(n=6, max_tokens=60, stream=True)))
    await until("a choice runs and another one waits", lambda: _mixed(made.decode[0].engine))
    request.cancel()
    await asyncio.wait_for(made.idle(), 5)
    assert made.prefill[0].process.pod.counters.given_up == 1


def _mixed(engine: FakeEngine) -> bool:
    stats = engine.stats()
    return stats.running > 0 and stats.waiting > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": 1, "seed": 3}, {"stop": "x", "max_tokens": 1}])
async def test_an_end_as_the_very_first_token(build: Builder, stream: bool, more: dict[str, Any]) -> None:
    """Prefill draws it; decode has nothing left to do and still gives the whole answer, once."""
    made = await build.deployment([FakeEngine(ends_after=0)], [FakeEngine()])
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await made.post("/v1/completions", body(**more, **options))
    assert answer.status == 200
    parts = events(answer.raw)[:-1] if stream else [answer.json()]
    choices, last = [choice for part in parts for choice in part["choices"]], parts[-1]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("", "stop")] * more.get("n", 1)
    assert last["usage"]["completion_tokens"] == more.get("n", 1)
    assert made.decode[0].engine.decoded == []
    await made.idle()


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_logits_that_are_no_numbers_fail_one_request(build: Builder, stream: bool, at: int) -> None:
    made = await build.deployment([FakeEngine(no_number_at=at)], [FakeEngine(no_number_at=at)])
    answer = await made.post("/v1/completions", body(stream=stream))
    if stream and at:
        *chunks, last = events(answer.raw)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * at
    else:
        last = answer.json()
        assert answer.status == 500
    assert last["error"]["code"] == "not_a_number"
    await made.idle()
