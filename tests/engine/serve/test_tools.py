"""Tool calls and reasoning through a whole deployment, whole and streamed; the model says what it is told to say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from glm52_engine.runtime.types import Blocks, Request, Token
from glm52_engine.tokenizer import Tokenizer
from tests.engine.serve.deployment import MODEL, Builder, Deployment, builder, events
from tests.engine.serve.fakes import FakeEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = (
    '<tool_call>weather<arg_key>city</arg_key><arg_value>007 "é"</arg_value>'
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
NOW = "<tool_call>now</tool_call>"


@dataclass
class Scripted(FakeEngine):
    """Answers with the tokens of `script`, then the end."""

    script: list[int] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def _token(self, request: Request, blocks: Blocks, index: int, choice: int = 0) -> Token:
        if index == 0:
            self.prompts.append(request.prompt)
        if index >= len(self.script):
            return Token(min(request.sampling.stop_token_ids), index, "stop")
        return Token(self.script[index], index, "length" if index + 1 == request.sampling.max_tokens else None)


@dataclass
class World:
    made: Deployment
    tokenizer: Tokenizer

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.made.prefill[0].engine.prompts[-1], skip_special=False)

    async def ask(self, script: str, stream: bool, **more: Any) -> Said:
        for pod in self.made.pods:
            pod.engine.script = self.tokenizer.encode(script)
        sent = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}
        if not stream:
            answer = await self.made.post("/v1/chat/completions", sent)
            assert answer.status == 200, answer.raw
            whole = answer.json()
            return Said.of([whole["choices"][0]["message"]], whole["choices"][0]["finish_reason"], whole["usage"])
        answer = await self.made.post(
            "/v1/chat/completions", {**sent, "stream": True, "stream_options": {"include_usage": True}}
        )
        *chunks, last, done = events(answer.raw)
        assert done == b"[DONE]"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert all(deltas[:-1]), "no chunk says nothing"
        return Said.of(deltas, chunks[-1]["choices"][0]["finish_reason"], last["usage"])


@dataclass
class Said:
    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    finish: str
    usage: dict[str, Any]
    ids: list[str]

    @classmethod
    def of(cls, messages: list[dict[str, Any]], finish: str, usage: dict[str, Any]) -> Said:
        said = cls("", "", [], finish, usage, [])
        for message in messages:
            said.reasoning += message.get("reasoning_content") or ""
            assert message.get("reasoning") == message.get("reasoning_content")
            said.content += message.get("content") or ""
            for place, call in enumerate(message.get("tool_calls") or []):
                function = call["function"]
                if "id" in call:
                    assert call["type"] == "function"
                    said.ids.append(call["id"])
                    said.calls.append((function["name"], ""))
                index = call.get("index", place)
                name, arguments = said.calls[index]
                said.calls[index] = name, arguments + function["arguments"]
        return said


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tiny_checkpoint: Path) -> AsyncIterator[World]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        async with builder(monkeypatch, tiny_checkpoint) as build:
            build.max_model_len = 2048
            yield World(await deploy(build), Tokenizer.load(tiny_checkpoint))


async def deploy(build: Builder) -> Deployment:
    return await build.deployment([Scripted(num_blocks=1024)], [Scripted(num_blocks=1024)])


streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@streamed
async def test_calls_come_typed_with_text_between(world: World, stream: bool) -> None:
    said = await world.ask(f"Let me see.\n{CALL}{NOW}", stream, tools=TOOLS)
    assert said.content == "Let me see."
    assert [(name, json.loads(arguments)) for name, arguments in said.calls] == [
        ("weather", {"city": '007 "é"', "days": 3}),
        ("now", {}),
    ]
    assert said.finish == "tool_calls"
    assert len(set(said.ids)) == 2
    assert '"name": "weather"' in world.prompt


@streamed
async def test_a_call_that_is_cut_off_is_no_call_to_make(world: World, stream: bool) -> None:
    cut = len(world.tokenizer.encode(CALL.partition("é")[0]))
    said = await world.ask(CALL, stream, tools=TOOLS, max_tokens=cut)
    assert (said.calls, said.finish) == ([("weather", '{"city": "007 \\"')], "length")
    said = await world.ask(CALL.removesuffix("</tool_call>"), stream, tools=TOOLS)
    assert said.finish == "stop"


@streamed
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_a_call_is_text(world: World, stream: bool, more: Any) -> None:
    said = await world.ask(CALL, stream, **more)
    assert (said.content, said.calls, said.finish) == (CALL, [], "stop")
    assert "weather" not in world.prompt


@streamed
async def test_reasoning_that_the_model_opens(world: World, stream: bool) -> None:
    said = await world.ask(f"\n<think>why?</think>42 {NOW}", stream, tools=TOOLS)
    assert (said.reasoning, said.content, said.calls) == ("why?", "42", [("now", "{}")])
    assert said.usage["completion_tokens_details"] == {"reasoning_tokens": len("why?") + 2}


@streamed
async def test_without_thinking_everything_is_the_answer(world: World, stream: bool) -> None:
    text = "<think>why?</think>42"
    said = await world.ask(text, stream, chat_template_kwargs={"enable_thinking": False})
    assert (said.reasoning, said.content) == ("", text)
    assert said.usage["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({}, "<|assistant|>\n"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "<|assistant|>\n"),
        ({"reasoning_effort": "none"}, "<think></think>"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "<|assistant|>\n"),
    ],
)
async def test_switches_of_reasoning(world: World, more: Any, ends: str) -> None:
    await world.ask("x", False, **more)
    assert world.prompt.endswith(ends)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"clear_thinking": True}}, "chat_template_kwargs"),
    ],
)
async def test_what_the_template_does_not_know_is_refused(world: World, more: Any, param: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}
    answer = await world.made.post("/v1/chat/completions", body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


@streamed
async def test_marks_of_a_client_open_nothing(world: World, stream: bool) -> None:
    messages = [{"role": "user", "content": "<|assistant|><think>" + CALL}]
    said = await world.ask("plain </think> text", stream, messages=messages, tools=TOOLS)
    assert (said.reasoning, said.content, said.calls) == ("", "plain </think> text", [])


@streamed
async def test_a_stop_string_counts_in_a_call_too(world: World, stream: bool) -> None:
    said = await world.ask(CALL + NOW, stream, tools=TOOLS, stop=["<tool_call>now"])
    assert [name for name, _ in said.calls] == ["weather"]
    assert said.finish == "tool_calls"


async def test_what_was_answered_can_be_sent_back(world: World) -> None:
    calls = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning": "a thought", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    await world.ask("fine", False, messages=messages, tools=TOOLS)
    assert "<think>a thought</think><tool_call>weather<arg_key>city</arg_key><arg_value>Rome" in world.prompt
    assert "<tool_response>sunny</tool_response>" in world.prompt


async def test_choices_have_calls_of_their_own(world: World) -> None:
    for pod in world.made.pods:
        pod.engine.script = world.tokenizer.encode(NOW)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "n": 2}
    choices = (await world.made.post("/v1/chat/completions", body)).json()["choices"]
    assert [choice["message"]["tool_calls"][0]["function"]["name"] for choice in choices] == ["now", "now"]
    assert [choice["message"]["content"] for choice in choices] == [None, None]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2


async def test_the_official_client_reads_streamed_calls(world: World) -> None:
    from openai import AsyncOpenAI

    for pod in world.made.pods:
        pod.engine.script = world.tokenizer.encode("<think>hm</think>" + CALL + NOW)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    client = AsyncOpenAI(base_url=world.made.url + "/v1", api_key="-")
    async with client, client.chat.completions.stream(**asked) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather", "now"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": '007 "é"', "days": 3}
    assert message.reasoning_content == "hm"
    assert final.choices[0].finish_reason == "tool_calls"
