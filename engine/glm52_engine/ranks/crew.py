"""The ranks of one host within the process group: a thread each, all of which do the same at the same time."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from glm52_engine.checkpoint import ModelSpec
from glm52_engine.model import Model
from glm52_engine.ranks.collectives import CollectiveError, TorchCollectives
from glm52_engine.ranks.experts import ShardedMoe
from glm52_engine.ranks.follower import Follower, ShardedExecutor
from glm52_engine.ranks.lane import Lane
from glm52_engine.ranks.load import HostParts
from glm52_engine.ranks.messages import Join, RankOrder, RankResult, Shape
from glm52_engine.ranks.spans import RankSpan
from glm52_engine.runtime.load import hot_cache
from glm52_engine.runtime.rank import intra_op_threads
from glm52_engine.schedule import blocks_for

CPU = torch.device("cpu")

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
            threading.Thread(target=member.run, name=f"rank-{member.rank}", daemon=True).start()

    @property
    def executors(self) -> list[ShardedExecutor]:
        """Of the ranks that have joined."""
        return [member.follower.executor for member in self._members if member.follower is not None]

    async def join(self, join: Join, own_host: str) -> None:
        """Every rank enters the process group, then computes its first steps with all others. Raises RankFailed."""
        await self._each([lambda m=member: self._enter(m, join, own_host) for member in self._members])  # type: ignore[misc]

    async def execute(self, shape: Shape, orders: Sequence[RankOrder]) -> list[RankResult]:
        """One step on all ranks of this host. Raises RankFailed at the first that fails."""
        if len(orders) != len(self._members):
            raise ValueError(f"step {shape.number}: {len(orders)} orders for the {len(self._members)} ranks of a host")
        return await self._each(
            [lambda m=m, o=o: m.follower.execute(shape, o) for m, o in zip(self._members, orders, strict=True)]  # type: ignore[misc]
        )

    def leave(self) -> None:
        """Wakes whoever waits in a collective, here and elsewhere, and lets the threads end. Waits for nobody."""
        for member in self._members:
            member.jobs.put(None)
        # gloo's abort may wait for a thread of its own that a lost peer holds.
        threading.Thread(target=self._abort, daemon=True).start()

    def _abort(self) -> None:
        for member in self._members:
            if member.collectives is not None:
                member.collectives.abort()

    def _enter(self, member: _Member, join: Join, own_host: str) -> None:
        parts, world = self._parts, self._world
        member.collectives = TorchCollectives(
            rank=member.rank, world=world, store_host=join.store_host, store_port=join.store_port, group=join.group,
            own_host=own_host, device=CPU,
        )  # fmt: skip
        lane = Lane(member.collectives, device=CPU, debug=join.debug)
        moes: list[ShardedMoe] = []

        def sharded(spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> ShardedMoe:
            moes.append(ShardedMoe(spec, weights, lane))
            return moes[-1]

        model = Model(parts.spec, parts.weights.tensors, moe=sharded)
        limits, pool = parts.measures.limits, parts.pools[member.rank - self._members[0].rank]
        executor = ShardedExecutor(
            model, moes, lane, pool, limits=parts.measures.step, seats=limits.seats,
            blocks_per_seat=blocks_for(limits.max_model_len, limits.block_size), hot=hot_cache(parts.measures, pool),
        )  # fmt: skip
        executor.warm_up()
        member.follower = Follower(member.rank, executor, seats=limits.seats, limits=parts.measures.step)

    async def _each(self, works: Sequence[Callable[[], T]]) -> list[T]:
        futures: list[Future[T]] = [Future() for _ in works]
        for member, work, future in zip(self._members, works, futures, strict=True):
            member.jobs.put((work, future))  # type: ignore[arg-type]
        waiting = [asyncio.wrap_future(future) for future in futures]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        failed = [
            RankFailed(member.rank, error)
            for member, each in zip(self._members, waiting, strict=True)
            if each.done() and (error := each.exception()) is not None
        ]
        if failed:
            for each in waiting:
                each.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise next((error for error in failed if not error.consequence), failed[0])
        return [each.result() for each in waiting]
