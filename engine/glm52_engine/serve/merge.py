"""Several asynchronous sources as one, in the order in which their items come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(index of the source, item). The first failure ends all; every source is closed when this one is."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    news: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def forward(index: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for item in source:
                    news.put_nowait((index, item))
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(error)

    tasks = [asyncio.create_task(forward(index, source)) for index, source in enumerate(sources)]
    running = len(tasks)
    try:
        while running:
            told = await news.get()
            if isinstance(told, Exception):
                raise told
            if told is None:
                running -= 1
            else:
                yield told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
