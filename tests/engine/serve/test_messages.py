"""Lists of messages that are legal and odd: every template renders them, and the deployment answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from glm52_engine.serve.openai import read_request
from glm52_engine.serve.text import prompt_ids
from glm52_engine.tokenizer import Tokenizer
from tests.engine.serve.deployment import MODEL, Builder
from tests.engine.serve.fakes import FakeEngine


def says(role: str, content: Any = "Hi", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(arguments: Any) -> dict[str, Any]:
    made = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return says("assistant", None, tool_calls=made)


ODD = {
    "lone assistant": [says("assistant")],
    "lone system": [says("system")],
    "lone developer": [says("developer")],
    "lone tool": [says("tool", tool_call_id="nobody")],
    "nothing said": [says("user", ""), says("assistant", ""), says("system", "")],
    "assistant without content": [says("user"), says("assistant", None)],
    "no calls": [says("user"), says("assistant", "", tool_calls=[])],
    "assistant last": [says("user"), says("assistant")],
    "assistant twice": [says("assistant"), says("assistant")],
    "system in the middle": [says("user"), says("system"), says("user")],
    "parts": [says("user", [{"type": "text", "text": "a"}, {"type": "text", "text": ""}])],
    "call without answer": [says("user"), calls("{}"), says("user")],
    "call without arguments": [says("user"), calls(""), says("tool", "")],
    "arguments of every type": [says("user"), calls('{"a": null, "b": [1.5, true], "c": {"d": "e"}}')],
    "half a surrogate pair in arguments": [says("user"), calls(r'{"a\udc00": "b\ud83d"}'), says("tool")],
    "an answer that is no text": [says("user"), calls("{}"), says("tool", "\x00")],
}


@pytest.fixture(scope="module")
def tokenizers(tiny_checkpoint: Path, demo_checkpoint: Path) -> list[Tokenizer]:
    return [Tokenizer.load(tiny_checkpoint), Tokenizer.load(demo_checkpoint)]


@pytest.mark.parametrize("messages", ODD.values(), ids=ODD)
def test_every_template_renders_them(tokenizers: list[Tokenizer], messages: list[Any]) -> None:
    for tokenizer in tokenizers:
        asked = read_request("chat", {"model": MODEL, "messages": messages}, MODEL)
        assert prompt_ids(asked, tokenizer)


async def test_the_deployment_answers_them(build: Builder) -> None:
    build.max_model_len = 2048
    made = await build.deployment([FakeEngine(num_blocks=512)], [FakeEngine(num_blocks=512)])
    bodies = [{"model": MODEL, "messages": messages, "max_tokens": 1} for messages in ODD.values()]
    answers = await asyncio.gather(*(made.post("/v1/chat/completions", sent) for sent in bodies))
    assert [answer.raw for answer in answers if answer.status != 200] == []
    await made.idle()
