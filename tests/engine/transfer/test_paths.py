"""Whole pods: what is told of the path between two of them, and a peer that stops answering."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from glm52_engine.serve.pod import Loaded
from glm52_engine.transfer import rates
from glm52_engine.transfer.heartbeats import Heartbeats
from glm52_engine.transfer.lanes import Lanes
from glm52_engine.transfer.peers import KvReference
from glm52_engine.transfer.pulls import Pull, PullCut, TransferError
from tests.engine.serve.deployment import Deployment, Handoff, RunningPod, body, builder, families, until
from tests.engine.serve.fakes import FakeEngine
from tests.metrics_table import documented, served


@pytest_asyncio.fixture
async def made(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> AsyncIterator[Deployment]:
    async with builder(monkeypatch, tiny_checkpoint) as build:
        yield await build.deployment([FakeEngine()], [FakeEngine()])


def hurried(pod: RunningPod, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    loaded = pod.process.pod.loaded
    assert loaded is not None
    monkeypatch.setattr(loaded.puller, "beats", Heartbeats(loaded.puller._beat, beat=0.02, silence=0.5))
    return loaded


async def test_a_measured_path_is_logged_once_and_has_a_metric(
    made: Deployment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = served(await families(made, made.decode[0].url))
    assert not before & documented()["paths"], "nothing was pulled"
    monkeypatch.setattr(rates, "LEAST_BYTES", 1)
    monkeypatch.setattr(rates, "SLOW", 1e15)
    with caplog.at_level(logging.INFO, "glm52_engine.transfer.peers"):
        for _ in range(2):
            assert (await made.post("/v1/completions", body())).status == 200
    told = [record for record in caplog.records if "path of KV" in record.message]
    assert [record.levelname for record in told] == ["WARNING"], "it is slow, and stays so"
    assert told[0].__dict__["gb_per_second"] > 0
    found = await families(made, made.decode[0].url)
    assert documented()["paths"] <= served(found)
    samples = {s.name: s for family in found for s in family.samples if s.name.startswith("glm52_kv_path")}
    assert {s.labels["peer"] for s in samples.values()} == {made.prefill[0].process.pod.host}
    assert samples["glm52_kv_path_slow"].value == 1


async def test_a_slow_path_is_told_to_whoever_asks_whether_the_pod_is_ready(made: Deployment) -> None:
    """So the operator needs no secret to make an event of it."""

    async def ready(pod: RunningPod) -> Any:
        async with made.session.get(f"{pod.url}/readyz") as response:
            return response.status, await response.json()

    decode = made.decode[0]
    assert await ready(decode) == (200, {"status": "ready", "stage": "Ready"})
    for peer, seconds in (("p0", 0.2), ("p1", 100.0)):
        decode.process.pod.counters.rates.begin(peer, 0.0)
        decode.process.pod.counters.rates.end(peer, 10**9, seconds)
    status, body = await ready(decode)
    assert status == 200
    assert body["kv_paths"] == [
        {"peer": "p0", "bytes_per_second": 5 * 10**9, "best": 0, "slow": False},
        {"peer": "p1", "bytes_per_second": 10**7, "best": 5 * 10**9, "slow": True},
    ]


async def test_a_prefill_pod_that_falls_silent_ends_the_wait_for_a_seat(
    made: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections stay: a frozen process, or a node that is gone without a word."""
    loaded = hurried(made.decode[0], monkeypatch)
    kv = KvReference.model_validate((await Handoff(made).prefill())["kv"])
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    counters, failed = loaded.puller.counters, loaded.puller.counters.pulls_failed
    with (
        pytest.raises(TransferError, match=rf"{address} has not answered for 0\.5 s"),
        loaded.puller.keeping(kv.model_copy(update={"address": address}), "x") as lost,
    ):
        await asyncio.wait_for(lost, 30)
    assert counters.pulls_failed == failed + 1
    silent.close()


async def test_a_lease_that_is_lost_during_a_pull_ends_it(made: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is told at once; the blocks are kept from others until no byte can come any more."""
    hurried(made.decode[0], monkeypatch)
    begun, ended = asyncio.Event(), asyncio.Event()
    over: Future[None] = Future()
    cuts: list[tuple[str, str]] = []

    async def hangs(self: Lanes, pull: Pull) -> int:
        begun.set()
        await ended.wait()
        raise PullCut(cuts[0][1], over)

    def cut(self: Lanes, peer: str, reason: str) -> None:
        cuts.append((peer, reason))
        ended.set()

    monkeypatch.setattr(Lanes, "pull", hangs)
    monkeypatch.setattr(Lanes, "cut", cut)
    hand = Handoff(made)
    call = await hand.prefill()
    asking = asyncio.create_task(hand.decode(call))
    await asyncio.wait_for(begun.wait(), 30)
    await made.internal(made.prefill[0], "kv/release", {"id": call["id"]})
    status, answer = await asyncio.wait_for(asking, 30)
    assert (status, answer["error"]["code"]) == (502, "kv_transfer_failed")
    assert "no longer holds the KV" in answer["error"]["message"]
    assert [peer for peer, _ in cuts] == [call["kv"]["agent"]]
    decode = made.decode[0]
    await until("nothing is in flight", lambda: not decode.process.life.in_flight)
    assert decode.free < decode.engine.stats().blocks_total
    over.set_result(None)
    await made.idle()


async def test_bytes_that_came_after_the_lease_are_not_used(made: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks may have been another request's by then."""
    prefill, decode = made.prefill[0].process.pod.loaded, made.decode[0].process.pod.loaded
    assert prefill is not None
    assert decode is not None
    monkeypatch.setattr(prefill.holder.table, "heard_seconds", 0.0)
    # No heartbeat tells it before.
    monkeypatch.setattr(decode.puller, "beats", Heartbeats(decode.puller._beat, beat=3600))
    hand = Handoff(made)
    call = await hand.prefill()
    status, answer = await hand.decode(call)
    assert (status, answer["error"]["code"]) == (502, "kv_transfer_failed")
    assert "ran out while its KV was read" in answer["error"]["message"]
    assert not made.decode[0].engine.decoded
    await made.idle()
