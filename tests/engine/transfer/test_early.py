"""Whole pods: KV that crosses while the rest of its prompt is computed, and everything that can come between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from glm52_engine.route import proxy
from glm52_engine.serve.pod import Loaded
from glm52_engine.transfer import early
from glm52_engine.transfer.heartbeats import PeerGone
from glm52_engine.transfer.lanes import Lanes
from glm52_engine.transfer.peers import ProgressCall, ProgressCard, Puller
from glm52_engine.transfer.pulls import Pull, PullCut, TransferError
from tests.engine.serve.deployment import Answer, Builder, Deployment, RunningPod, body, builder, until
from tests.engine.serve.fakes import BLOCK_SIZE, TOKEN_BYTES, FakeEngine, expected_text
from tests.engine.transfer.conftest import BY_LANES

pytestmark = [BY_LANES, pytest.mark.usefixtures("pods_of_lanes")]

CHUNK = 3 * BLOCK_SIZE
PROMPT = [ord("a") + index % 26 for index in range(3 * CHUNK + 5)]
OUTPUT = 12
BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES


def parts(pod: RunningPod) -> Loaded:
    loaded = pod.process.pod.loaded
    assert loaded is not None
    return loaded


@dataclass
class Made:
    """One prefill pod that computes when it is told to, and decode pods."""

    pods: Deployment

    @property
    def prefill(self) -> RunningPod:
        return self.pods.prefill[0]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.prefill.engine.may_step.release()

    def early(self, decode: int = 0) -> int:
        """Blocks that came while the prompt was computed."""
        return self.pods.decode[decode].process.pod.counters.bytes_early // BLOCK_BYTES

    async def early_are(self, count: int, decode: int = 0) -> None:
        await until(f"{count} blocks came early", lambda: self.early(decode) == count)

    def asks(self, **more: Any) -> asyncio.Task[Answer]:
        call = body(prompt=PROMPT, max_tokens=OUTPUT, **more)
        return asyncio.create_task(self.pods.post("/v1/completions", call))

    async def right(self, asking: asyncio.Task[Answer]) -> None:
        answer = await asyncio.wait_for(asking, 20)
        assert answer.status == 200, answer.raw
        assert answer.json()["choices"][0]["text"] == expected_text(PROMPT, OUTPUT)
        await self.pods.idle()


Make = Callable[..., Any]


@pytest_asyncio.fixture
async def build(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> AsyncIterator[Builder]:
    monkeypatch.setattr(proxy, "EARLY_BODY_BYTES", 1)
    async with builder(monkeypatch, tiny_checkpoint) as built:
        yield built


@pytest_asyncio.fixture
async def made(build: Builder) -> Made:
    return Made(await build.deployment([FakeEngine(chunk=CHUNK)], [FakeEngine()]))


async def test_blocks_cross_while_the_rest_of_the_prompt_is_computed(made: Made) -> None:
    asking = made.asks()
    for chunks in (1, 2, 3):
        made.step()
        await made.early_are(chunks * CHUNK // BLOCK_SIZE)
        assert not asking.done()
    made.step()
    await made.right(asking)
    counters, sent = made.pods.decode[0].process.pod.counters, made.prefill.process.pod.counters
    every = -(-len(PROMPT) // BLOCK_SIZE) * BLOCK_BYTES
    assert counters.bytes_in == every, "nothing crosses twice"
    await until("prefill counts them too", lambda: sent.bytes_out == every)
    assert (counters.pulls, counters.pulls_failed, sent.handed_over) == (1, 0, 1)


async def test_a_short_body_costs_no_call(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "EARLY_BODY_BYTES", 100_000)
    begun: list[str] = []
    monkeypatch.setattr(parts(made.pods.decode[0]).early, "begin", lambda id, address: begun.append(id))
    made.step(4)
    await made.right(made.asks())
    assert not begun
    assert not made.early()


async def test_several_choices_are_read_at_the_end(made: Made) -> None:
    asking = made.asks(n=2)
    made.step(4)
    answer = await asyncio.wait_for(asking, 20)
    assert [choice["text"] for choice in answer.json()["choices"]] == [
        expected_text(PROMPT, OUTPUT, choice) for choice in range(2)
    ]
    assert not made.early()
    await made.pods.idle()


async def test_a_client_that_leaves_frees_the_seat_that_was_taken_early(made: Made) -> None:
    asking = made.asks()
    made.step()
    await made.early_are(CHUNK // BLOCK_SIZE)
    asking.cancel()
    await made.pods.idle()
    assert not made.pods.decode[0].engine.decoded


async def test_a_read_under_way_is_waited_for_and_not_repeated(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is done before its second part has come."""
    go, pull, pulls = asyncio.Event(), Lanes.pull, []

    async def slow(self: Lanes, asked: Pull, **more: Any) -> int:
        pulls.append(len(asked.remote_ids))
        if len(pulls) == 2:
            await go.wait()
        return await pull(self, asked, **more)

    monkeypatch.setattr(Lanes, "pull", slow)
    asking = made.asks()
    made.step()
    await made.early_are(CHUNK // BLOCK_SIZE)
    made.step()
    await until("the second part is under way", lambda: len(pulls) == 2)
    made.step(2)
    await until("prefill holds it", lambda: len(parts(made.prefill).holder) == 1)
    await until("decode is called", lambda: made.pods.decode[0].process.life.requests == 1)
    go.set()
    await made.right(asking)
    blocks = -(-len(PROMPT) // BLOCK_SIZE)
    assert pulls == [3, 3, blocks - 6]


async def test_a_part_that_fails_is_read_anew_with_everything_else(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    pull, failed = Lanes.pull, []

    async def fails(self: Lanes, asked: Pull, **more: Any) -> int:
        if b'"part"' in asked.notice and made.early():
            failed.append(asked)
            raise TransferError("the link is down")
        return await pull(self, asked, **more)

    monkeypatch.setattr(Lanes, "pull", fails)
    asking = made.asks()
    made.step()
    await made.early_are(CHUNK // BLOCK_SIZE)
    made.step()
    await until("the second part has failed", lambda: len(failed) == 1)
    await until("its seat is free", made.pods.decode[0].idle)
    made.step(2)
    await made.right(asking)
    counters = made.pods.decode[0].process.pod.counters
    assert (counters.pulls, counters.pulls_failed) == (1, 0)


async def test_a_part_that_is_cut_keeps_its_blocks_until_no_byte_can_come(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    over: Future[None] = Future()
    pull, cut = Lanes.pull, []

    async def hangs(self: Lanes, asked: Pull, **more: Any) -> int:
        if b'"part"' in asked.notice:
            cut.append(asked)
            raise PullCut("it was cut", over)
        return await pull(self, asked, **more)

    monkeypatch.setattr(Lanes, "pull", hangs)
    asking = made.asks()
    made.step()
    await until("the first part is cut", lambda: len(cut) == 1)
    made.step(3)
    answer = await asyncio.wait_for(asking, 20)
    assert answer.json()["choices"][0]["text"] == expected_text(PROMPT, OUTPUT)
    decode = made.pods.decode[0]
    await until("nothing is in flight", lambda: not decode.process.life.in_flight)
    reserved = -(-(len(PROMPT) + OUTPUT) // BLOCK_SIZE)
    assert decode.free == decode.engine.num_blocks - reserved
    over.set_result(None)
    await made.pods.idle()


async def test_bytes_that_are_wrong_by_the_end_are_never_used(made: Made) -> None:
    """As if prefill's blocks had been another's when they were read: the checksums of the whole find it."""
    asking = made.asks()
    made.step()
    await made.early_are(CHUNK // BLOCK_SIZE)
    entry = next(iter(parts(made.pods.decode[0]).early._entries.values()))
    assert entry.blocks is not None
    made.pods.decode[0].engine.pool.write(entry.blocks.ids, [1, 2, 3])
    made.step(3)
    # The attempt after it computes the prompt once more.
    made.step(4)
    await made.right(asking)
    assert made.pods.decode[0].process.pod.counters.pulls_failed == 1


@pytest.mark.parametrize("why", ["gone", "silent"])
async def test_a_part_is_cut_when_prefill_says_nothing_any_more(
    made: Made, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The READ of a frozen peer would keep the seat for as long as the peer is frozen."""
    monkeypatch.setattr(early, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(early, "SILENCE_SECONDS", 0.2)
    over: Future[None] = Future()
    begun, ended, pull, progress = asyncio.Event(), asyncio.Event(), Lanes.pull, Puller.progress

    async def hangs(self: Lanes, asked: Pull, **more: Any) -> int:
        if b'"part"' not in asked.notice:
            return await pull(self, asked, **more)
        begun.set()
        await ended.wait()
        raise PullCut("it was cut", over)

    async def nothing(self: Puller, address: str, call: ProgressCall) -> ProgressCard:
        if not begun.is_set():
            return await progress(self, address, call)
        raise PeerGone("refused") if why == "gone" else TransferError("no answer")

    def cut(self: Lanes, peer: str, reason: str) -> None:
        ended.set()

    monkeypatch.setattr(Lanes, "pull", hangs)
    monkeypatch.setattr(Lanes, "cut", cut)
    monkeypatch.setattr(Puller, "progress", nothing)
    asking = made.asks()
    made.step()
    await asyncio.wait_for(ended.wait(), 20)
    made.step(3)
    over.set_result(None)
    await made.right(asking)


async def test_a_pod_that_goes_lets_early_seats_go(made: Made) -> None:
    asking = made.asks()
    made.step()
    await made.early_are(CHUNK // BLOCK_SIZE)
    assert await made.pods.decode[0].end() == 0
    assert made.pods.decode[0].idle()
    asking.cancel()


async def test_the_seat_goes_back_when_nobody_continues_the_prompt(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the router is gone, or has chosen another pod after all."""
    monkeypatch.setattr(early, "CLAIM_SECONDS", 0.1)
    decode, call = made.pods.decode[0], {"id": "x", "address": made.prefill.process.pod.address}
    told = await made.pods.internal(decode, "early", call)
    assert told.json() == {"id": "x", "begun": True}
    again = await made.pods.internal(decode, "early", call)
    assert again.json()["begun"] is False
    asked = {"id": "x", "endpoint": "completions", "body": body(prompt=PROMPT, max_tokens=OUTPUT)}
    asking = asyncio.create_task(made.pods.internal(made.prefill, "prefill", asked))
    made.step()
    await made.early_are(CHUNK // BLOCK_SIZE)
    assert not decode.idle()
    made.step(3)
    assert (await asyncio.wait_for(asking, 20)).status == 200
    await until("decode holds nothing", decode.idle)
    assert len(parts(made.prefill).holder) == 1, "whoever comes finds the KV"
    await made.pods.internal(made.prefill, "kv/release", {"id": "x"})


async def test_a_prefill_that_knows_nothing_of_the_prompt_is_left_alone(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "UNKNOWN_SECONDS", 0.1)
    decode = made.pods.decode[0]
    await made.pods.internal(decode, "early", {"id": "x", "address": made.prefill.process.pod.address})
    await until("it is over", lambda: "x" not in parts(decode).early)
    assert decode.idle()


async def test_a_prefill_pod_that_is_not_there_costs_nothing(made: Made) -> None:
    decode = made.pods.decode[0]
    await made.pods.internal(decode, "early", {"id": "x", "address": "127.0.0.1:1"})
    await until("it is over", lambda: "x" not in parts(decode).early)
    assert decode.idle()


async def test_a_prefill_pod_of_another_model_is_not_read(build: Builder) -> None:
    pods = await build.deployment([FakeEngine(chunk=CHUNK, model="a")], [FakeEngine(model="b")], router=False)
    decode, address = pods.decode[0], pods.prefill[0].process.pod.address
    await pods.internal(decode, "early", {"id": "x", "address": address})
    call = {"id": "x", "endpoint": "completions", "body": body(prompt=PROMPT, max_tokens=OUTPUT)}
    asking = asyncio.create_task(pods.internal(pods.prefill[0], "prefill", call))
    made = Made(pods)
    made.step()
    await until("it is over", lambda: "x" not in parts(decode).early)
    assert decode.idle()
    assert not made.early()
    made.step(3)
    assert (await asyncio.wait_for(asking, 20)).status == 200
    await pods.internal(pods.prefill[0], "kv/release", {"id": "x"})


async def test_many_at_once_cross_early_and_none_gets_anothers_text(build: Builder) -> None:
    """Where seats are few: some come early, and some have to wait."""
    made = Made(await build.deployment([FakeEngine(chunk=CHUNK, num_blocks=200)], [FakeEngine()]))
    prompts = [[ord("a") + (index + shift) % 26 for index in range(len(PROMPT) - shift)] for shift in range(12)]
    calls = [body(prompt=prompt, max_tokens=OUTPUT) for prompt in prompts]
    asks = [asyncio.create_task(made.pods.post("/v1/completions", call)) for call in calls]
    entries = parts(made.pods.decode[0]).early._entries
    await until("as many as may have begun", lambda: len(entries) == 2)
    await until("all are being computed", lambda: len(made.prefill.engine._partial) == len(prompts))
    made.step(len(prompts))
    await until("something came early", lambda: made.early() > 0)
    made.step(100)
    for prompt, asking in zip(prompts, asks, strict=True):
        answer = await asyncio.wait_for(asking, 20)
        assert answer.json()["choices"][0]["text"] == expected_text(prompt, OUTPUT)
    await made.pods.idle()


@pytest.mark.parametrize("wrong", ["agent", "blocks", "prompt", "cache_salt", "max_tokens"])
async def test_what_was_read_of_anything_else_is_thrown_away(
    made: Made, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """And everything is read anew, into another seat."""
    asking = made.asks()
    made.step(3)
    await made.early_are(3 * CHUNK // BLOCK_SIZE)
    entry, fits = next(iter(parts(made.pods.decode[0]).early._entries.values())), early._fits
    kv, request = entry.kv, entry.request
    assert kv is not None
    assert request is not None
    assert entry.blocks is not None
    made.pods.decode[0].engine.pool.write(entry.blocks.ids, [1, 2, 3])
    theirs: dict[str, dict[str, Any]] = {
        "agent": {"agent": "another life of it"},
        "blocks": {"blocks": kv.blocks[::-1]},
    }
    ours: dict[str, dict[str, Any]] = {
        "prompt": {"prompt": request.prompt[::-1]},
        "cache_salt": {"cache_salt": "of another"},
        "max_tokens": {"sampling": replace(request.sampling, max_tokens=OUTPUT + 1)},
    }

    def judged(*seen: Any) -> bool:
        entry.kv = kv.model_copy(update=theirs.get(wrong, {}))
        entry.request = replace(request, **ours.get(wrong, {}))
        return fits(*seen)

    monkeypatch.setattr(early, "_fits", judged)
    made.step()
    await made.right(asking)
    counters = made.pods.decode[0].process.pod.counters
    assert (counters.pulls, counters.pulls_failed) == (1, 0)


async def test_a_request_that_waits_gets_the_seat_that_was_taken_early(build: Builder) -> None:
    need = -(-(len(PROMPT) + OUTPUT) // BLOCK_SIZE)
    pods = await build.deployment([FakeEngine(chunk=CHUNK), FakeEngine()], [FakeEngine(num_blocks=need)], router=False)
    pods.url = await build.router([pods.prefill[0].url], [pods.decode[0].url])
    other = await build.router([pods.prefill[1].url], [pods.decode[0].url])
    made = Made(pods)
    asking = made.asks()
    made.step()
    await made.early_are(CHUNK // BLOCK_SIZE)
    assert pods.decode[0].free == 0
    answer = await pods.post("/v1/completions", body(), url=other)
    assert answer.status == 200, "before the long prompt is computed"
    assert not asking.done()
    made.step(3)
    await made.right(asking)


async def test_a_decode_pod_that_is_busy_does_not_begin(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made.pods.decode[0].engine, "_running", 2)
    asking = made.asks()
    made.step(4)
    await made.right(asking)
    assert not made.early()
