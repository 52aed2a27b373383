"""The official client against the CPU engine: sync and async, whole and streamed, and its errors."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.processes

MODEL = "glm-5.2"
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=60)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "glm52"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "seed": 5}
    whole = client.chat.completions.create(**asked)
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_with_every_ordinary_option(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Scale decode", max_tokens=8, temperature=0, n=2, logprobs=2, stop=["\n\n"], user="u"
    )
    assert {choice.index for choice in answer.choices} == {0, 1}
    first, second = answer.choices
    assert first.text == second.text
    assert first.logprobs is not None
    assert first.logprobs.tokens is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 16


def test_the_request_id_comes_back(client: openai.OpenAI) -> None:
    answer = client.completions.with_raw_response.create(
        model=MODEL, prompt="Hi", max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, openai.BadRequestError, "messages"),
    ],
)
def test_errors_are_the_client_s_own_exceptions(
    client: openai.OpenAI, wrong: dict[str, Any], kind: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "stream": stream, **wrong}
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**asked)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


async def test_many_at_once_and_one_that_is_cancelled(server: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=60) as client:

        async def ask(number: int) -> str | None:
            asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "seed": number}
            return (await client.chat.completions.create(**asked)).choices[0].message.content

        async with await client.completions.create(
            model=MODEL, prompt="Never read to its end", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            await anext(aiter(stream))
            alone = [await ask(number) for number in range(3)]
        assert await asyncio.gather(*(ask(number) for number in range(3))) == alone
