"""Ranks as threads of the test, each with its place in one real gloo group on loopback."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from glm52_engine.ranks.collectives import TorchCollectives, serve_store

LOOPBACK = "127.0.0.1"
SECONDS = 60.0

T = TypeVar("T")


class Group:
    def __init__(self, world: int) -> None:
        self.world = world
        self._threads = ThreadPoolExecutor(world)
        self._store = serve_store(LOOPBACK)
        name = uuid.uuid4().hex
        self.members = self.each(
            lambda rank: TorchCollectives(
                rank=rank,
                world=world,
                store_host=LOOPBACK,
                store_port=self._store.port,
                group=name,
                own_host=LOOPBACK,
                device=torch.device("cpu"),
            )
        )

    def each(self, work: Callable[[int], T]) -> list[T]:
        """`work(rank)` on all ranks at once; raises what the first of them raised, when all are over."""
        futures = [self._threads.submit(work, rank) for rank in range(self.world)]
        errors = [future.exception(SECONDS) for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def errors(self, work: Callable[[int], object]) -> list[BaseException | None]:
        futures = [self._threads.submit(work, rank) for rank in range(self.world)]
        return [future.exception(SECONDS) for future in futures]


@contextmanager
def group(world: int) -> Iterator[Group]:
    made = Group(world)
    try:
        yield made
    finally:
        for member in made.members:
            member.abort()
        made._threads.shutdown()
