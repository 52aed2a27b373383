"""Whatever a client sends: an answer or a refusal in OpenAI's shape, never a 500, never the end of a pod."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm52_engine.route.openapi import document
from glm52_engine.runtime.types import RequestError
from glm52_engine.serve import form, openai
from glm52_engine.serve.errors import ApiError
from glm52_engine.serve.fields import parse_object
from glm52_engine.serve.openai import read_request
from glm52_engine.serve.text import engine_request, prompt_ids
from glm52_engine.tokenizer import Tokenizer
from tests.engine.serve.deployment import MODEL, Answer, Deployment, builder
from tests.engine.serve.fakes import FakeEngine

TIMES = int(os.environ.get("GLM52_FUZZ_TIMES", "1"))
"""For a longer run by hand: so many times the examples."""


def examples(count: int) -> settings:
    return settings(max_examples=count * TIMES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


SCHEMAS = document(MODEL)["components"]["schemas"]
FIELDS = sorted(
    {
        *SCHEMAS["ChatRequest"]["properties"],
        *SCHEMAS["CompletionRequest"]["properties"],
        *openai._UNSUPPORTED,
        *openai._HARMLESS,
        *form._GUIDED,
    }
    - {"model"}
)

text = st.text(st.characters(), max_size=8) | st.sampled_from(
    ["", "<|user|>", "</think>", "\ud83d", "\x00", "user", "text"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 0.5, 1e-320, 1e308, float("inf"), 1.0])
    | text
)
KEYS = ("role", "content", "type", "text", "function", "name", "arguments", "tool_calls", "parameters", "json_schema")
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | text, inner, max_size=3),
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": text | values},
        optional={"tool_calls": values, "reasoning_content": values, "name": values, "tool_call_id": values},
    ),
    min_size=1,
    max_size=3,
)
bodies = st.builds(
    lambda fields, messages, prompt: {"model": MODEL, "messages": messages, "prompt": prompt, **fields},
    st.dictionaries(st.sampled_from(FIELDS) | text, values, max_size=4),
    messages | values,
    text | st.lists(st.integers(0, 300), max_size=4) | values,
)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoint)


@examples(50)
@given(st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_a_400(raw: bytes) -> None:
    with contextlib.suppress(ApiError):
        value = parse_object(raw)
        assert isinstance(value, dict)
        json.dumps(value, ensure_ascii=False).encode()


@examples(100)
@given(bodies, st.sampled_from(["chat", "completions"]))
def test_any_body_is_understood_or_refused(tokenizer: Tokenizer, body: dict[str, Any], endpoint: Any) -> None:
    with contextlib.suppress(ApiError, RequestError):
        sent = parse_object(json.dumps(body).encode())
        asked = read_request(endpoint, sent, MODEL)
        prompt = prompt_ids(asked, tokenizer)
        engine_request(asked, "x", prompt, seed=1, max_model_len=4096, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def post(tiny_checkpoint: Path) -> Iterator[Any]:
    """Posts to a deployment of its own, which holds nothing at the end."""
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as monkeypatch:
        stack = contextlib.AsyncExitStack()

        async def start() -> Deployment:
            build = await stack.enter_async_context(builder(monkeypatch, tiny_checkpoint))
            return await build.deployment([FakeEngine()], [FakeEngine()])

        made = runner.run(start())
        yield lambda path, raw: runner.run(made.post(path, raw, headers={"content-type": "application/json"}))
        runner.run(made.idle())
        runner.run(stack.aclose())


@examples(30)
@given(bodies, st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]))
def test_any_body_is_answered_or_refused_by_the_deployment(post: Any, body: dict[str, Any], path: str) -> None:
    answer: Answer = post(path, json.dumps({"max_tokens": 3, **body}).encode())
    assert answer.status in (200, 400), answer.raw
    if answer.status == 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["message"]
    assert b'data: {"error"' not in answer.raw
    answer.raw.decode()
