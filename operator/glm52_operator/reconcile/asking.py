"""Asking pods of deployments beside the passes: a task for each deployment, and so many questions at once for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from glm52_operator.reconcile.store import Key

T = TypeVar("T")


class Asking(Generic[T]):
    """`ask`: a pod's address → what it says, None where it says nothing."""

    def __init__(self, ask: Callable[[str], Awaitable[T | None]], at_once: int) -> None:
        self._ask = ask
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._free = asyncio.Semaphore(at_once)

    def start(self, key: Key, work: Callable[[Key], Coroutine[Any, Any, None]], name: str) -> None:
        """Unless the deployment has its task already."""
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(work(key), name=f"{name} {key[0]}/{key[1]}")

    def stop(self, key: Key) -> None:
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def answers(self, pods: Mapping[str, str]) -> dict[str, T]:
        """Of these, uid → address: what each says that says something, by uid."""
        said = await asyncio.gather(*(self._one(address) for address in pods.values()))
        return {uid: answer for uid, answer in zip(pods, said, strict=True) if answer is not None}

    async def _one(self, address: str) -> T | None:
        async with self._free:
            return await self._ask(address)
