"""What the router and the pods answer to requests that are wrong, too large, or come at the wrong time."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from yarl import URL

from glm52_engine.lifecycle.logs import JsonFormatter
from glm52_engine.route import app, room
from glm52_engine.runtime.types import Blocks, EngineBusy, Prefilled, Request
from glm52_engine.serve.sender import Sender
from tests.engine.serve.deployment import (
    HEADERS,
    MODEL,
    PROMPT,
    Answer,
    Builder,
    Deployment,
    Handoff,
    body,
    until,
)
from tests.engine.serve.fakes import FakeEngine, expected_text

module_loop = pytest.mark.asyncio(loop_scope="module")

JSON = {"content-type": "application/json"}
GOOD = json.dumps(body()).encode()


def error_of(answer: Answer) -> dict[str, Any]:
    assert answer.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def tower(depth: int) -> bytes:
    return b'{"model": "%s", "metadata": %s}' % (MODEL.encode(), b"[" * depth + b"]" * depth)


@pytest.mark.parametrize(
    ("raw", "headers", "status", "said"),
    [
        pytest.param(b"", JSON, 400, "not valid JSON", id="empty"),
        pytest.param(b"{", JSON, 400, "not valid JSON", id="half"),
        pytest.param(b"[]", JSON, 400, "an object", id="array"),
        pytest.param(b'"x"', JSON, 400, "an object", id="string"),
        pytest.param(GOOD[:-1] + b', "seed": NaN}', JSON, 400, "no JSON number", id="NaN"),
        pytest.param(GOOD[:-1] + b', "seed": ' + b"9" * 5000 + b"}", JSON, 400, "JSON", id="5000 digits"),
        pytest.param(GOOD + b"\xff", JSON, 400, "not UTF-8", id="no UTF-8"),
        pytest.param(GOOD.decode().encode("utf-16"), JSON, 400, "not UTF-8", id="UTF-16"),
        pytest.param(b"\xef\xbb\xbf" + GOOD, JSON, 400, "BOM", id="byte order mark"),
        pytest.param(b"[" * 100_000, JSON, 400, "nested", id="a tower of brackets"),
        pytest.param(tower(64), JSON, 400, "nested", id="one array too deep"),
        pytest.param(b'{"user": [' + b"[]," * (2 << 20) + b"[]]}", JSON, 400, "commas and brackets", id="many values"),
        pytest.param(GOOD, {"content-type": "text/plain"}, 400, "content-type", id="text"),
        pytest.param(GOOD, {"content-type": "multipart/form-data; boundary=x"}, 400, "content-type", id="form"),
        pytest.param(GOOD, {**JSON, "content-encoding": "gzip"}, 400, "cannot be read", id="gzip that is none"),
        pytest.param(b" " * (33 << 20), JSON, 413, "longer than", id="too long"),
        pytest.param(gzip.compress(b" " * (33 << 20)), {**JSON, "content-encoding": "gzip"}, 413, "longer", id="bomb"),
    ],
)
@module_loop
async def test_bodies_that_are_none(
    deployed: Deployment, raw: bytes, headers: dict[str, str], status: int, said: str
) -> None:
    answer = await deployed.post("/v1/completions", raw, headers=headers)
    assert answer.status == status, answer.raw[:500]
    assert said in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("raw", "headers"),
    [
        pytest.param(GOOD, {"content-type": "application/json; charset=utf-8"}, id="charset"),
        pytest.param(GOOD, {"content-type": "application/vnd.api+json"}, id="a kind of JSON"),
        pytest.param(gzip.compress(GOOD), {**JSON, "content-encoding": "gzip"}, id="gzip"),
        pytest.param(b" \n" + GOOD + b"\n ", JSON, id="space around"),
        pytest.param(GOOD[:-1] + b', "user": "a\\ud83d b"}', JSON, id="half a surrogate pair"),
        pytest.param(tower(60)[:-1] + b"," + GOOD[1:], JSON, id="deep, and allowed"),
    ],
)
@module_loop
async def test_bodies_that_are_unusual_and_right(deployed: Deployment, raw: bytes, headers: dict[str, str]) -> None:
    answer = await deployed.post("/v1/completions", raw, headers=headers)
    assert answer.status == 200, answer.raw
    assert answer.json()["choices"][0]["text"] == expected_text(PROMPT, 12)


@module_loop
async def test_a_body_of_unknown_length_ends_at_the_limit(deployed: Deployment) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 20)

    async with deployed.session.post(deployed.url + "/v1/completions", data=endless(), headers=JSON) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("of", ["router", "prefill", "decode"])
@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/nothing", 404, None),
        ("POST", "/readyz", 405, "GET"),
        ("DELETE", "/metrics", 405, "GET"),
        ("GET", "/internal/v1/drain", 405, "POST"),
    ],
)
@module_loop
async def test_unknown_paths_and_methods(
    deployed: Deployment, of: str, method: str, path: str, status: int, allow: str | None
) -> None:
    urls = {"router": deployed.url, "prefill": deployed.prefill[0].url, "decode": deployed.decode[0].url}
    async with deployed.session.request(method, urls[of] + path, headers=HEADERS) as response:
        answer = Answer(response.status, await response.read(), {k.lower(): v for k, v in response.headers.items()})
    assert answer.status == status
    assert error_of(answer)["type"] == "invalid_request_error"
    assert (allow or "") in answer.headers.get("allow", "")


@pytest.mark.parametrize("of", ["router", "prefill", "decode"])
@pytest.mark.parametrize("path", ["/v1/models/%ED%A0%80", "/v1/models/%FF", "/%00", "/%ED%A0%80"])
@module_loop
async def test_a_path_that_is_no_text_is_a_404(deployed: Deployment, of: str, path: str) -> None:
    urls = {"router": deployed.url, "prefill": deployed.prefill[0].url, "decode": deployed.decode[0].url}
    async with deployed.session.get(URL(urls[of] + path, encoded=True), headers=HEADERS) as response:
        answer = Answer(response.status, await response.read(), {k.lower(): v for k, v in response.headers.items()})
    assert answer.status == 404
    error_of(answer)["message"].encode()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_what_is_no_number_never_becomes_an_answer(value: float) -> None:
    """JSON has no word for it: a client's parser would fail on all of the answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    for said in (Sender(send, "x").whole(200, {"logprob": value}), Sender(send, "x").event({"logprob": value})):
        with pytest.raises(ValueError, match="JSON"):
            await said
    assert sent == [], "there is still time for a true status"


@pytest.mark.parametrize("path", ["prefill", "decode", "kv/lease", "kv/heartbeat", "kv/release"])
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"id": 3}', b"\xff"])
@module_loop
async def test_internal_calls_that_are_wrong_are_refused_and_change_nothing(
    deployed: Deployment, path: str, raw: bytes
) -> None:
    pod = deployed.decode[0] if path == "decode" else deployed.prefill[0]
    answer = await deployed.post(f"/internal/v1/{path}", raw, url=pod.url, headers=HEADERS)
    assert answer.status == 400, answer.raw
    error_of(answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("more", "status"), [({"prompt": [97] * 128}, 400), ({"model": "other"}, 404)])
@module_loop
async def test_a_refusal_has_its_status_also_where_a_stream_was_asked_for(
    deployed: Deployment, more: dict[str, Any], status: int, stream: bool
) -> None:
    answer = await deployed.post("/v1/completions", body(stream=stream, **more))
    assert answer.status == status
    error_of(answer)


@module_loop
async def test_request_ids_are_taken_given_and_told_everywhere(deployed: Deployment) -> None:
    async def asked(request_id: str, **more: Any) -> tuple[str, Any]:
        answer = await deployed.post("/v1/completions", body(**more), headers={"x-request-id": request_id})
        return answer.headers["x-request-id"], answer.json()

    assert (await asked("mine-1"))[0] == "mine-1"
    assert (await asked("mine-1", model="other"))[0] == "mine-1"
    for unusable in ("", "two words", "x" * 200, "ä"):
        found, answer = await asked(unusable)
        assert found == answer["id"]
    same = await asyncio.gather(*(asked("twice") for _ in range(4)))
    assert [found for found, _ in same] == ["twice"] * 4
    assert len({answer["id"] for _, answer in same}) == 4


@module_loop
async def test_every_log_line_about_a_request_has_its_id(deployed: Deployment) -> None:
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonFormatter("test"))
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        await deployed.post("/v1/completions", body(), headers={"x-request-id": "mine"})
        await deployed.idle()
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    ids = {line["message"]: line.get("request_id") for line in found}
    assert ids == {"prefilled": "mine", "answered": "mine", "request": "mine"}


class Busy(FakeEngine):
    """Its queue is full."""

    async def prefill(self, request: Request) -> Prefilled:
        raise EngineBusy("7 requests wait already", retry_after=9)

    async def reserve(self, request: Request) -> Blocks:
        raise EngineBusy("7 requests wait already", retry_after=9)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_full_queue_is_a_429_that_says_when_to_come_back(build: Builder, role: str) -> None:
    engines = {"prefill": [FakeEngine()], "decode": [FakeEngine()], role: [Busy()]}
    made = await build.deployment(engines["prefill"], engines["decode"])
    answer = await made.post("/v1/completions", body(stream=True))
    assert (answer.status, answer.headers["retry-after"]) == (429, "9")
    error = error_of(answer)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    await made.idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_another_pod_serves_what_a_full_one_refuses(build: Builder, role: str) -> None:
    engines = {"prefill": [FakeEngine()], "decode": [FakeEngine()]}
    engines[role] = [Busy(), FakeEngine()]
    made = await build.deployment(engines["prefill"], engines["decode"])
    answers = await asyncio.gather(*(made.post("/v1/completions", body()) for _ in range(4)))
    assert [answer.status for answer in answers] == [200] * 4
    await made.idle()


async def test_a_pod_that_drains_refuses_with_503_and_the_router_says_when_to_come_back(build: Builder) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine(step_seconds=0.05)])
    running = asyncio.create_task(made.post("/v1/completions", body(max_tokens=40)))
    await until("decode runs", lambda: bool(made.decode[0].engine.decoded))
    made.decode[0].process.terminate("test")
    hand = await Handoff(made).prefill()
    direct = await made.internal(made.decode[0], "decode", hand)
    await made.internal(made.prefill[0], "kv/release", {"id": hand["id"]})
    assert (direct.status, direct.headers["retry-after"], error_of(direct)["code"]) == (503, "2", "not_ready")
    through = await made.post("/v1/completions", body())
    assert (through.status, through.headers["retry-after"]) == (503, "2")
    assert error_of(through)["type"] == "server_error"
    assert (await running).status == 200


@pytest.mark.parametrize(
    ("more", "param"),
    [
        pytest.param({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", id="logit_bias"),
        pytest.param({"stop_token_ids": list(range(1025))}, "stop_token_ids", id="stop_token_ids"),
        pytest.param({"stop": ["a"] * 17}, "stop", id="stops"),
        pytest.param({"stop": "a" * 1025}, "stop", id="a long stop"),
        pytest.param({"n": 129}, "n", id="choices"),
        pytest.param({"temperature": [[1, 2, 3]] * 100_000}, "temperature", id="a value that is a megabyte long"),
    ],
)
@module_loop
async def test_lists_that_every_step_would_look_at_are_bounded(
    deployed: Deployment, more: dict[str, Any], param: str
) -> None:
    answer = await deployed.post("/v1/completions", body(**more))
    assert answer.status == 400
    assert error_of(answer)["param"] == param
    assert len(answer.raw) < 1000


@module_loop
async def test_a_body_that_never_ends_is_a_408(deployed: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.1)

    async def half() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    async with deployed.session.post(deployed.url + "/v1/completions", data=half(), headers=JSON) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (408, "timeout")


async def test_a_router_holds_only_so_many_bytes_of_bodies(build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.Room.__init__, "__defaults__", (3 * len(GOOD),))
    made = await build.deployment([FakeEngine(step_seconds=30)], [FakeEngine()])
    held = [asyncio.create_task(made.post("/v1/completions", GOOD, headers=JSON)) for _ in range(3)]
    await until("three are in progress", lambda: made.prefill[0].process.life.in_flight == 3)
    refused = await made.post("/v1/completions", GOOD, headers=JSON)
    assert (refused.status, refused.headers["retry-after"]) == (429, "2")
    assert error_of(refused)["code"] == "too_many_bytes"
    async with made.session.get(made.url + "/metrics") as response:
        assert f"glm52_router_body_bytes {3 * len(GOOD)}.0" in await response.text()
    for request in held:
        request.cancel()
    await made.idle()
    made.prefill[0].engine.step_seconds = 0
    assert (await made.post("/v1/completions", GOOD, headers=JSON)).status == 200
