"""The event loop stays free while a large body is worked on: probes and streams must not wait for it."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from glm52_engine.serve import prefill as prefill_module
from glm52_engine.serve.errors import ApiError
from glm52_engine.serve.lengths import refuse_hopeless
from glm52_engine.serve.openai import read_request
from glm52_engine.serve.pod import Prefilled
from glm52_engine.tokenizer import Tokenizer
from tests.engine.serve.deployment import MODEL, PROMPT, Builder, Deployment, body, events, until
from tests.engine.serve.fakes import FakeEngine, expected_text

BYTES = 30 << 20
SHARE = 0.3
"""Of the time that the large body takes: for so long a probe may wait at most."""


async def slowest_probe(made: Deployment, url: str, while_running: asyncio.Task[Any]) -> float:
    slowest = 0.0
    while not while_running.done():
        began = time.monotonic()
        async with made.session.get(url + "/livez") as response:
            assert response.status == 200
        slowest = max(slowest, time.monotonic() - began)
    return slowest


@pytest.mark.processes  # not for its processes, but for its seconds
@pytest.mark.parametrize(
    "chat",
    [
        pytest.param([{"role": "user", "content": "0 " * (BYTES // 2)}], id="one message"),
        pytest.param([{"role": "user", "content": "0" * 80}] * 50_000, id="a great many messages"),
    ],
)
async def test_probes_are_answered_while_a_large_prompt_is_worked_on(
    build: Builder, monkeypatch: pytest.MonkeyPatch, chat: list[Any]
) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine()])
    # Without the early refusal, and with less to tokenise than would take minutes.
    monkeypatch.setattr(prefill_module, "refuse_hopeless", lambda asked, tokenizer, limit: None)
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: encode(self, text[: 1 << 20]))
    began = time.monotonic()
    asking = asyncio.create_task(made.post("/v1/chat/completions", {"model": MODEL, "messages": chat}))
    await until("prefill works on it", lambda: made.prefill[0].process.life.in_flight > 0 or asking.done(), 30)
    slowest = await slowest_probe(made, made.prefill[0].url, asking)
    took = time.monotonic() - began
    answer = await asking
    assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert slowest < took * SHARE, (slowest, took)


async def test_a_stream_goes_on_while_another_prompt_is_tokenised(
    build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine()])
    gate, understand = threading.Event(), prefill_module.prompt_ids

    def slow(asked: Any, tokenizer: Any) -> Any:
        if asked.prompt == "slow":
            assert gate.wait(20)
        return understand(asked, tokenizer)

    monkeypatch.setattr(prefill_module, "prompt_ids", slow)
    asking = asyncio.create_task(made.post("/v1/completions", body(prompt="slow")))
    await until("prefill tokenises", lambda: made.prefill[0].process.life.in_flight > 0)
    assert events((await made.post("/v1/completions", body(stream=True))).raw)[-1] == b"[DONE]"
    assert not asking.done()
    gate.set()
    assert (await asking).status == 200


async def test_the_answer_that_lists_a_long_prompt_is_written_on_a_thread(
    build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine()])
    write, where = Prefilled.model_dump_json, []

    def written(self: Prefilled) -> str:
        where.append(threading.current_thread() is threading.main_thread())
        return write(self)

    monkeypatch.setattr(Prefilled, "model_dump_json", written)
    for longest in (len(PROMPT) + 1, len(PROMPT)):
        monkeypatch.setattr(prefill_module, "LONG_PROMPT", longest)
        answer = await made.post("/v1/completions", body())
        assert answer.json()["choices"][0]["text"] == expected_text(PROMPT, 12)
    assert where == [True, False]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoint)


def asked(text: str, times: int = 1) -> Any:
    messages = [{"role": "user", "content": text}] * times
    return read_request("chat", {"model": MODEL, "messages": messages}, MODEL)


@pytest.mark.parametrize("times", [1, 50])
def test_a_prompt_that_cannot_fit_is_refused_by_its_beginning(
    times: int, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: seen.append(len(text)) or encode(self, text))
    with pytest.raises(ApiError, match="context is 100 tokens") as caught:
        refuse_hopeless(asked("0123456789 " * 2000, times), tokenizer, 100)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages", "context_length_exceeded")
    assert sum(seen) <= 400


@pytest.mark.parametrize("text", ["0123456789" * 39, "", "x" * 400])
def test_a_prompt_that_may_fit_is_left_to_the_whole_count(text: str, tokenizer: Tokenizer) -> None:
    refuse_hopeless(asked(text), tokenizer, 100)
    refuse_hopeless(read_request("completions", body(prompt=PROMPT * 100), MODEL), tokenizer, 100)
