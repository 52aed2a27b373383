"""The OpenAI surface of a whole deployment: router, prefill and decode, real HTTP, real NIXL; only the model is fake.

Its tokens depend on the KV bytes, so text that is right has been handed over right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.engine.serve.deployment import MODEL, PROMPT, Deployment, Handoff, body, events, until
from tests.engine.serve.fakes import expected_text

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def made(deployed: Deployment) -> AsyncIterator[Deployment]:
    """Every test leaves the pods as it found them: empty."""
    yield deployed
    await deployed.idle()


def other_prompt(call: dict[str, Any]) -> None:
    call["prompt_ids"] = list(reversed(call["prompt_ids"]))


def other_request(call: dict[str, Any]) -> None:
    call["id"] = "b"


def other_blocks(call: dict[str, Any]) -> None:
    call["kv"]["blocks"][0] += 1


def outside(call: dict[str, Any]) -> None:
    call["kv"]["blocks"][0] = 10**6


def other_rank(call: dict[str, Any]) -> None:
    call["kv"]["rank"] = 3


def older_agent(call: dict[str, Any]) -> None:
    call["kv"]["agent"] = "prefill/before"


def fewer_blocks(call: dict[str, Any]) -> None:
    call["kv"]["blocks"].pop()


def other_length(call: dict[str, Any]) -> None:
    call["prompt_ids"].append(97)


def other_dtype(call: dict[str, Any]) -> None:
    call["kv"]["fingerprint"]["dtype"] = "fp8"


def nobody_there(call: dict[str, Any]) -> None:
    call["kv"]["address"] = "127.0.0.1:9"
    call["kv"]["agent"] = "gone"


async def test_a_stream_says_the_same_chunk_by_chunk(made: Deployment) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await made.post("/v1/completions", body(**options))
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events(answer.raw)
    assert done == b"[DONE]"
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 23,
        "completion_tokens": 12,
        "total_tokens": 35,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert all(chunk["usage"] is None for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(PROMPT, 12)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 11 + ["length"]
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


async def test_chat_streams_a_role_then_text_and_needs_no_usage(made: Deployment) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    whole = (await made.post("/v1/chat/completions", chat)).json()
    *chunks, done = events((await made.post("/v1/chat/completions", {**chat, "stream": True})).raw)
    assert done == b"[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant", None, None, None, None]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_answer_and_frees_the_seat(made: Deployment, stream: bool) -> None:
    text = expected_text(PROMPT, 12)
    answer = await made.post("/v1/completions", body(stop=[text[3:6], "zzz"], stream=stream))
    if stream:
        chunks = events(answer.raw)[:-1]
        found = "".join(chunk["choices"][0]["text"] for chunk in chunks), chunks[-1]["choices"][0]["finish_reason"]
    else:
        found = answer.json()["choices"][0]["text"], answer.json()["choices"][0]["finish_reason"]
    assert found == (text[: text.index(text[3:6])], "stop")
    await made.idle()


@pytest.mark.parametrize(
    ("path", "sent", "status", "param"),
    [
        pytest.param("completions", b"{", 400, None, id="no JSON"),
        pytest.param("completions", body(model="other"), 404, "model", id="unknown model"),
        pytest.param("completions", body(max_tokens=0), 400, "max_tokens", id="max_tokens"),
        pytest.param("completions", body(max_tokens=0, stream=True), 400, "max_tokens", id="streamed"),
        pytest.param("completions", body(prompt=[97] * 128), 400, "prompt", id="prompt fills the context"),
        pytest.param("completions", body(max_tokens=10**6), 400, "max_tokens", id="more output than context"),
        pytest.param("completions", body(prompt=[10**6]), 400, "prompt", id="no such token"),
        pytest.param("completions", body(suffix="x"), 400, "suffix", id="unsupported"),
        pytest.param("chat/completions", {"model": MODEL}, 400, "messages", id="no messages"),
        pytest.param("nothing", {}, 404, None, id="no such endpoint"),
        pytest.param("models", {}, 405, None, id="wrong method"),
    ],
)
async def test_refusals_have_openai_s_shape_and_hold_nothing(
    made: Deployment, path: str, sent: Any, status: int, param: str | None
) -> None:
    answer = await made.post(f"/v1/{path}", sent)
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"].startswith("application/json")
    await made.idle()


async def test_a_body_that_is_too_long_is_a_413(made: Deployment) -> None:
    answer = await made.post("/v1/completions", b'{"model": "' + b"x" * (33 << 20) + b'"}')
    assert (answer.status, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_models(made: Deployment) -> None:
    async with made.session.get(made.url + "/v1/models") as response:
        assert [card["id"] for card in (await response.json())["data"]] == [MODEL]
    async with made.session.get(made.url + f"/v1/models/{MODEL}") as response:
        assert (await response.json())["object"] == "model"
    async with made.session.get(made.url + "/v1/models/other") as response:
        assert response.status == 404


async def test_a_hand_off_by_hand(made: Deployment) -> None:
    hand = Handoff(made)
    status, answer = await hand.decode(await hand.prefill())
    assert (status, answer["choices"][0]["text"]) == (200, expected_text(PROMPT, 12))


async def test_kv_is_read_at_most_once(made: Deployment) -> None:
    hand = Handoff(made)
    call = await hand.prefill()
    assert (await hand.decode(call))[0] == 200
    await hand.made.idle()
    status, answer = await hand.decode(call)
    assert (status, answer["error"]["code"]) == (502, "kv_transfer_failed")


@pytest.mark.parametrize(
    ("spoil", "status", "said"),
    [
        (other_prompt, 502, "holds other KV"),
        (other_request, 502, "no KV is held"),
        (other_blocks, 502, "holds other KV"),
        (outside, 502, "holds other KV"),
        (other_rank, 502, "holds other KV"),
        (older_agent, 502, "has restarted"),
        (fewer_blocks, 400, "cannot hold"),
        (other_length, 400, "cannot hold"),
        (other_dtype, 502, "dtype: decode has 'test', prefill has 'fp8'"),
        (nobody_there, 502, "does not answer"),
    ],
)
async def test_a_wrong_kv_reference_is_an_error_and_never_text(
    made: Deployment, spoil: Any, status: int, said: str
) -> None:
    hand = Handoff(made)
    call = await hand.prefill()
    request_id = call["id"]
    counters, failed = made.decode[0].process.pod.counters, made.decode[0].process.pod.counters.pulls_failed
    spoil(call)
    found, answer = await hand.decode(call)
    assert found == status, answer
    assert counters.pulls_failed - failed == (status == 502)
    assert said in answer["error"]["message"]
    assert call["id"] not in made.decode[0].engine.decoded
    await until("decode holds nothing", hand.made.decode[0].idle)
    await made.internal(made.prefill[0], "kv/release", {"id": request_id})


@pytest.mark.parametrize("path", ["state", "drain", "prefill", "kv/lease", "kv/heartbeat", "kv/release"])
@pytest.mark.parametrize("headers", [{}, {"X-Glm52-Internal-Token": "guess"}], ids=["none", "wrong"])
async def test_internal_endpoints_need_the_secret(made: Deployment, path: str, headers: dict[str, str]) -> None:
    answer = await made.post(f"/internal/v1/{path}", {}, url=made.prefill[0].url, headers=headers)
    assert (answer.status, answer.json()["error"]["code"]) == (401, "unauthorized")
