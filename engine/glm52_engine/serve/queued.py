"""Requests that wait when a drain begins go to another pod: here they might wait for longer than the window lasts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from glm52_engine.lifecycle.life import Life, Refused

T = TypeVar("T")

SETTLE_SECONDS = 0.05
"""A request that gets its seat within this time need not move."""


async def unless_drained(
    life: Life,
    call: Coroutine[Any, Any, T],
    *,
    stay: bool,
    withdraw: Callable[[], bool],
    give_back: Callable[[], None],
) -> T:
    """The result of a call that may have to wait for a seat.

    Raises Refused where a drain begins first and `withdraw` takes the call back: not one that has begun, and with
    `stay` none at all. A cancellation cancels the call; `give_back` then undoes one that was done already.
    """
    task = asyncio.ensure_future(call)
    moves = asyncio.ensure_future(_moves(life))
    delivered = False
    try:
        await asyncio.wait({task} if stay else {task, moves}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and withdraw():
            raise Refused("draining; the request had not begun", returns=True)
        await asyncio.wait({task})
        delivered = True
        return task.result()
    finally:
        moves.cancel()
        if not task.done():
            task.cancel()
        if not delivered:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
                give_back()


async def _moves(life: Life) -> None:
    await life.drain_began.wait()
    await asyncio.sleep(SETTLE_SECONDS)
