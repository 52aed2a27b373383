"""Work that must not outlive what it depends on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def unless(work: Awaitable[T], watches: Iterable[asyncio.Task[None]]) -> T:
    """The result of `work`; raises what a watch raises if that comes first. Watches end by raising only.

    The work is then let go: a rank that hangs in a collective cannot be cancelled, and nobody may wait for it.
    """
    task = asyncio.ensure_future(work)
    watching = set(watches)
    try:
        await asyncio.wait({task, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.add_done_callback(_seen)
        for watch in watching:
            if watch.done():
                watch.result()
        raise RuntimeError("a watch ended without a reason")
    finally:
        if not task.done():
            task.cancel()


def _seen(task: asyncio.Future[T]) -> None:
    if not task.cancelled():
        task.exception()
