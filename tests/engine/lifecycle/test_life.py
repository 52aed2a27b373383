from __future__ import annotations

import asyncio

import pytest

from glm52_engine.lifecycle.life import Life, Refused


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, held: list[int] | None = None, *, propagation: float = 5) -> Life:
    life = Life(window=30, propagation=propagation, held=lambda: len(held or []), clock=clock)
    life.ready()
    return life


async def test_requests_are_counted_and_refused_after_the_propagation_time() -> None:
    clock = Clock()
    life = make(clock)
    life.drain("TERM")
    with life.serving():
        assert life.in_flight == 1
    clock.now = 105.0
    with pytest.raises(Refused, match="draining"), life.serving():
        pass
    assert life.in_flight == 0


async def test_the_end_of_the_last_request_ends_the_drain_at_once() -> None:
    clock = Clock()
    life = make(clock, propagation=0)
    with life.serving():
        life.drain("TERM")
        waiting = asyncio.create_task(life.until_drained())
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await asyncio.wait_for(waiting, 0.5)


async def test_held_kv_keeps_a_prefill_pod_until_the_window_is_over() -> None:
    clock = Clock()
    held = [1]
    life = make(clock, held, propagation=0)
    life.drain("TERM")
    waiting = asyncio.create_task(life.until_drained())
    await asyncio.sleep(0)
    clock.now += 31
    life.poke()
    assert await asyncio.wait_for(waiting, 2) is False


async def test_the_drain_endpoint_begins_a_drain_and_says_how_it_stands() -> None:
    clock = Clock()
    life = make(clock, propagation=0)
    with life.serving():
        answer = await life.drain_call({"wait_seconds": 0})
        assert (answer["drained"], answer["in_flight"], answer["seconds_left"]) == (False, 1, 30.0)
    assert (await life.drain_call({"wait_seconds": "soon"}))["drained"] is True
