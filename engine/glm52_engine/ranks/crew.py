"""The ranks of one host within the process group: a thread each, all of which do the same at the same time."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from glm52_engine.config import ConfigError
from glm52_engine.ranks.collectives import CollectiveError, TorchCollectives
from glm52_engine.ranks.follower import Follower, LockStep
from glm52_engine.ranks.lane import Lane
from glm52_engine.ranks.load import HostParts
from glm52_engine.ranks.messages import Join, RankOrder, RankResult, Shape
from glm52_engine.ranks.spans import RankSpan
from glm52_engine.runtime.rank import intra_op_threads

T = TypeVar("T")


class RankFailed(Exception):
    """A rank of this host cannot go on. `consequence`: since others have left, and for no reason of its own."""

    def __init__(self, rank: int, error: BaseException) -> None:
        text = " ".join(str(error).split())
        super().__init__(f"rank {rank}: {type(error).__name__}: {text}")
        self.rank = rank
        self.consequence = isinstance(error, CollectiveError)


@dataclass(slots=True)
class _Member:
    """A rank's thread and what it has built; daemon, since one that hangs in a collective never ends."""

    rank: int
    jobs: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None]
    thread: threading.Thread | None = None
    collectives: TorchCollectives | None = None
    follower: Follower | None = None

    def run(self) -> None:
        torch.set_num_threads(intra_op_threads())
        while (job := self.jobs.get()) is not None:
            work, done = job
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)


class Crew:
    def __init__(self, span: RankSpan, world: int, parts: HostParts) -> None:
        self._parts, self._world = parts, world
        self._members = [_Member(rank, queue.SimpleQueue()) for rank in span.ranks]
        for member in self._members:
            member.thread = threading.Thread(target=member.run, name=f"rank-{member.rank}", daemon=True)
            member.thread.start()

    @property
    def executors(self) -> list[LockStep]:
        """Of the ranks that have joined."""
        return [member.follower.executor for member in self._members if member.follower is not None]

    async def join(self, join: Join, own_host: str) -> None:
        """Every rank enters the process group, then computes its first steps with all others: on GPUs also the capture
        of its graphs. Raises RankFailed, and ConfigError where a rank finds that the configuration cannot work."""
        enter = functools.partial(self._enter, join, own_host)
        await self._each([functools.partial(enter, place, member) for place, member in enumerate(self._members)])

    async def execute(self, shape: Shape, orders: Sequence[RankOrder]) -> list[RankResult]:
        """One step on all ranks of this host. Raises RankFailed at the first that fails."""
        if len(orders) != len(self._members):
            raise ValueError(f"step {shape.number}: {len(orders)} orders for the {len(self._members)} ranks of a host")
        return await self._each(
            [lambda m=m, o=o: m.follower.execute(shape, o) for m, o in zip(self._members, orders, strict=True)]  # type: ignore[misc]
        )

    def leave(self) -> None:
        """Wakes whoever waits in a collective, here and elsewhere, and lets the threads end. Waits for nobody."""
        self._parts.abandon()
        for member in self._members:
            member.jobs.put(None)
            if member.collectives is not None:
                # An abort may wait for a thread of the library's that a lost peer holds, and none for another one.
                threading.Thread(target=member.collectives.abort, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """After `leave`: whether all threads have ended in time, so that nobody uses what the ranks have loaded."""
        until = time.monotonic() + seconds
        for member in self._members:
            assert member.thread is not None
            member.thread.join(max(0.0, until - time.monotonic()))
        return not any(member.thread is not None and member.thread.is_alive() for member in self._members)

    def _enter(self, join: Join, own_host: str, place: int, member: _Member) -> None:
        parts = self._parts
        device = parts.devices[place]
        member.collectives = TorchCollectives(
            rank=member.rank, world=self._world, store_host=join.store_host, store_port=join.store_port,
            group=join.group, own_host=own_host, device=device,
        )  # fmt: skip
        executor = parts.executor(place, Lane(member.collectives, device=device, debug=join.debug))
        executor.enter()
        executor.warm_up()
        measures = parts.measures
        member.follower = Follower(member.rank, executor, seats=measures.limits.seats, limits=measures.step)

    async def _each(self, works: Sequence[Callable[[], T]]) -> list[T]:
        futures: list[Future[T]] = [Future() for _ in works]
        for member, work, future in zip(self._members, works, futures, strict=True):
            member.jobs.put((work, future))  # type: ignore[arg-type]
        waiting = [asyncio.wrap_future(future) for future in futures]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        errors = {
            member.rank: error
            for member, each in zip(self._members, waiting, strict=True)
            if each.done() and (error := each.exception()) is not None
        }
        if errors:
            for each in waiting:
                each.add_done_callback(lambda done: done.cancelled() or done.exception())
            refused = next((error for error in errors.values() if isinstance(error, ConfigError)), None)
            if refused is not None:
                raise refused
            failed = [RankFailed(rank, error) for rank, error in errors.items()]
            raise next((error for error in failed if not error.consequence), failed[0])
        return [each.result() for each in waiting]
