from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from glm52_engine.serve.merge import merged


class Sources:
    """Sources that count how many of them were closed."""

    def __init__(self) -> None:
        self.closed = 0

    async def count(self, to: int, *, fails: bool = False, waits: bool = False) -> AsyncGenerator[int, None]:
        try:
            for n in range(to):
                await asyncio.sleep(0)
                yield n
            if fails:
                raise ValueError("broken")
            if waits:
                await asyncio.Event().wait()
        finally:
            self.closed += 1


@pytest.mark.parametrize("lengths", [[3], [3, 0, 5], [0]])
async def test_every_item_in_the_order_of_its_source(lengths: list[int]) -> None:
    sources = Sources()
    found = [item async for item in merged([sources.count(length) for length in lengths])]
    for index, length in enumerate(lengths):
        assert [n for source, n in found if source == index] == list(range(length))
    assert sources.closed == len(lengths)


@pytest.mark.parametrize("others", [0, 3])
async def test_the_first_failure_ends_all(others: int) -> None:
    sources = Sources()
    every = [sources.count(2, fails=True), *(sources.count(1, waits=True) for _ in range(others))]
    with pytest.raises(ValueError, match="broken"):
        async for _ in merged(every):
            pass
    assert sources.closed == 1 + others


@pytest.mark.parametrize("others", [0, 3])
async def test_who_stops_listening_closes_all(others: int) -> None:
    sources = Sources()
    async with contextlib.aclosing(merged([sources.count(9) for _ in range(1 + others)])) as items:
        await anext(items)
    assert sources.closed == 1 + others


async def test_a_cancelled_listener_closes_all() -> None:
    sources = Sources()

    async def listen() -> None:
        async with contextlib.aclosing(merged([sources.count(1, waits=True) for _ in range(3)])) as items:
            async for _ in items:
                pass

    task = asyncio.create_task(listen())
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert sources.closed == 3
