"""The official client stays away for as long as Retry-After says, and comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import openai
import pytest
import pytest_asyncio

from glm52_engine.runtime.types import EngineBusy, Prefilled, Request
from tests.engine.serve.deployment import MODEL, Builder, builder
from tests.engine.serve.fakes import FakeEngine


@pytest_asyncio.fixture
async def build(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> AsyncIterator[Builder]:
    async with builder(monkeypatch, tiny_checkpoint) as made:
        yield made


class BusyTwice(FakeEngine):
    refused = 0

    async def prefill(self, request: Request) -> Prefilled:
        if self.refused < 2:
            self.refused += 1
            raise EngineBusy("the queue is full", retry_after=7)
        return await super().prefill(request)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The client's pauses, which are not taken."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(anyio, "sleep", sleep)
    return pauses


async def test_a_full_queue(build: Builder, slept: list[float]) -> None:
    made = await build.deployment([BusyTwice()], [FakeEngine()])
    async with openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=2) as client:
        answer = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert [pause for pause in slept if pause >= 1] == [7, 7]


@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_ready(build: Builder, slept: list[float], stream: bool) -> None:
    url = await build.router(["http://127.0.0.1:9"], ["http://127.0.0.1:9"], wait_seconds=0.05, wait=False)
    await build.answers(url + "/livez")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=1) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model=MODEL, prompt="Hi", max_tokens=4, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (503, "no_prefill_pod")
    assert [pause for pause in slept if pause >= 1] == [2]
