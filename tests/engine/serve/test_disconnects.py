"""A client that goes away at any moment: both roles give everything back, and it is counted once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from glm52_engine.route.proxy import Proxy
from glm52_engine.serve import prefill as prefill_module
from glm52_engine.transfer.heartbeats import Heartbeats
from tests.engine.serve.deployment import HEADERS, MODEL, Deployment, Handoff, RunningPod, body, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOR_EVER = 60.0


@pytest_asyncio.fixture(loop_scope="module")
async def made(deployed: Deployment) -> AsyncIterator[Deployment]:
    yield deployed
    for pod in deployed.pods:
        pod.engine.step_seconds = 0.0
    await deployed.idle()


class Moment:
    """Where a request is stopped: `reached` says that it is there."""

    def __init__(self, made: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefill, self.decode = made.prefill[0], made.decode[0]
        self.monkeypatch = monkeypatch
        self.there = asyncio.Event()

    async def stop(self, *_: Any, **__: Any) -> Any:
        self.there.set()
        await asyncio.sleep(FOR_EVER)

    @contextlib.contextmanager
    def full(self, pod: RunningPod) -> Iterator[Callable[[], bool]]:
        """No block is free at `pod`; gives what tells that a request waits for one."""
        engine = pod.engine
        taken, engine._free = engine._free, []
        try:
            yield lambda: engine.stats().waiting > 0
        finally:
            engine._free = taken

    @contextlib.contextmanager
    def slow(self, pod: RunningPod, reached: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        pod.engine.step_seconds = FOR_EVER
        yield reached
        pod.engine.step_seconds = 0.0


Stopped = contextlib.AbstractContextManager[Callable[[], bool]]


def in_the_queue_of_prefill(moment: Moment) -> Stopped:
    return moment.full(moment.prefill)


def during_prefill(moment: Moment) -> Stopped:
    return moment.slow(moment.prefill, lambda: moment.prefill.free < 64)


@contextlib.contextmanager
def while_it_is_tokenised(moment: Moment) -> Iterator[Callable[[], bool]]:
    with moment.monkeypatch.context() as patch:
        patch.setattr(prefill_module.asyncio, "to_thread", moment.stop)
        yield moment.there.is_set


@contextlib.contextmanager
def between_the_legs(moment: Moment) -> Iterator[Callable[[], bool]]:
    pick = Proxy._pick

    async def stops(self: Proxy, role: Any, exchange: Any) -> str:
        return await (moment.stop() if role == "decode" else pick(self, role, exchange))

    with moment.monkeypatch.context() as patch:
        patch.setattr(Proxy, "_pick", stops)
        yield moment.there.is_set


def in_the_queue_of_decode(moment: Moment) -> Stopped:
    return moment.full(moment.decode)


@contextlib.contextmanager
def during_the_pull(moment: Moment) -> Iterator[Callable[[], bool]]:
    loaded = moment.decode.process.pod.loaded
    assert loaded is not None
    with moment.monkeypatch.context() as patch:
        patch.setattr(loaded.puller, "_pull", moment.stop)
        yield moment.there.is_set


@contextlib.contextmanager
def during_decode(moment: Moment) -> Iterator[Callable[[], bool]]:
    before = len(moment.decode.engine.decoded)
    with moment.slow(moment.decode, lambda: len(moment.decode.engine.decoded) > before) as reached:
        yield reached


MOMENTS = [
    while_it_is_tokenised,
    in_the_queue_of_prefill,
    during_prefill,
    between_the_legs,
    in_the_queue_of_decode,
    during_the_pull,
    during_decode,
]


async def connect(url: str, sent: dict[str, Any]) -> asyncio.StreamWriter:
    parts = urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    raw = json.dumps(sent).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n"
    )
    writer.write(head.encode() + b"\r\n" + raw)
    return writer


def fin(writer: asyncio.StreamWriter) -> None:
    writer.close()


def rst(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def aborted(made: Deployment) -> int:
    async with made.session.get(made.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return int(next(float(line.split()[1]) for line in lines if line.startswith("glm52_router_aborted_total")))


@pytest.mark.parametrize("leave", [fin, rst])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("at", MOMENTS)
async def test_a_client_that_goes_away_frees_everything_at_both_pods_and_counts_once(
    made: Deployment,
    monkeypatch: pytest.MonkeyPatch,
    at: Callable[[Moment], Stopped],
    stream: bool,
    leave: Callable[[asyncio.StreamWriter], None],
) -> None:
    moment = Moment(made, monkeypatch)
    before, generated = await aborted(made), made.decode[0].engine.generated
    with at(moment) as reached:
        writer = await connect(made.url, body(stream=stream, max_tokens=50))
        await until(at.__name__, reached)
        leave(writer)
        # Blocks that the moment itself keeps away are nobody's; what counts is that no request holds any.
        for pod in made.pods:
            await until(
                f"{pod.role} holds nothing", lambda pod=pod: not pod.engine._held and not pod.process.life.in_flight
            )
    await made.idle()
    assert await aborted(made) == before + 1
    assert made.decode[0].engine.generated == generated


async def test_a_storm_of_clients_that_leave_is_forgotten_at_once(made: Deployment) -> None:
    for pod in made.pods:
        pod.engine.step_seconds = 0.01
    writers = [await connect(made.url, body(stream=number % 2 == 0, max_tokens=50)) for number in range(40)]
    for number, writer in enumerate(writers):
        for _ in range(number):
            await asyncio.sleep(0)
        (fin if number % 3 else rst)(writer)
    await made.idle()
    assert (await made.post("/v1/completions", body())).status == 200


async def test_kv_that_is_given_up_before_it_is_there_is_not_held(made: Deployment) -> None:
    """The router's word overtakes the prefill: it travels on another connection."""
    pod = made.prefill[0].process.pod
    call = {"id": "overtaken", "endpoint": "completions", "body": body()}
    released = await made.internal(made.prefill[0], "kv/release", {"id": call["id"]})
    assert released.json()["released"] is False
    given_up = pod.counters.given_up
    answer = await made.internal(made.prefill[0], "prefill", call)
    assert pod.counters.given_up == given_up + 1
    assert (answer.status, pod.life.in_flight) == (200, 0)
    status, refused = await Handoff(made).decode({**answer.json(), **call})
    assert (status, refused["error"]["code"]) == (502, "kv_transfer_failed")


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        pytest.param({"body": body(model="other")}, 404, id="unknown model"),
        pytest.param({"body": body(temperature=9)}, 400, id="a field"),
        pytest.param({"body": body(max_tokens=10**6)}, 400, id="too many tokens"),
        pytest.param({"prompt_ids": [10**9]}, 400, id="no such token"),
        pytest.param({"body": body(guided_regex="(a")}, 400, id="a grammar that is none"),
        pytest.param({"body": body(n=2)}, 400, id="more choices than were drawn"),
        pytest.param(
            {"endpoint": "chat", "body": {"model": MODEL, "messages": [], "max_tokens": 12}}, 400, id="no messages"
        ),
        pytest.param(
            {
                "endpoint": "chat",
                "body": {**body(), "messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
            },
            400,
            id="a choice without tools",
        ),
    ],
)
async def test_a_refusal_by_decode_frees_the_kv_at_prefill(
    made: Deployment, wrong: dict[str, Any], status: int
) -> None:
    hand = Handoff(made)
    call = await hand.prefill()
    assert made.prefill[0].process.life.in_flight == 1
    found, answer = await hand.decode({**call, **wrong})
    assert found == status, answer
    await made.idle()


async def test_a_decode_peer_that_goes_away_while_it_waits_frees_the_kv_at_prefill(made: Deployment) -> None:
    hand = Handoff(made)
    call = await hand.prefill()
    moment = Moment(made, pytest.MonkeyPatch())
    with moment.full(made.decode[0]) as waits:
        asking = asyncio.create_task(
            made.session.post(made.decode[0].url + "/internal/v1/decode", json=call, headers=HEADERS)
        )
        await until("decode waits for a seat", waits)
        asking.cancel()
        await until("prefill holds nothing", made.prefill[0].idle)


async def test_a_lease_that_is_lost_ends_the_wait_for_a_seat(made: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = made.decode[0].process.pod.loaded
    assert loaded is not None
    monkeypatch.setattr(loaded.puller, "beats", Heartbeats(loaded.puller._beat, beat=0.02))
    hand, counters = Handoff(made), made.decode[0].process.pod.counters
    call, failed = await hand.prefill(), counters.pulls_failed
    with Moment(made, monkeypatch).full(made.decode[0]) as waits:
        asking = asyncio.create_task(hand.decode(call))
        await until("decode waits for a seat", waits)
        await made.internal(made.prefill[0], "kv/release", {"id": call["id"]})
        status, answer = await asyncio.wait_for(asking, 10)
        assert (status, answer["error"]["code"]) == (502, "kv_transfer_failed")
        await until("nobody waits", lambda: not waits())
    assert counters.pulls_failed == failed + 1
