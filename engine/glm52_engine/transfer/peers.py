"""The decode side of a hand-off: what it asks a prefill pod over HTTP, and the pull itself."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm52_engine.config import INTERNAL_TOKEN_HEADER
from glm52_engine.runtime.types import Blocks
from glm52_engine.transfer.agent import KvAgent, Peer, Pull, TransferError
from glm52_engine.transfer.descriptors import Region
from glm52_engine.transfer.fingerprint import Fingerprint, difference
from glm52_engine.transfer.hold import TransferCounters, notice
from glm52_engine.transfer.lease import prompt_digest

log = logging.getLogger(__name__)

RENEW_SECONDS = 10.0
"""A third of a lease: two lost renewals do not end it."""

ASK_SECONDS = 10.0
"""For one small question to a prefill pod; well inside its lease."""

AGENT_PATH = "/internal/v1/kv/agent"
LEASE_PATH = "/internal/v1/kv/lease"
RELEASE_PATH = "/internal/v1/kv/release"


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class KvReference(_Message):
    """Where the KV of one prompt lies; part of prefill's answer, handed on by the router."""

    address: str
    agent: str
    rank: int = Field(ge=0)
    blocks: list[int]
    num_tokens: int = Field(ge=1)
    fingerprint: Fingerprint


class AgentCard(_Message):
    """Answer of GET /internal/v1/kv/agent."""

    name: str
    metadata: str
    regions: list[tuple[int, int, int]]
    first_rank: int = Field(0, ge=0)
    others: list[AgentCard] = []

    def peer(self) -> Peer:
        return Peer(
            self.name,
            base64.b64decode(self.metadata, validate=True),
            tuple(Region(*region) for region in self.regions),
            self.first_rank,
            tuple(other.peer() for other in self.others),
        )


def agent_card(peer: Peer) -> AgentCard:
    return AgentCard(
        name=peer.name,
        metadata=base64.b64encode(peer.metadata).decode(),
        regions=[(r.address, r.num_blocks, r.block_bytes) for r in peer.regions],
        first_rank=peer.first_rank,
        others=[agent_card(other) for other in peer.others],
    )


class LeaseCard(_Message):
    """Answer of POST /internal/v1/kv/lease: what prefill itself says it holds, for `seconds` more."""

    rank: int
    blocks: list[int]
    num_tokens: int
    digest: str
    seconds: float


class KvMismatch(TransferError):
    """This pod cannot read that KV, and another decode pod may: the lease is left to whoever offered it."""


class Puller:
    def __init__(
        self,
        agent: KvAgent,
        ours: Fingerprint,
        session: aiohttp.ClientSession,
        counters: TransferCounters,
        token: str,
    ) -> None:
        self.agent = agent
        self.ours = ours
        self.session = session
        self.counters = counters
        self._headers = {INTERNAL_TOKEN_HEADER: token}
        self._peers: dict[str, Peer] = {}
        self._background: set[asyncio.Task[None]] = set()

    def check(self, kv: KvReference) -> None:
        """Raises KvMismatch naming each field in which the two pods' KV differs."""
        wrong = difference(self.ours, kv.fingerprint)
        if wrong:
            self.counters.pulls_failed += 1
            raise KvMismatch(f"prefill {kv.address} and this decode pod cannot exchange KV: {wrong}")

    @contextlib.contextmanager
    def keeping(self, kv: KvReference, request_id: str) -> Iterator[asyncio.Task[None]]:
        """Renews the lease while the request waits for a seat. The task ends only by a lost lease, which is a failed
        pull: it would have been one."""
        task = asyncio.create_task(self._renew_forever(kv, request_id))
        try:
            yield task
        finally:
            task.cancel()

    async def pull(self, kv: KvReference, request_id: str, prompt: Sequence[int], into: Blocks) -> int:
        """Confirms the lease, reads the KV into the first blocks of `into`, and counts the bytes."""
        try:
            size = await self._pull(kv, request_id, prompt, into)
        except TransferError:
            self.counters.pulls_failed += 1
            raise
        self.counters.pulls += 1
        self.counters.bytes_in += size
        return size

    def give_up(self, kv: KvReference, request_id: str) -> None:
        """Tells prefill in the background that nobody will read this KV; its lease ends it should that fail."""
        task = asyncio.create_task(self._give_up(kv, request_id))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def settle(self) -> None:
        """Waits for what runs in the background."""
        if self._background:
            await asyncio.wait(self._background, timeout=2)

    async def _pull(self, kv: KvReference, request_id: str, prompt: Sequence[int], into: Blocks) -> int:
        if len(kv.blocks) > len(into.ids):
            raise TransferError(f"{len(kv.blocks)} blocks of KV for {len(into.ids)} reserved ones")
        peer = await self._peer(kv)
        # The last word before the READ: the lease is alive, is this request's, and outlives the longest pull.
        lease = await self._renew(kv, request_id)
        held = (lease.rank, lease.blocks, lease.num_tokens, lease.digest)
        if held != (kv.rank, kv.blocks, len(prompt), prompt_digest(prompt)):
            raise TransferError(f"prefill {kv.address} holds other KV for request {request_id} than was said")
        size = len(kv.blocks) * self.agent.regions[into.rank].block_bytes
        local = into.ids[: len(kv.blocks)]
        try:
            holding = peer.holding(kv.rank)
        except ValueError as error:
            raise TransferError(f"prefill {kv.address} names a place that it does not have: {error}") from error
        pull = Pull(holding, kv.rank, kv.blocks, into.rank, local, notice(request_id, size))
        try:
            return await self.agent.pull(pull)
        except TransferError:
            self._peers.pop(kv.agent, None)
            raise

    async def _peer(self, kv: KvReference) -> Peer:
        known = self._peers.get(kv.agent)
        if known is not None:
            return known
        try:
            peer = AgentCard.model_validate(await self._ask("GET", kv, AGENT_PATH, None)).peer()
        except (ValidationError, binascii.Error) as error:
            raise TransferError(f"prefill {kv.address} describes its transfer agent wrongly: {error}") from error
        if peer.name != kv.agent:
            raise TransferError(f"prefill {kv.address} has restarted: its agent is {peer.name}, not {kv.agent}")
        for stale in [name for name in self._peers if name.rpartition("/")[0] == peer.name.rpartition("/")[0]]:
            del self._peers[stale]
        self._peers[peer.name] = peer
        return peer

    async def _renew(self, kv: KvReference, request_id: str) -> LeaseCard:
        try:
            return LeaseCard.model_validate(
                await self._ask("POST", kv, LEASE_PATH, {"id": request_id, "agent": kv.agent})
            )
        except ValidationError as error:
            raise TransferError(f"prefill {kv.address} describes a lease wrongly: {error}") from error

    async def _renew_forever(self, kv: KvReference, request_id: str) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self._renew(kv, request_id)
            except TransferError:
                self.counters.pulls_failed += 1
                raise

    async def _give_up(self, kv: KvReference, request_id: str) -> None:
        with contextlib.suppress(TransferError):
            await self._ask("POST", kv, RELEASE_PATH, {"id": request_id})

    async def _ask(self, method: str, kv: KvReference, path: str, body: dict[str, Any] | None) -> Any:
        try:
            timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
            url = f"http://{kv.address}{path}"
            async with self.session.request(method, url, json=body, headers=self._headers, timeout=timeout) as response:
                if response.status != 200:
                    raise TransferError(
                        f"prefill {kv.address} answers {path} with {response.status}: {await response.text()}"
                    )
                return await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise TransferError(
                f"prefill {kv.address} does not answer {path}: {error or type(error).__name__}"
            ) from error
