"""The agents of one pod. Without RDMA it is a core that copies or sends the bytes of an agent: several agents, each on
a thread of its own, take a long pull in parts.

What is as for one agent: a pull is done with its last part and fails with the first that does, its blocks are free when
nothing writes to any of them, and its owner is told once.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from glm52_engine.runtime.cores import usable_cores
from glm52_engine.runtime.types import KvPool
from glm52_engine.transfer.agent import EVERY_DEVICE, PULL_SECONDS, TransferAgent
from glm52_engine.transfer.devices import Choice
from glm52_engine.transfer.parts import Gathering, parts_of
from glm52_engine.transfer.pulls import Lane, Peer, Pull, brought
from glm52_engine.transfer.wire import Ask, decode_part

log = logging.getLogger(__name__)

MOST = 8
"""More lanes than that were not measured to bring more."""


def how_many(devices: Choice, cores: float) -> tuple[int, str]:
    """Lanes of a pod, and why."""
    if devices.rails:
        return 1, "RDMA devices share every transfer, and each lane would register the pools with them once more"
    count = max(1, min(MOST, int(cores / 2)))
    return count, f"without RDMA a core moves the bytes of a lane, and this pod may use {cores:g}: half of them"


def chosen_lanes(devices: Choice) -> int:
    """Of this pod, and told in the log."""
    count, reason = how_many(devices, usable_cores())
    log.info("lanes for KV", extra={"lanes": count, "reason": reason})
    return count


class Lanes:
    """A `transfer.agent.KvAgent` of `count` agents with the same pools; the parameters as a `TransferAgent` has them,
    but `on_notice` is called on any of their threads."""

    def __init__(
        self,
        name: str,
        pools: Sequence[KvPool],
        *,
        on_notice: Callable[[bytes], None],
        expects: Callable[[], bool],
        devices: Choice = EVERY_DEVICE,
        count: int = 1,
    ) -> None:
        self.name = name
        self._on_notice = on_notice
        self._gathering, self._gate = Gathering(), threading.Lock()
        self._numbers = itertools.count(1)
        first = TransferAgent(
            name, pools, on_notice=self._heard, expects=expects, devices=devices, on_ask=self._wake_others
        )
        # They are woken by what the first one hears: many threads that look out all the time would be in the way of
        # the thread that steps.
        others = [
            TransferAgent(
                f"{name}.{number}", pools, on_notice=self._heard, expects=lambda: False, devices=devices
            )
            for number in range(1, count)
        ]  # fmt: skip
        self._agents = [first, *others]
        self.regions = first.regions

    @property
    def failure(self) -> BaseException | None:
        return next((agent.failure for agent in self._agents if agent.failure is not None), None)

    @property
    def described(self) -> Peer:
        """As peers need it to pull from here; after `start`."""
        first, *others = self._agents
        return replace(first.described, lanes=tuple(Lane(agent.name, agent.metadata) for agent in others))

    def start(self) -> None:
        """Blocking: creates the agents and registers every pool with each."""
        for agent in self._agents:
            agent.start()

    async def pull(self, pull: Pull, *, seconds: float = PULL_SECONDS) -> int:
        """Has the blocks written here, returns the bytes: see `pulls.brought`."""
        parts = parts_of(pull, len(self._agents), f"{self.name}#{next(self._numbers)}")
        return await brought([agent.ask(part, seconds=seconds) for agent, part in zip(self._agents, parts)])  # noqa: B905

    def cut(self, peer: str, reason: str) -> None:
        """As of one agent: parts go by the name of the peer, not of its lane."""
        for agent in self._agents:
            agent.cut(peer, reason)

    async def checksums(self, rank: int, blocks: Sequence[int]) -> list[int] | None:
        return await self._agents[0].checksums(rank, blocks)

    def close(self, timeout: float = 5.0) -> None:
        """Ends running pulls, deregisters the pools and joins the threads, all within the time of one."""
        until = time.monotonic() + timeout
        for agent in self._agents:
            agent.close(0)
        for agent in self._agents:
            agent.close(max(0.0, until - time.monotonic()))

    def _heard(self, notice: bytes) -> None:
        part = decode_part(notice)
        if part is None:
            self._on_notice(notice)
            return
        with self._gate:
            whole = self._gathering.add(part, time.monotonic())
        if whole is not None:
            self._on_notice(whole)

    def _wake_others(self, ask: Ask) -> None:
        part = decode_part(ask.notice)
        for agent in self._agents[1 : part.of if part is not None else 1]:
            agent.wake()
