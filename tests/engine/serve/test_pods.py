"""Lives of pods: what is computed where, who frees what, how a process ends."""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm52_engine.config import EXIT_CODES as CODES
from glm52_engine.config import Hold, Outcome, Termination
from glm52_engine.hardware.health import Reason, Verdict
from glm52_engine.lifecycle.start import bind
from glm52_engine.serve import process
from glm52_engine.serve.process import Process
from glm52_engine.transfer.lease import LeaseTable
from tests.engine.serve import deployment
from tests.engine.serve.deployment import PROMPT, Builder, Deployment, Handoff, body, events, state, until
from tests.engine.serve.fakes import FakeEngine, expected_text


async def one(build: Builder, prefill: FakeEngine | None = None, decode: FakeEngine | None = None) -> Deployment:
    return await build.deployment([prefill or FakeEngine()], [decode or FakeEngine()])


async def test_a_completion_is_computed_once_and_its_kv_crosses(build: Builder) -> None:
    made = await one(build)
    answer = await made.post("/v1/completions", body(return_token_ids=True))
    assert answer.status == 200, answer.raw
    choice = answer.json()["choices"][0]
    assert choice["text"] == expected_text(PROMPT, 12)
    assert choice["token_ids"] == list(choice["text"].encode())
    assert (choice["finish_reason"], choice["index"]) == ("length", 0)
    assert answer.json()["usage"] == {
        "prompt_tokens": 23,
        "completion_tokens": 12,
        "total_tokens": 35,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert answer.json()["id"] == answer.headers["x-request-id"]
    await made.idle()
    prefill, decode = [await state(made, pod.url) for pod in made.pods]
    blocks = -(-len(PROMPT) // 4)
    assert prefill["prompt_tokens_computed"] == 23
    assert decode["prompt_tokens_computed"] == 0
    assert prefill["kv_bytes_out"] == decode["kv_bytes_in"] == blocks * 256
    assert (prefill["kv_handed_over"], decode["kv_pulls"]) == (1, 1)


async def test_one_token_needs_no_hand_off(build: Builder) -> None:
    made = await one(build)
    answer = await made.post("/v1/completions", body(max_tokens=1))
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 1
    await made.idle()
    assert made.decode[0].engine.decoded == []
    assert made.prefill[0].process.pod.counters.given_up == 0


async def test_a_stop_string_in_the_first_token_gives_the_kv_back_unread(build: Builder) -> None:
    made = await one(build)
    answer = await made.post("/v1/completions", body(stop=expected_text(PROMPT, 1)))
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", expected_text(PROMPT, 1))
    await made.idle()
    assert made.decode[0].engine.decoded == []
    assert made.prefill[0].process.pod.counters.given_up == 1


async def test_the_end_token_ends_the_text(build: Builder) -> None:
    made = await one(build, FakeEngine(ends_after=4), FakeEngine(ends_after=4))
    choice = (await made.post("/v1/completions", body())).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected_text(PROMPT, 4), "stop")
    ignored = (await made.post("/v1/completions", body(ignore_eos=True))).json()["choices"][0]
    assert (ignored["text"], ignored["finish_reason"]) == (expected_text(PROMPT, 12), "length")


async def test_many_at_once_wait_for_blocks_and_none_gets_anothers_text(build: Builder) -> None:
    made = await one(build, FakeEngine(num_blocks=24), FakeEngine(num_blocks=24))
    prompts = [[*PROMPT, *range(97, 97 + n)] for n in range(12)]
    answers = await asyncio.gather(*(made.post("/v1/completions", body(prompt=prompt)) for prompt in prompts))
    assert [a.json()["choices"][0]["text"] for a in answers] == [expected_text(prompt, 12) for prompt in prompts]
    await made.idle()


async def test_pods_of_two_models_never_exchange_kv(build: Builder) -> None:
    """In the middle of an update both are there: whoever can work together serves, and nobody gives wrong text."""
    both = [FakeEngine(model="old"), FakeEngine(model="new")]
    made = await build.deployment(both, [FakeEngine(model="old"), FakeEngine(model="new")])
    prefill, decode = [pod.url for pod in made.prefill], [pod.url for pod in made.decode]
    for url in (made.url, await build.router(prefill, decode[1:])):
        made.url = url
        answers = await asyncio.gather(*(made.post("/v1/completions", body()) for _ in range(4)))
        assert [a.json()["choices"][0]["text"] for a in answers] == [expected_text(PROMPT, 12)] * 4
    made.url = await build.router(prefill[:1], decode[1:])
    answer = await asyncio.wait_for(made.post("/v1/completions", body(stream=True)), 5)
    assert (answer.status, answer.json()["error"]["code"]) == (502, "kv_mismatch")
    assert "model: decode has 'new', prefill has 'old'" in answer.json()["error"]["message"]
    await made.idle()


async def test_a_lease_that_nobody_uses_ends(build: Builder) -> None:
    hand = Handoff(await one(build))
    pod = hand.made.prefill[0].process.pod
    assert pod.loaded is not None
    pod.loaded.holder.table.seconds = 0.2
    call = await hand.prefill()
    assert len(pod.loaded.holder) == 1
    await asyncio.wait_for(hand.made.idle(), 5)
    assert pod.counters.expired == 1
    status, answer = await hand.decode(call)
    assert (status, answer["error"]["code"]) == (502, "kv_transfer_failed")


async def test_a_pod_answers_its_probes_while_it_loads(build: Builder) -> None:
    gate = threading.Event()
    pod = await build.pod("decode", FakeEngine(), gate=gate)

    async def ask(path: str) -> tuple[int, Any]:
        async with build.session.get(pod.url + path) as response:
            return response.status, await response.json()

    assert (await ask("/livez"))[0] == 200
    status, body = await ask("/startupz")
    assert (status, body["status"], body["phase"]) == (503, "starting", "a phase")
    assert [phase["name"] for phase in body["phases"]] == ["starting the process"]
    assert (await ask("/readyz"))[1]["reason"] == "starting: a phase"
    gate.set()
    await until("it is ready", lambda: pod.process.pod.loaded is not None)
    status, body = await ask("/startupz")
    assert status == (await ask("/readyz"))[0] == 200
    assert {"a phase", "registering the KV pools for transfer", "everything"} <= {p["name"] for p in body["phases"]}


async def test_a_held_pod_loads_nothing_is_not_killed_for_it_and_leaves_at_once(
    build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM52_HOLD", Hold(why="crashed 8 times").encode())
    gate = threading.Event()
    gate.set()
    pod = await build.pod("decode", FakeEngine(), gate=gate, phase="held until the specification is changed")
    async with build.session.get(pod.url + "/startupz") as response:
        assert (response.status, (await response.json())["status"]) == (200, "held")
    async with build.session.get(pod.url + "/readyz") as response:
        assert (response.status, (await response.json())["stage"]) == (503, "Starting")
    assert pod.process.pod.loaded is None
    assert await pod.end() == 0


async def test_after_its_hold_a_pod_starts_and_a_start_that_hangs_then_is_ended(
    build: Builder, monkeypatch: pytest.MonkeyPatch, words: Path
) -> None:
    until_soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.5)
    monkeypatch.setenv("GLM52_HOLD", Hold(until=until_soon).encode())
    made = await build.deployment([FakeEngine()], [FakeEngine()])
    assert (await made.post("/v1/completions", body())).status == 200
    # Its startup probe has passed while it was held: nobody else would end it.
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.5)
    monkeypatch.setenv("GLM52_HOLD", Hold(until=later).encode())
    monkeypatch.setattr(Process, "_start_budget", lambda self: 1)
    pod = await build.pod("decode", FakeEngine(), gate=threading.Event(), phase="held")
    assert await asyncio.wait_for(pod.task, 20) == CODES[Outcome.CRASHED]
    assert "the start took more than 1 s; last: a phase" in last_words(words).message


async def test_term_ends_an_idle_pod_at_once_with_exit_code_0(build: Builder) -> None:
    made = await build.deployment([FakeEngine()], [], router=False)
    assert await made.prefill[0].end() == 0


async def test_term_lets_running_streams_finish(build: Builder) -> None:
    made = await one(build, None, FakeEngine(step_seconds=0.05))
    request = asyncio.create_task(made.post("/v1/completions", body(max_tokens=30, stream=True)))
    await until("decode runs", lambda: bool(made.decode[0].engine.decoded))
    assert await made.decode[0].end() == 0
    assert events((await request).raw)[-1] == b"[DONE]"


async def test_prefill_waits_for_the_peer_that_still_needs_its_kv(build: Builder) -> None:
    hand = Handoff(await one(build))
    call = await hand.prefill()
    hand.made.prefill[0].process.terminate("TERM")
    await asyncio.sleep(0.1)
    assert not hand.made.prefill[0].task.done()
    assert (await hand.decode(call))[0] == 200
    assert await asyncio.wait_for(hand.made.prefill[0].task, 5) == 0


async def test_when_the_window_is_over_a_stream_ends_with_an_error(build: Builder) -> None:
    made = Deployment(build.session)
    made.prefill = [await build.pod("prefill", FakeEngine())]
    made.decode = [await build.pod("decode", FakeEngine(step_seconds=0.1), window=1)]
    made.url = await build.router([made.prefill[0].url], [made.decode[0].url])
    request = asyncio.create_task(made.post("/v1/completions", body(max_tokens=90, stream=True)))
    await until("decode runs", lambda: bool(made.decode[0].engine.decoded))
    assert await made.decode[0].end() == CODES[Outcome.DRAIN_TIMED_OUT]
    *chunks, last = events((await request).raw)
    assert last["error"]["code"] == "aborted"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


def last_words(path: Path) -> Termination:
    told = Termination.decode(path.read_text())
    assert told is not None
    return told


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TERMINATION_LOG", str(tmp_path / "termination"))
    return tmp_path / "termination"


async def test_a_failed_rank_ends_the_process_as_crashed(build: Builder, words: Path) -> None:
    engine = FakeEngine()
    pod = await build.pod("decode", engine)
    engine.broken = RuntimeError("the rank died")
    assert await asyncio.wait_for(pod.task, 5) == CODES[Outcome.CRASHED]
    told = last_words(words)
    assert (told.outcome, told.rank, told.marker) == (Outcome.CRASHED, engine.suspect(), f"CRASH_{told.host}")
    assert "the rank died" in told.message


async def test_a_stalled_step_ends_the_process_as_wedged(build: Builder, words: Path) -> None:
    engine = FakeEngine()
    pod = await build.pod("decode", engine)
    engine.stuck = 61.0
    assert await asyncio.wait_for(pod.task, 5) == CODES[Outcome.WEDGED]
    assert last_words(words).rank == engine.suspect()


async def test_a_transfer_thread_that_died_ends_the_process(build: Builder, words: Path) -> None:
    """No KV would cross any more, and every probe would go on to say yes."""
    pod = await build.pod("decode", FakeEngine())
    loaded = pod.process.pod.loaded
    assert loaded is not None
    loaded.agent._agents[-1]._inbox.put("nonsense")  # type: ignore[attr-defined]
    assert await asyncio.wait_for(pod.task, 5) == CODES[Outcome.CRASHED]
    assert "KV transfer" in last_words(words).message


async def test_a_lost_gpu_ends_the_process_by_its_name(
    build: Builder, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Callable[[Verdict], None]] = []
    monkeypatch.setattr(process, "watch_gpus", lambda ranks, on_verdict: told.append(on_verdict))
    on_gpus = deployment.config().model_copy(update={"accelerator": "nvidia"})
    monkeypatch.setattr(deployment, "config", lambda **given: on_gpus)
    pod = await build.pod("decode", FakeEngine())
    told[0](Verdict(Reason.ECC, False, "GpuEccError: watch it", 0))
    assert not pod.task.done()
    await asyncio.to_thread(told[0], Verdict(Reason.LOST, True, "GpuLost: GPU 3 of rank 2 fell off the bus", 2))
    assert await asyncio.wait_for(pod.task, 5) == CODES[Outcome.CRASHED]
    assert (last_words(words).message, last_words(words).rank) == ("GpuLost: GPU 3 of rank 2 fell off the bus", 2)


async def test_a_background_task_that_breaks_ends_the_process(
    build: Builder, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = await build.pod("prefill", FakeEngine())

    def broken(table: LeaseTable, now: float) -> None:
        raise OSError("leases expire no more")

    monkeypatch.setattr(LeaseTable, "expire", broken)
    assert await asyncio.wait_for(pod.task, 5) == CODES[Outcome.CRASHED]
    assert "leases expire no more" in last_words(words).message


async def test_a_term_during_a_start_lets_what_is_pinned_go(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    more = threading.Event()

    def load(config: Any, role: Any, on_phase: Callable[[str], None], **hosts: Any) -> Any:
        try:
            for piece in range(2000):
                on_phase(f"pinning {piece}")
                steps.append("a piece")
                more.wait(0.01)
        finally:
            steps.append("unpinned")

    monkeypatch.setattr(process, "load_engine", load)
    options = process.ServeOptions("decode", "", "", "127.0.0.1", 0, propagation=0)
    config = deployment.config().model_copy(update={"accelerator": "nvidia"})
    starting = Process(options, config, deployment.TOKENS, bind("127.0.0.1", 0))
    task = asyncio.create_task(starting.run())
    await until("it pins", lambda: len(steps) > 2)
    starting.terminate("test")
    assert await asyncio.wait_for(task, 15) == CODES[Outcome.DRAINED]
    assert steps[-1] == "unpinned"
    assert len(steps) < 2000
