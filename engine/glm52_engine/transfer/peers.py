"""The decode side of a hand-off: what it asks a prefill pod over HTTP, and the pull itself."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm52_engine.config import INTERNAL_TOKEN_HEADER
from glm52_engine.runtime.types import Blocks
from glm52_engine.transfer.agent import KvAgent
from glm52_engine.transfer.checksums import damage
from glm52_engine.transfer.descriptors import Region
from glm52_engine.transfer.fingerprint import Fingerprint, difference
from glm52_engine.transfer.heartbeats import At, Beat, Claim, Heartbeats, PeerGone
from glm52_engine.transfer.hold import TransferCounters, notice
from glm52_engine.transfer.lease import prompt_digest
from glm52_engine.transfer.pulls import Lane, Peer, Pull, TransferError

log = logging.getLogger(__name__)

ASK_SECONDS = 10.0
"""For one small question to a prefill pod; well inside its lease."""

AGENT_PATH = "/internal/v1/kv/agent"
LEASE_PATH = "/internal/v1/kv/lease"
BEAT_PATH = "/internal/v1/kv/heartbeat"
RELEASE_PATH = "/internal/v1/kv/release"
PROGRESS_PATH = "/internal/v1/kv/progress"


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


class LaneCard(_Message):
    name: str
    metadata: str


class AgentCard(_Message):
    """Answer of GET /internal/v1/kv/agent. `lanes`: its further agents, none in pods of before there were any."""

    name: str
    metadata: str
    regions: list[tuple[int, int, int]]
    first_rank: int = Field(0, ge=0)
    others: list[AgentCard] = []
    lanes: list[LaneCard] = []

    def peer(self) -> Peer:
        return Peer(
            self.name,
            base64.b64decode(self.metadata, validate=True),
            tuple(Region(*region) for region in self.regions),
            self.first_rank,
            tuple(other.peer() for other in self.others),
            tuple(Lane(lane.name, base64.b64decode(lane.metadata, validate=True)) for lane in self.lanes),
        )


def agent_card(peer: Peer) -> AgentCard:
    return AgentCard(
        name=peer.name,
        metadata=base64.b64encode(peer.metadata).decode(),
        regions=[(r.address, r.num_blocks, r.block_bytes) for r in peer.regions],
        first_rank=peer.first_rank,
        others=[agent_card(other) for other in peer.others],
        lanes=[LaneCard(name=lane.name, metadata=base64.b64encode(lane.metadata).decode()) for lane in peer.lanes],
    )


class LeaseCall(_Message):
    """POST /internal/v1/kv/lease. `checksums`: of the blocks, to compare what arrives with."""

    id: str
    agent: str
    checksums: bool = False


class LeaseCard(_Message):
    """Answer of POST /internal/v1/kv/lease: what prefill itself says it holds, for `seconds` more."""

    rank: int
    blocks: list[int]
    num_tokens: int
    digest: str
    seconds: float
    checksums: list[int] | None = None
    """Where they were asked for and the blocks are in the pod that answers."""


class BeatCall(_Message):
    """POST /internal/v1/kv/heartbeat: renews the leases of these requests."""

    ids: list[str]
    agent: str


class BeatCard(_Message):
    """Answer of POST /internal/v1/kv/heartbeat: those of them that are held, for `seconds` more."""

    held: list[str]
    seconds: float


class ProgressCall(_Message):
    """POST /internal/v1/kv/progress: answered as soon as more than `seen` blocks can be read, or after a second.

    `agent`: empty where it is not known yet. `prompt`: whether to say what is computed, which may be long.
    """

    id: str
    agent: str = ""
    seen: int = Field(0, ge=-1)
    prompt: bool = False


class PromptCard(_Message):
    """What a decode pod needs to know of a request to reserve its seat."""

    ids: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    priority: int = 0
    cache_salt: str = ""


class ProgressCard(_Message):
    """Answer of POST /internal/v1/kv/progress. `kept`: leading blocks of `kv` that can be read.

    `state`: `over` means computed and under its lease. `unknown`: not here yet, or not here any more.
    """

    state: Literal["unknown", "waiting", "computing", "over"]
    kept: int = Field(0, ge=0)
    kv: KvReference | None = None
    prompt: PromptCard | None = None


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
        *,
        checksums: bool = False,
    ) -> None:
        """`checksums`: whether every block that was pulled is compared with what it is at prefill, for debugging."""
        self.agent = agent
        self.checksums = checksums
        self.beats = Heartbeats(self._beat)
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
    def keeping(self, kv: KvReference, request_id: str) -> Iterator[asyncio.Future[None]]:
        """Renews the lease while the request waits for a seat. The future ends only by a lost lease or a dead peer,
        which is a failed pull: it would have been one."""
        with self.beats.claim(At(kv.address, kv.agent), request_id) as claim:
            try:
                yield claim.lost
            except TransferError:
                self.counters.pulls_failed += 1
                raise

    async def pull(
        self, kv: KvReference, request_id: str, prompt: Sequence[int], into: Blocks, *, here: int = 0
    ) -> int:
        """Confirms the lease, reads the KV into the first blocks of `into`, and counts the bytes.

        `here`: leading blocks that have been read before, by `pull_part` from the same blocks of the same request.
        """
        try:
            size = await self._pull(kv, request_id, prompt, into, here)
        except TransferError:
            self.counters.pulls_failed += 1
            raise
        self.counters.pulls += 1
        self.counters.bytes_in += size
        return size

    async def progress(self, address: str, call: ProgressCall) -> ProgressCard:
        """How far the prefill of a prompt is. Raises PeerGone or another TransferError."""
        raw = await self._ask_raw("POST", address, PROGRESS_PATH, call.model_dump())
        try:
            # A prompt of a million tokens takes a while.
            return await asyncio.to_thread(ProgressCard.model_validate_json, raw)
        except ValidationError as error:
            raise PeerGone(f"prefill {address} describes a prefill wrongly: {error}") from error

    async def pull_part(self, kv: KvReference, request_id: str, into: Blocks, first: int, end: int) -> None:
        """Reads the blocks from `first` up to `end` of a prompt that is being computed, and counts the bytes.

        There is no lease yet, so they may be another request's by the time they come: they are this one's only if
        `pull` finds the same blocks under its lease afterwards.
        """
        if not 0 <= first < end <= min(len(kv.blocks), len(into.ids)):
            raise TransferError(f"blocks {first}…{end - 1} of {len(kv.blocks)} there and {len(into.ids)} reserved here")
        peer = await self._peer(kv)
        try:
            size = await self._timed(self._read_of(peer, kv, request_id, into, first, end, part=True))
        except TransferError:
            self._peers.pop(kv.agent, None)
            raise
        self.counters.bytes_in += size
        self.counters.bytes_early += size

    def give_up(self, kv: KvReference, request_id: str) -> None:
        """Tells prefill in the background that nobody will read this KV; its lease ends it should that fail."""
        task = asyncio.create_task(self._give_up(kv, request_id))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def settle(self) -> None:
        """Waits for what runs in the background."""
        if self._background:
            await asyncio.wait(self._background, timeout=2)

    async def _pull(self, kv: KvReference, request_id: str, prompt: Sequence[int], into: Blocks, here: int) -> int:
        if len(kv.blocks) > len(into.ids):
            raise TransferError(f"{len(kv.blocks)} blocks of KV for {len(into.ids)} reserved ones")
        peer = await self._peer(kv)
        with self.beats.claim(At(kv.address, kv.agent), request_id) as claim:
            # The last word before the pull: the lease is alive and is this request's.
            asked = time.monotonic()
            lease = await self._renew(kv, request_id)
            claim.until = asked + lease.seconds
            held = (lease.rank, lease.blocks, lease.num_tokens, lease.digest)
            if held != (kv.rank, kv.blocks, len(prompt), prompt_digest(prompt)):
                raise TransferError(f"prefill {kv.address} holds other KV for request {request_id} than was said")
            try:
                pull = self._read_of(peer, kv, request_id, into, here, len(kv.blocks))
                size = await self._read(pull, claim)
            except TransferError:
                self._peers.pop(kv.agent, None)
                raise
            if time.monotonic() >= claim.until:
                # Its blocks may have been another request's before the last byte was read.
                raise TransferError(f"the lease at prefill {kv.address} ran out while its KV was read")
        await self._compare(kv, lease, Blocks(into.rank, into.ids[: len(kv.blocks)]))
        return size

    def _read_of(
        self, peer: Peer, kv: KvReference, request_id: str, into: Blocks, first: int, end: int, *, part: bool = False
    ) -> Pull:
        try:
            holding = peer.holding(kv.rank)
        except ValueError as error:
            raise TransferError(f"prefill {kv.address} names a place that it does not have: {error}") from error
        size = (end - first) * self.agent.regions[into.rank].block_bytes
        said = notice(request_id, size, part=part)
        return Pull(holding, kv.rank, kv.blocks[first:end], into.rank, into.ids[first:end], said)

    async def _read(self, pull: Pull, claim: Claim) -> int:
        """The pull, ended at once when the lease or the peer is lost."""
        reading = asyncio.ensure_future(self._timed(pull))
        either: set[asyncio.Future[Any]] = {reading, claim.lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, TransferError):
                await reading
            raise
        if not reading.done():
            self.agent.cut(pull.peer.name, str(claim.lost.exception()))
        return await reading

    async def _timed(self, pull: Pull) -> int:
        """The pull itself, measured: its path is told of when it is new, and when it is slow."""
        pod, rates, size = pull.peer.name.rpartition("/")[0], self.counters.rates, 0
        rates.begin(pod, time.monotonic())
        try:
            size = await self.agent.pull(pull)
        finally:
            news = rates.end(pod, size, time.monotonic())
            if news is not None:
                say = log.warning if news.slow else log.info
                say(
                    "the path of KV from a prefill pod%s",
                    " is slow" if news.slow else "",
                    extra={"peer": pod, "path": "host memory to host memory", "gb_per_second": news.rate / 1e9},
                )
        return size

    async def _compare(self, kv: KvReference, lease: LeaseCard, came: Blocks) -> None:
        if lease.checksums is None:
            return
        ours = await self.agent.checksums(came.rank, came.ids)
        wrong = damage(lease.checksums, ours) if ours is not None else ""
        if wrong:
            raise TransferError(f"KV from prefill {kv.address} is damaged: {wrong}")

    async def _peer(self, kv: KvReference) -> Peer:
        known = self._peers.get(kv.agent)
        if known is not None:
            return known
        try:
            peer = AgentCard.model_validate(await self._ask("GET", kv.address, AGENT_PATH, None)).peer()
        except (ValidationError, binascii.Error) as error:
            raise TransferError(f"prefill {kv.address} describes its transfer agent wrongly: {error}") from error
        if peer.name != kv.agent:
            raise TransferError(f"prefill {kv.address} has restarted: its agent is {peer.name}, not {kv.agent}")
        for stale in [name for name in self._peers if name.rpartition("/")[0] == peer.name.rpartition("/")[0]]:
            self.agent.cut(stale, f"prefill {kv.address} has restarted")
            del self._peers[stale]
        self._peers[peer.name] = peer
        return peer

    async def _renew(self, kv: KvReference, request_id: str) -> LeaseCard:
        try:
            call = LeaseCall(id=request_id, agent=kv.agent, checksums=self.checksums)
            return LeaseCard.model_validate(await self._ask("POST", kv.address, LEASE_PATH, call.model_dump()))
        except ValidationError as error:
            raise TransferError(f"prefill {kv.address} describes a lease wrongly: {error}") from error

    async def _beat(self, at: At, ids: Sequence[str]) -> Beat:
        call = BeatCall(ids=list(ids), agent=at.agent)
        try:
            card = BeatCard.model_validate(await self._ask("POST", at.address, BEAT_PATH, call.model_dump()))
        except ValidationError as error:
            raise PeerGone(f"prefill {at.address} answers a heartbeat wrongly: {error}") from error
        return Beat(frozenset(card.held), card.seconds)

    async def _give_up(self, kv: KvReference, request_id: str) -> None:
        with contextlib.suppress(TransferError):
            await self._ask("POST", kv.address, RELEASE_PATH, {"id": request_id})

    async def _ask(self, method: str, address: str, path: str, body: dict[str, Any] | None) -> Any:
        raw = await self._ask_raw(method, address, path, body)
        try:
            return json.loads(raw)
        except ValueError as error:
            raise TransferError(f"prefill {address} does not answer {path} with JSON: {error}") from error

    async def _ask_raw(self, method: str, address: str, path: str, body: dict[str, Any] | None) -> bytes:
        try:
            timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
            url = f"http://{address}{path}"
            async with self.session.request(method, url, json=body, headers=self._headers, timeout=timeout) as response:
                if response.status != 200:
                    raise PeerGone(f"prefill {address} answers {path} with {response.status}: {await response.text()}")
                return await response.read()
        except aiohttp.ClientConnectorError as error:
            raise PeerGone(f"prefill {address} does not answer {path}: {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TransferError(
                f"prefill {address} does not answer {path}: {str(error) or type(error).__name__}"
            ) from error
