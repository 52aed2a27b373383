"""Answers that have to fit something, from the real engine on CPU: a random model that a grammar holds to it."""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from glm52_engine.tokenizer import Tokenizer
from tests.engine.runtime.support import Maker
from tests.engine.serve.deployment import MODEL, Answer, Deployment, Handoff, builder, events

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 1},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": "person", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "person"}}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployed(tiny_checkpoint: Path) -> AsyncIterator[Deployment]:
    maker = Maker(tiny_checkpoint)
    with pytest.MonkeyPatch.context() as monkeypatch:
        async with builder(monkeypatch, tiny_checkpoint) as build:
            build.max_model_len = 1024
            engines: list[Any] = [maker.make(max_model_len=1024, blocks=256) for _ in range(2)]
            for engine in engines:
                engine.start()
            yield await build.deployment(engines[:1], engines[1:])


@pytest_asyncio.fixture(loop_scope="module")
async def made(deployed: Deployment) -> AsyncIterator[Deployment]:
    """Every test leaves the pods as it found them: empty."""
    yield deployed
    await deployed.idle()


async def ask(made: Deployment, stream: bool = False, seed: int = 1, **more: Any) -> tuple[dict[str, Any], str]:
    """The message and the finish reason."""
    sent = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "seed": seed, "max_tokens": 400, **more}
    answer = await made.post("/v1/chat/completions", {**sent, "stream": stream})
    assert answer.status == 200, answer.raw
    if not stream:
        choice = answer.json()["choices"][0]
        return choice["message"], choice["finish_reason"]
    *chunks, done = events(answer.raw)
    assert done == b"[DONE]"
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                message["tool_calls"].append({**call, "function": {**call["function"], "arguments": ""}})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, chunks[-1]["choices"][0]["finish_reason"]


streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@streamed
async def test_json_that_fits_its_schema(made: Deployment, stream: bool) -> None:
    for seed in range(1 if stream else 2):
        message, finish = await ask(made, stream, seed, response_format=SCHEMA_FORMAT)
        assert finish == "stop"
        jsonschema.validate(json.loads(message["content"]), SCHEMA)


@streamed
async def test_the_same_seed_gives_the_same_answer(made: Deployment, stream: bool) -> None:
    first, second = [await ask(made, stream, 7, guided_regex="[a-z]{12}") for _ in range(2)]
    assert first == second


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no", "maybe"]}}, "yes|no|maybe"),
        ({"guided_choice": ["nö"]}, "nö"),
        ({"guided_grammar": 'root ::= "x" ("y" | "z")'}, "x(y|z)"),
        ({"structured_outputs": {"json": {"enum": [1, None]}}}, "1|null"),
        ({"guided_choice": ["yes"], "ignore_eos": True, "min_tokens": 20}, "yes"),
        ({"guided_choice": ["yes"], "temperature": 0, "logit_bias": {"121": -100}, "top_k": 1}, "yes"),
    ],
)
async def test_other_forms(made: Deployment, more: Any, pattern: str) -> None:
    message, finish = await ask(made, **more)
    assert finish == "stop"
    assert re.fullmatch(pattern, message["content"])


class Kind(enum.Enum):
    A = "a"
    B = "b"


class Inner(BaseModel):
    ok: bool
    size: Literal[1, 2]


class Outer(BaseModel):
    kind: Kind = Field(description="One of them.")
    inner: Inner | None
    many: list[Inner] = Field(max_length=1)


async def test_the_official_client_parses_into_a_model(made: Deployment) -> None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=made.url + "/v1", api_key="-") as client:
        answer = await client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], response_format=Outer, seed=1, max_tokens=400
        )
    assert isinstance(answer.choices[0].message.parsed, Outer)


async def test_completions_too(made: Deployment) -> None:
    sent = {"model": MODEL, "prompt": "hi", "max_tokens": 20, "guided_choice": ["yes", "no"], "n": 3}
    answer = (await made.post("/v1/completions", sent)).json()
    assert {choice["text"] for choice in answer["choices"]} <= {"yes", "no"}
    assert len(answer["choices"]) == 3


@streamed
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0},
        {"top_p": 0.1, "top_k": 1},
        {"logit_bias": {str(token): -100 for token in range(97, 123)}},
        {"guided_regex": "[a-z]{6}", "presence_penalty": 2},
    ],
    ids=["plain", "greedy", "filtered", "biased", "grammar"],
)
async def test_log_probabilities_are_numbers_whatever_else_is_asked(made: Deployment, stream: bool, more: Any) -> None:
    """Of the first token, which prefill draws, as of the others."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 6}
    sent = {**chat, "logprobs": True, "top_logprobs": 20, "stream": stream, **more}
    answer = await made.post("/v1/chat/completions", sent)
    assert answer.status == 200, answer.raw
    parts = events(answer.raw)[:-1] if stream else [answer.json()]
    scores = [score for part in parts for choice in part["choices"] for score in choice["logprobs"]["content"]]
    assert len(scores) == 6
    for score in scores:
        values = [top["logprob"] for top in score["top_logprobs"]]
        assert all(-9999 <= value <= 0 for value in [score["logprob"], *values])
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert score["token"] in [top["token"] for top in score["top_logprobs"]]


@streamed
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_call_that_has_to_be_made_comes_typed(made: Deployment, stream: bool, choice: Any) -> None:
    message, finish = await ask(made, stream, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert finish == "tool_calls"
    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, SCHEMA if call["function"]["name"] == "person" else {"const": {}})
    assert not message["content"]
    if choice == NAMED:
        assert call["function"]["name"] == "person"


async def test_strict_tools_constrain_what_the_model_chooses(made: Deployment) -> None:
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    message, _ = await ask(made, tools=strict, logit_bias={"269": 100, "270": 100}, parallel_tool_calls=False)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] in ("person", "now")


@pytest.mark.parametrize("opened", [True, False])
async def test_reasoning_comes_before_the_grammar(made: Deployment, tiny_checkpoint: Path, opened: bool) -> None:
    """By hand, since the tiny model's template leaves `<think>` to the model."""
    tokenizer, hand = Tokenizer.load(tiny_checkpoint), Handoff(made)
    prompt = tokenizer.encode("<|user|>hi<|assistant|>" + ("<think>" if opened else "</think>"))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 1}
    # Nearly every token is the end of the reasoning, once reasoning is what comes.
    body |= {"guided_choice": ["yes"], "logit_bias": {"268": 100}}
    made.prefill[0].process.pod.parts().tokenizer.encode_chat = lambda *_, **__: prompt  # type: ignore[method-assign]
    try:
        call = {"id": f"r{opened}", "endpoint": "chat", "body": body}
        given = (await made.internal(made.prefill[0], "prefill", call)).json()
    finally:
        del made.prefill[0].process.pod.parts().tokenizer.encode_chat
    status, answer = await hand.decode({**given, **call})
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    assert message["content"] == "yes"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == (1 if opened else 0)


async def test_a_first_token_that_does_not_fit_is_refused(made: Deployment) -> None:
    hand = Handoff(made)
    call = await hand.prefill(guided_choice=["yes"])
    call["first_tokens"][0]["id"] = ord("n")
    status, answer = await hand.decode(call)
    assert (status, answer["error"]["param"]) == (400, "first_tokens")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objec"}}}},
            "response_format",
            "objec",
        ),
        ({"guided_json": {"not": {}}}, "guided_json", '["not"]'),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "regex"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
    ],
)
async def test_what_cannot_be_is_a_400_that_says_why(
    made: Deployment, stream: bool, more: Any, param: str, words: str
) -> None:
    sent = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream, **more}
    answer: Answer = await made.post("/v1/chat/completions", sent)
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, param)
    assert words in error["message"]
