"""Pods that are asked over their address, and waiting for what follows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


async def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not true():
        assert time.monotonic() < limit
        await asyncio.sleep(0)


class Pods(Generic[T]):
    """Answers by address; None: silent."""

    def __init__(self) -> None:
        self.says: dict[str, T | None] = {}
        self.asked: list[str] = []
        self.under_way = self.most = 0

    async def ask(self, address: str) -> T | None:
        self.asked.append(address)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        return self.says.get(address)
