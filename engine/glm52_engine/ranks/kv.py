"""KV hand-offs of a replica: each host has an agent for its own pools, and the leader speaks for all of them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from glm52_engine.kv import Pool
from glm52_engine.lifecycle.termination import host_name
from glm52_engine.ranks.frames import ProtocolError
from glm52_engine.ranks.messages import Agent, Fetch, Fetched
from glm52_engine.ranks.spans import RankSpan
from glm52_engine.transfer.agent import EVERY_DEVICE
from glm52_engine.transfer.descriptors import Region
from glm52_engine.transfer.devices import Choice
from glm52_engine.transfer.lanes import Lanes, chosen_lanes
from glm52_engine.transfer.pulls import Lane, Peer, Pull, PullCut, TransferError

log = logging.getLogger(__name__)

FETCH_SECONDS = 20.0
"""Most for a pull into another host's pool: the leader, who learns of a lost lease or a dead peer, does not reach it
there."""


def agent_of(peer: Peer) -> Agent:
    regions = tuple((region.address, region.num_blocks, region.block_bytes) for region in peer.regions)
    lanes = tuple((lane.name, base64.b64encode(lane.metadata).decode()) for lane in peer.lanes)
    return Agent(peer.name, base64.b64encode(peer.metadata).decode(), regions, peer.first_rank, lanes)


def peer_of(agent: Agent) -> Peer:
    """Raises ProtocolError for metadata that is no base64."""
    regions = tuple(Region(*r) for r in agent.regions)
    lanes = tuple(Lane(name, bytes_of(metadata)) for name, metadata in agent.lanes)
    return Peer(agent.name, bytes_of(agent.metadata), regions, agent.first_rank, lanes=lanes)


def fetch_of(number: int, pull: Pull, span: RankSpan) -> Fetch:
    """What a rank host is asked; its own ranks count from 0."""
    return Fetch(
        number,
        agent_of(pull.peer),
        pull.remote_rank,
        tuple(pull.remote_ids),
        pull.local_rank - span.first_rank,
        tuple(pull.local_ids),
        base64.b64encode(pull.notice).decode(),
    )


def settle(asked: asyncio.Future[int], answered: Fetched) -> None:
    if asked.done():
        return
    if answered.error:
        asked.set_exception(TransferError(answered.error))
    else:
        asked.set_result(answered.size)


class HostAgent:
    """The agents of one rank host, as its process uses them. `on_notice` is called on a thread of theirs."""

    def __init__(self, pools: Sequence[Pool], span: RankSpan, devices: Choice = EVERY_DEVICE) -> None:
        self.on_notice: Callable[[bytes], None] = lambda notice: None
        self._span = span
        self._held = False
        self._agent = Lanes(
            f"{host_name()}/{secrets.token_hex(8)}",
            pools,
            on_notice=lambda notice: self.on_notice(notice),
            expects=lambda: self._held,
            devices=devices,
            count=chosen_lanes(devices),
        )

    @property
    def described(self) -> Agent:
        return agent_of(replace(self._agent.described, first_rank=self._span.first_rank))

    def start(self) -> None:
        """Blocking: registers the pools."""
        self._agent.start()

    def hold(self, held: bool) -> None:
        self._held = held

    async def fetch(self, asked: Fetch) -> Fetched:
        try:
            if not 0 <= asked.local_rank < self._span.rank_count:
                raise TransferError(f"rank {asked.local_rank} of a host with {self._span.rank_count}")
            pull = Pull(
                peer_of(asked.peer), asked.remote_rank, asked.remote_ids, asked.local_rank, asked.local_ids,
                bytes_of(asked.notice),
            )  # fmt: skip
            return Fetched(asked.number, await self._agent.pull(pull, seconds=FETCH_SECONDS))
        except TransferError as error:
            if isinstance(error, PullCut):
                # The leader gives the blocks to others once it has this answer.
                await asyncio.wrap_future(error.over)
            return Fetched(asked.number, 0, str(error) or "unknown reason")

    def close(self) -> None:
        self._agent.close()


class Carrier(Protocol):
    """What carries a question to the host of a rank; the coordinator does."""

    def fetch(self, pull: Pull) -> asyncio.Future[int]:
        """On the caller's event loop; for a rank of another host. Fails with TransferError."""
        ...


class ReplicaAgent:
    """A `transfer.agent.KvAgent` for all ranks of a replica: the leader's own agent, and those of the rank hosts."""

    def __init__(self, own: Lanes, others: Sequence[Agent], carrier: Carrier) -> None:
        self.name = own.name
        self._own, self._others, self._carrier = own, tuple(peer_of(other) for other in others), carrier
        self.regions = tuple(itertools.chain(own.regions, *(peer.regions for peer in self._others)))
        self._under_way: dict[asyncio.Future[str], str] = {}
        """Pulls into other hosts' pools: what ends the wait for one with a reason, and from which peer it reads."""

    @property
    def failure(self) -> BaseException | None:
        return self._own.failure

    @property
    def described(self) -> Peer:
        return replace(self._own.described, others=self._others)

    def start(self) -> None:
        self._own.start()

    async def pull(self, pull: Pull) -> int:
        """As `Lanes.pull`: a cancellation is let through only when nothing writes to the blocks any more."""
        if pull.local_rank < len(self._own.regions):
            return await self._own.pull(pull)
        asked = self._carrier.fetch(pull)
        cut: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._under_way[cut] = pull.peer.name
        cancelled: asyncio.CancelledError | None = None
        try:
            while not (asked.done() or (cut.done() and cancelled is None)):
                try:
                    either: list[asyncio.Future[Any]] = [asked] if cancelled is not None else [asked, cut]
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError as error:
                    cancelled = error
        finally:
            del self._under_way[cut]
        if cancelled is not None:
            with contextlib.suppress(TransferError):
                asked.result()
            raise cancelled
        into = f"a pull into rank {pull.local_rank} on host {self._host(pull.local_rank)}"
        if not asked.done():
            raise PullCut(f"{into} was cut: {cut.result()}", _over(asked))
        try:
            return asked.result()
        except TransferError as error:
            raise TransferError(f"{into} failed: {error}") from error

    def cut(self, peer: str, reason: str) -> None:
        """A pull into another host's pool goes on until its own limit and keeps its blocks until then; who waits for
        it is told now."""
        self._own.cut(peer, reason)
        for waiting in [waiting for waiting, name in self._under_way.items() if name == peer and not waiting.done()]:
            waiting.set_result(reason)

    def _host(self, rank: int) -> str:
        """Names of agents are HOST/ID."""
        found = (p.name for p in self._others if p.first_rank <= rank < p.first_rank + len(p.regions))
        return next(found, "?").rpartition("/")[0]

    async def checksums(self, rank: int, blocks: Sequence[int]) -> list[int] | None:
        return await self._own.checksums(rank, blocks) if rank < len(self._own.regions) else None

    def close(self) -> None:
        self._own.close()


def _over(asked: asyncio.Future[int]) -> Future[None]:
    """Ends with the answer to a question, whatever it is."""
    over: Future[None] = Future()

    def answered(of: asyncio.Future[int]) -> None:
        if not of.cancelled():
            of.exception()  # nobody asks for it any more
        over.set_result(None)

    asked.add_done_callback(answered)
    return over


def bytes_of(text: str) -> bytes:
    """Raises ProtocolError for what is no base64."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ProtocolError(f"bytes that are no base64: {error}") from None
