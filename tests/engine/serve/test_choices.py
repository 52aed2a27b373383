"""What a client asks about the output, through router, prefill and decode, streamed and not: choices, stops, log
probabilities, usage. The model is fake: token `index` of choice `c` is a letter that every byte of KV decides."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.engine.serve.deployment import MODEL, PROMPT, Deployment, Handoff, body, builder, events
from tests.engine.serve.fakes import FakeEngine, expected_text

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = expected_text(PROMPT, 12)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployed(tiny_checkpoint: Path) -> AsyncIterator[Deployment]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        async with builder(monkeypatch, tiny_checkpoint) as build:
            yield await build.deployment([FakeEngine(cached=8)], [FakeEngine()])


@pytest_asyncio.fixture(loop_scope="module")
async def made(deployed: Deployment) -> AsyncIterator[Deployment]:
    """Every test leaves the pods as it found them: empty."""
    yield deployed
    await deployed.idle()


@dataclass
class Said:
    """One choice, however it came."""

    text: str = ""
    finish: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


async def ask(made: Deployment, stream: bool, path: str, sent: dict[str, Any]) -> tuple[list[Said], dict[str, Any]]:
    """Choices in order, and usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await made.post(path, {**sent, **options, "return_token_ids": True})
    assert answer.status == 200, answer.raw
    if not stream:
        whole = answer.json()
        return [collect(Said(), choice) for choice in whole["choices"]], whole["usage"]
    *chunks, last, done = events(answer.raw)
    assert done == b"[DONE]"
    assert last["choices"] == []
    said: dict[int, Said] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert said.setdefault(choice["index"], Said()).finish is None, "nothing comes behind the end of a choice"
        collect(said[choice["index"]], choice)
    return [said[index] for index in range(len(said))], last["usage"]


def collect(said: Said, choice: dict[str, Any]) -> Said:
    message = choice.get("message") or choice.get("delta") or {}
    said.text += choice.get("text") or message.get("content") or ""
    said.finish = choice["finish_reason"]
    said.stop_reason = choice.get("stop_reason")
    said.token_ids += choice["token_ids"]
    if choice["logprobs"]:
        said.logprobs.append(choice["logprobs"])
    return said


streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@streamed
async def test_choices_share_one_prefill(made: Deployment, stream: bool) -> None:
    prefill, decode = made.prefill[0], made.decode[0]
    computed, pulls = prefill.engine.computed, decode.process.pod.counters.pulls
    said, usage = await ask(made, stream, "/v1/completions", body(n=3))
    assert [choice.text for choice in said] == [expected_text(PROMPT, 12, choice) for choice in range(3)]
    assert [choice.finish for choice in said] == ["length"] * 3
    assert usage == {
        "prompt_tokens": 23,
        "completion_tokens": 36,
        "total_tokens": 59,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert prefill.engine.computed - computed == 23
    assert decode.process.pod.counters.pulls - pulls == 3


@streamed
async def test_choices_end_apart(made: Deployment, stream: bool) -> None:
    """The first one with its first token, in prefill's hands: it needs no KV, the others do."""
    stop = TEXT[0]
    said, usage = await ask(made, stream, "/v1/completions", body(n=3, stop=stop))
    texts = [expected_text(PROMPT, 12, choice) for choice in range(3)]
    assert [choice.text for choice in said] == [text.partition(stop)[0] for text in texts]
    ends = [text.find(stop) + 1 or 12 for text in texts]
    assert [choice.finish for choice in said] == ["stop" if stop in text else "length" for text in texts]
    assert usage["completion_tokens"] == sum(ends)


@streamed
async def test_one_token_for_each_choice_needs_no_hand_off(made: Deployment, stream: bool) -> None:
    pulls = made.decode[0].process.pod.counters.pulls
    said, usage = await ask(made, stream, "/v1/completions", body(n=4, max_tokens=1))
    assert [choice.text for choice in said] == [expected_text(PROMPT, 1, choice) for choice in range(4)]
    assert usage["completion_tokens"] == 4
    assert made.decode[0].process.pod.counters.pulls == pulls


@streamed
@pytest.mark.parametrize("cut", [1, 2, 7, 11])
async def test_a_stop_string_at_every_place(made: Deployment, stream: bool, cut: int) -> None:
    stop = TEXT[cut - 1 : cut + 2]
    end = TEXT.index(stop)
    for include in (False, True):
        sent = body(stop=[stop, "zzzz"], include_stop_str_in_output=include)
        (said,), usage = await ask(made, stream, "/v1/completions", sent)
        assert said.text == TEXT[: end + len(stop) * include]
        assert (said.finish, said.stop_reason) == ("stop", stop)
        assert usage["completion_tokens"] == len(said.token_ids) == end + len(stop)


@streamed
async def test_no_stop_before_min_tokens(made: Deployment, stream: bool) -> None:
    stop = TEXT[1]
    later = TEXT.find(stop, 6)
    (said,), _ = await ask(made, stream, "/v1/completions", body(stop=stop, min_tokens=6))
    assert said.text == (TEXT if later < 0 else TEXT[:later])


@streamed
async def test_completions_logprobs(made: Deployment, stream: bool) -> None:
    (said,), _ = await ask(made, stream, "/v1/completions", body(logprobs=1, max_tokens=4))
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    joined = {name: [value for part in said.logprobs for value in part[name]] for name in names}
    assert joined["tokens"] == list(said.text) == list(TEXT[:4])
    assert joined["token_logprobs"] == [-1.5] * 4, "the first one is prefill's"
    assert joined["text_offset"] == [0, 1, 2, 3]
    # The chosen token is there even where it is not among the likeliest.
    assert all(set(top.values()) == {-0.25, -1.5} and token in top for token, top in _pairs(joined))


def _pairs(joined: dict[str, list[Any]]) -> list[tuple[str, dict[str, float]]]:
    return list(zip(joined["tokens"], joined["top_logprobs"], strict=True))


@streamed
@pytest.mark.parametrize("top", [0, 2, 3])
async def test_chat_logprobs(made: Deployment, stream: bool, top: int) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    (said,), _ = await ask(made, stream, "/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": top})
    entries = [entry for part in said.logprobs for entry in part["content"]]
    assert [entry["token"] for entry in entries] == list(said.text)
    assert [entry["bytes"] for entry in entries] == [list(letter.encode()) for letter in said.text]
    assert [entry["logprob"] for entry in entries] == [-1.5] * 3
    for entry in entries:
        assert len(entry["top_logprobs"]) == top
        assert top == 0 or entry["token"] in [other["token"] for other in entry["top_logprobs"]]
    if top == 3:
        half = entries[0]["top_logprobs"][2]
        assert half == {"token": "bytes:\\xf0", "logprob": -9999.0, "bytes": [0xF0]}
    without, _ = await ask(made, stream, "/v1/chat/completions", chat)
    assert without[0].logprobs == []


@streamed
async def test_echo(made: Deployment, stream: bool) -> None:
    for prompt in (PROMPT, bytes(PROMPT).decode()):
        said, usage = await ask(made, stream, "/v1/completions", body(prompt=prompt, echo=True, n=2))
        texts = [expected_text(PROMPT, 12, choice) for choice in range(2)]
        assert [choice.text for choice in said] == [bytes(PROMPT).decode() + text for text in texts]
        assert usage["completion_tokens"] == 24, "what is repeated was not generated"


async def test_usage_in_every_chunk(made: Deployment) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await made.post("/v1/completions", body(stream=True, stream_options=options))
    *chunks, _ = events(answer.raw)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [*range(1, 13), 12]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {23}


async def test_output_fills_the_context_when_nothing_limits_it(made: Deployment) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    (said,), usage = await ask(made, False, "/v1/chat/completions", chat)
    assert said.finish == "length"
    assert usage["total_tokens"] == 128
    answer = await made.post("/v1/completions", {"model": MODEL, "prompt": PROMPT})
    assert answer.json()["usage"]["completion_tokens"] == 16


async def test_a_limit_is_named_as_the_client_names_it(made: Deployment) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    for name in ("max_tokens", "max_completion_tokens"):
        answer = await made.post("/v1/chat/completions", {**chat, name: 10**6})
        assert (answer.status, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"min_tokens": 13}, "min_tokens"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"n": 2, "max_tokens": 106}, "max_tokens"),
        ({"echo": True, "logprobs": 1}, "echo"),
    ],
)
@streamed
async def test_what_only_the_prompt_or_the_vocabulary_can_tell(
    made: Deployment, stream: bool, more: dict[str, Any], param: str
) -> None:
    answer = await made.post("/v1/completions", body(stream=stream, **more))
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert answer.headers["content-type"].startswith("application/json")


async def test_decode_wants_a_first_token_for_each_choice(made: Deployment) -> None:
    hand = Handoff(made)
    call = await hand.prefill(n=2)
    call["first_tokens"].pop()
    status, answer = await hand.decode(call)
    assert (status, answer["error"]["param"]) == (400, "first_tokens")
