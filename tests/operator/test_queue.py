"""The work queue, on a clock that only tests move."""

from __future__ import annotations

import asyncio

import pytest

from glm52_operator.reconcile.queue import IN_A_ROW, Backoff, WorkQueue
from tests.operator.conftest import FakeClock


@pytest.fixture
def queue(clock: FakeClock) -> WorkQueue[str]:
    return WorkQueue(clock, Backoff(base=1, cap=8))


def waiting(queue: WorkQueue[str]) -> list[str]:
    return queue.waiting()


async def test_a_key_is_handed_out_once_however_often_it_is_added(queue: WorkQueue[str]) -> None:
    for _ in range(100):
        queue.add("a")
    queue.add("b")
    assert [await queue.get(), await queue.get()] == ["a", "b"]
    assert waiting(queue) == []


async def test_a_key_that_is_worked_on_is_not_handed_out_twice_but_once_more(queue: WorkQueue[str]) -> None:
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    queue.add("a")
    assert waiting(queue) == []
    queue.done("a")
    assert waiting(queue) == ["a"]
    assert await queue.get() == "a"
    queue.done("a")
    assert waiting(queue) == []


async def test_failures_wait_longer_and_longer_up_to_the_cap(queue: WorkQueue[str], clock: FakeClock) -> None:
    queue.add("a")
    delays = []
    for _ in range(6):
        assert await queue.get() == "a"
        delays.append(queue.failed("a"))
        clock.advance(delays[-1] - 0.01)
        assert waiting(queue) == []
        clock.advance(0.02)
    assert delays == [1, 2, 4, 8, 8, 8]


async def test_success_resets_the_delay(queue: WorkQueue[str], clock: FakeClock) -> None:
    queue.add("a")
    for _ in range(3):
        await queue.get()
        clock.advance(queue.failed("a"))
    await queue.get()
    queue.done("a")
    queue.add("a")
    await queue.get()
    assert queue.failed("a") == 1


async def test_an_event_does_not_shorten_the_delay_of_a_key_that_failed(
    queue: WorkQueue[str], clock: FakeClock
) -> None:
    queue.add("a")
    await queue.get()
    queue.add("a")
    queue.failed("a")
    queue.add("a")
    assert waiting(queue) == []
    clock.advance(1)
    assert waiting(queue) == ["a"]


async def test_a_fresh_specification_is_tried_at_once(queue: WorkQueue[str], clock: FakeClock) -> None:
    queue.add("a")
    await queue.get()
    queue.failed("a")
    queue.add("a", fresh=True)
    assert waiting(queue) == ["a"]
    await queue.get()
    queue.done("a")
    clock.advance(100)
    assert waiting(queue) == []


async def test_a_fresh_specification_during_a_failing_pass_is_tried_right_after(queue: WorkQueue[str]) -> None:
    queue.add("a")
    await queue.get()
    queue.add("a", fresh=True)
    queue.failed("a")
    assert waiting(queue) == ["a"]


async def test_requeue_after(queue: WorkQueue[str], clock: FakeClock) -> None:
    queue.add("a")
    await queue.get()
    queue.done("a", requeue_after=10)
    clock.advance(9)
    assert waiting(queue) == []
    clock.advance(1)
    assert waiting(queue) == ["a"]


async def test_an_event_before_the_requeue_replaces_it(queue: WorkQueue[str], clock: FakeClock) -> None:
    queue.add("a")
    await queue.get()
    queue.done("a", requeue_after=10)
    queue.add("a")
    await queue.get()
    queue.done("a")
    clock.advance(60)
    assert waiting(queue) == []


async def test_a_waiting_worker_wakes_up(queue: WorkQueue[str]) -> None:
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    assert await worker == "a"


async def test_closing_ends_every_worker_and_every_timer(queue: WorkQueue[str], clock: FakeClock) -> None:
    queue.add("a")
    await queue.get()
    workers = [asyncio.create_task(queue.get()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.close()
    assert await asyncio.gather(*workers) == [None, None, None]
    queue.failed("a")
    clock.advance(100)
    assert waiting(queue) == []


async def test_the_oldest_running_work_is_known(queue: WorkQueue[str], clock: FakeClock) -> None:
    assert queue.longest_active() == 0
    queue.add("a")
    await queue.get()
    clock.advance(7)
    queue.add("b")
    await queue.get()
    clock.advance(1)
    assert queue.longest_active() == 8
    queue.done("a")
    assert queue.longest_active() == 1


async def test_a_forgotten_key_leaves_nothing_behind(queue: WorkQueue[str], clock: FakeClock) -> None:
    queue.add("a")
    await queue.get()
    queue.failed("a")
    queue.forget("a")
    clock.advance(100)
    assert waiting(queue) == []
    assert queue.failures("a") == 0


async def test_an_edit_does_not_wait_behind_what_is_only_looked_at(queue: WorkQueue[str]) -> None:
    for number in range(2000):
        queue.add(f"looked at {number}")
    queue.add("edited", fresh=True)
    # Also one that waits already.
    queue.add("looked at 1500", fresh=True)
    got = [await queue.get() for _ in range(4)]
    assert got == ["edited", "looked at 1500", "looked at 0", "looked at 1"]
    assert queue.depth() == 2001 - 4


async def test_an_edit_during_a_pass_is_next(queue: WorkQueue[str]) -> None:
    queue.add("a")
    assert await queue.get() == "a"
    for key in ("b", "c"):
        queue.add(key)
    queue.add("a", fresh=True)
    queue.done("a")
    assert await queue.get() == "a"


async def test_edits_without_end_keep_nobody_from_its_turn(queue: WorkQueue[str], clock: FakeClock) -> None:
    for key in ("b", "c"):
        queue.add(key)
    clock.advance(3)
    got: list[str] = []
    while not {"b", "c"} <= set(got):
        for key in ("a", "z"):
            queue.add(key, fresh=True)
        assert queue.oldest_waiting() == 3
        taken = await queue.get()
        assert taken is not None
        queue.done(taken)
        got.append(taken)
    assert [got.index("b"), got.index("c")] == [IN_A_ROW, 2 * IN_A_ROW + 1]
