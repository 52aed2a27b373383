"""Drains under load: what runs finishes, what waits goes to another pod, and nothing is lost where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from glm52_engine.config import Role
from glm52_engine.lifecycle.life import Life, Refused
from glm52_engine.serve.queued import unless_drained
from tests.engine.serve.deployment import PROMPT, Builder, Deployment, RunningPod, body, until
from tests.engine.serve.fakes import FakeEngine, expected_text

BLOCKS = -(-(len(PROMPT) + 12) // 4)
"""What one request takes: with so many a pod serves one, and the next waits."""


async def texts(answers: list[asyncio.Task[Any]]) -> list[Any]:
    return [answer.json()["choices"][0]["text"] for answer in await asyncio.gather(*answers)]


def waiting(pods: list[RunningPod]) -> Callable[[], bool]:
    return lambda: sum(pod.engine.stats().waiting for pod in pods) > 0


def one_at_a_time(seconds: float) -> FakeEngine:
    return FakeEngine(num_blocks=BLOCKS, step_seconds=seconds)


async def busy(build: Builder, role: Role, count: int) -> tuple[Deployment, list[RunningPod], list[Any]]:
    """A deployment whose pods of one role all have a request that runs, and one of them a second that waits."""
    slow = [one_at_a_time(0.5 if role == "prefill" else 0.05) for _ in range(count)]
    others = [FakeEngine()]
    made = await (build.deployment(slow, others) if role == "prefill" else build.deployment(others, slow))
    pods: list[RunningPod] = getattr(made, role)
    answers = [asyncio.create_task(made.post("/v1/completions", body())) for _ in range(count + 1)]
    await until("one request waits", waiting(pods))
    return made, pods, answers


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_waits_in_a_draining_pod_is_served_by_another(build: Builder, role: Role) -> None:
    _, pods, answers = await busy(build, role, 2)
    (drains,) = [pod for pod in pods if pod.engine.stats().waiting]
    (other,) = [pod for pod in pods if pod is not drains]
    assert await drains.end() == 0
    assert await texts(answers) == [expected_text(PROMPT, 12)] * 3
    served = {
        pod.url: pod.engine.computed // len(PROMPT) if role == "prefill" else len(pod.engine.decoded) for pod in pods
    }
    assert served == {drains.url: 1, other.url: 2}


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_waits_in_the_only_pod_is_served_by_it_before_it_goes(build: Builder, role: Role) -> None:
    """Its successor comes when it is gone: sent away, the request would find nobody in time."""
    _, pods, answers = await busy(build, role, 1)
    assert await pods[0].end() == 0
    assert await texts(answers) == [expected_text(PROMPT, 12)] * 2


async def test_of_several_choices_none_is_moved_once_one_has_begun(build: Builder) -> None:
    made = await build.deployment([FakeEngine()], [one_at_a_time(0.05)])
    answer = asyncio.create_task(made.post("/v1/completions", body(n=2, temperature=1)))
    await until("the second choice waits", waiting(made.decode))
    assert await made.decode[0].end() == 0
    assert [choice["finish_reason"] for choice in (await answer).json()["choices"]] == ["length", "length"]


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(build: Builder) -> None:
    made, _, answers = await busy(build, "decode", 1)
    for answer in answers:
        answer.cancel()
    await asyncio.gather(*answers, return_exceptions=True)
    await made.idle()


async def test_a_result_that_comes_with_the_cancellation_is_given_back() -> None:
    life = Life(window=10, propagation=0)
    life.ready()
    done, returned = asyncio.Event(), []

    async def call() -> int:
        await done.wait()
        return 1

    waits = asyncio.create_task(
        unless_drained(life, call(), stay=False, withdraw=lambda: False, give_back=lambda: returned.append(1))
    )
    await asyncio.sleep(0)
    done.set()
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert returned == [1]


async def test_a_call_that_has_begun_is_not_withdrawn() -> None:
    life = Life(window=10, propagation=0)
    life.ready()
    life.drain("TERM")

    async def call(seconds: float) -> int:
        await asyncio.sleep(seconds)
        return 1

    calls = {"stay": False, "give_back": lambda: None}
    assert await unless_drained(life, call(0.2), withdraw=lambda: False, **calls) == 1  # type: ignore[arg-type]
    with pytest.raises(Refused) as refused:
        await unless_drained(life, call(60), withdraw=lambda: True, **calls)  # type: ignore[arg-type]
    assert refused.value.returns
    # One that finds its seat at once need not move at all.
    assert await unless_drained(life, call(0), withdraw=lambda: True, **calls) == 1  # type: ignore[arg-type]


async def test_a_new_request_does_not_prolong_a_drain(build: Builder) -> None:
    """Under steady traffic the only pod of a role would never be done, and cut off what runs at its window's end."""
    made = await build.deployment([FakeEngine()], [FakeEngine(step_seconds=0.05)])
    running = asyncio.create_task(made.post("/v1/completions", body(max_tokens=40)))
    await until("decode runs", lambda: bool(made.decode[0].engine.decoded))
    made.decode[0].process.terminate("test")
    assert (await made.post("/v1/completions", body())).status == 503
    assert (await running).status == 200
    assert len(made.decode[0].engine.decoded) == 1
