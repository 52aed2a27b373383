"""One NIXL agent per pod, owned by one thread: the agent is not thread-safe, and posting a READ may copy in the call.

The event loop hands jobs over and awaits futures; the step loop is never involved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from glm52_engine.runtime.types import KvPool
from glm52_engine.transfer.checksums import checksums
from glm52_engine.transfer.descriptors import Region, runs
from glm52_engine.transfer.devices import Choice, apply

log = logging.getLogger(__name__)

PULL_SECONDS = 60.0
"""Most for one pull: 12 GB, the longest prompts in bfloat16, at 0.2 GB/s. Heartbeats end it sooner where the lease or
the peer is lost."""

LINGER_SECONDS = 20.0
"""For a peer that reads what was given up meanwhile to learn of it: until then its READ needs our progress."""

BUSY_POLL_SECONDS = 0.0005
NOTICE_POLL_SECONDS = 0.001

EVERY_DEVICE = Choice()


class TransferError(Exception):
    """A pull that did not bring every byte; the local blocks hold nothing of use."""


class PullCut(TransferError):
    """Nobody waits for the bytes any more, but they may still come: the local blocks are free once `over` is done.

    Neither NIXL nor UCX takes a READ back, and forgetting the peer does not either: over TCP every byte was seen to
    come later, when a frozen peer went on. It ends with its last byte or with its connection.
    """

    def __init__(self, message: str, over: Future[None]) -> None:
        super().__init__(message)
        self.over = over


@dataclass(frozen=True, slots=True)
class Peer:
    """An agent and the pools that it has registered: those of the ranks from `first_rank` on. `others`: agents of
    further hosts of the same replica, for their ranks.

    Its name is new with every start of its process: an old incarnation cannot be mistaken for it.
    """

    name: str
    metadata: bytes
    regions: tuple[Region, ...]
    first_rank: int = 0
    others: tuple[Peer, ...] = ()

    def holding(self, rank: int) -> Peer:
        """The agent that has this rank's pool. Raises ValueError."""
        for peer in (self, *self.others):
            if 0 <= rank - peer.first_rank < len(peer.regions):
                return peer
        ranks = sum(len(peer.regions) for peer in (self, *self.others))
        raise ValueError(f"rank {rank} of a peer with {ranks}")


@dataclass(frozen=True, slots=True)
class Pull:
    peer: Peer
    remote_rank: int
    remote_ids: Sequence[int]
    local_rank: int
    local_ids: Sequence[int]
    notice: bytes


@dataclass(slots=True)
class _Job:
    pull: Pull
    done: Future[int]
    deadline: float
    bytes: int = 0
    handle: Any = None
    over: Future[None] = field(default_factory=Future)
    """Nothing writes to the local blocks any more."""


@dataclass(frozen=True, slots=True)
class _Cut:
    name: str
    reason: str


@dataclass(slots=True)
class _Call:
    run: Callable[[], object]
    done: Future[Any] = field(default_factory=Future)


class KvAgent(Protocol):
    """What serving needs of the agent, or agents, of its ranks."""

    name: str
    regions: tuple[Region, ...]
    """Of all ranks of the replica."""

    @property
    def failure(self) -> BaseException | None: ...

    @property
    def described(self) -> Peer:
        """As peers need it to read from here."""
        ...

    def start(self) -> None: ...

    async def pull(self, pull: Pull) -> int: ...

    def cut(self, peer: str, reason: str) -> None:
        """From any thread: pulls from that agent fail now, with this reason: PullCut."""
        ...

    async def checksums(self, rank: int, blocks: Sequence[int]) -> list[int] | None:
        """CRC-32 of blocks of a rank's pool; None where the pool is another pod's."""
        ...

    def close(self) -> None: ...


class TransferAgent:
    """`on_notice` runs on the agent's thread, once per finished pull of a peer, with the bytes the peer attached."""

    def __init__(
        self,
        name: str,
        pools: Sequence[KvPool],
        *,
        on_notice: Callable[[bytes], None],
        expects: Callable[[], bool],
        devices: Choice = EVERY_DEVICE,
    ) -> None:
        self.name = name
        self.regions = tuple(Region(pool.tensor.data_ptr(), pool.num_blocks, pool.block_bytes) for pool in pools)
        self.metadata = b""
        self._pools = pools
        self._on_notice = on_notice
        self._expects = expects
        self._devices = devices
        self._inbox: queue.SimpleQueue[_Job | _Call | _Cut | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._over = False
        self._jobs: list[_Job] = []
        self._strays: list[_Job] = []
        self._known: set[str] = set()
        self._nixl: Any = None
        self._registered: Any = None
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    @property
    def described(self) -> Peer:
        """As peers need it to read from here; after `start`."""
        return Peer(self.name, self.metadata, self.regions)

    def start(self) -> None:
        """Creates the agent and registers every pool once; blocks until that is done."""
        self._thread.start()
        call = _Call(self._open)
        self._hand_over(call)
        call.done.result()

    async def pull(self, pull: Pull, *, seconds: float = PULL_SECONDS) -> int:
        """Reads the blocks, returns the bytes. When it returns or raises, nothing writes to the local blocks any more,
        except after PullCut.

        A cancellation is let through only then: freeing the blocks earlier would let late bytes hit their next owner.
        """
        job = _Job(pull, Future(), time.monotonic() + seconds)
        self._hand_over(job)
        future, over = asyncio.wrap_future(job.done), asyncio.wrap_future(job.over)
        cancelled: asyncio.CancelledError | None = None
        while not (future.done() if cancelled is None else over.done()):
            try:
                await asyncio.wait([future if cancelled is None else over])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            if future.done():
                future.exception()  # nobody asks for it any more
            raise cancelled
        return future.result()

    def cut(self, peer: str, reason: str) -> None:
        with contextlib.suppress(TransferError):
            self._hand_over(_Cut(peer, reason))

    async def checksums(self, rank: int, blocks: Sequence[int]) -> list[int] | None:
        # On the agent's thread: pools are let go only when that has ended.
        call = _Call(lambda: checksums(self.regions[rank], blocks))
        self._hand_over(call)
        try:
            found: list[int] = await asyncio.wrap_future(call.done)
        except ValueError as error:
            raise TransferError(str(error)) from error
        return found

    def close(self, timeout: float = 5.0) -> None:
        """Ends running pulls, deregisters the pools and joins the thread."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join(timeout)

    def _hand_over(self, item: _Job | _Call | _Cut) -> None:
        with self._gate:
            if self._over:
                # Nobody would ever look at it.
                raise TransferError("the pod is going away")
            self._inbox.put(item)

    # Everything below runs on the agent's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            # Without it no KV crosses any more, while every probe would still say yes.
            log.exception("the transfer thread ended")
            self.failure = error
        finally:
            self._shut()

    def _turn(self) -> bool:
        """One round: take what came in, look at running pulls and at notices. False at the end."""
        wait = BUSY_POLL_SECONDS if self._jobs else NOTICE_POLL_SECONDS if self._strays or self._expects() else 0.25
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=wait)
            if item is None:
                return False
            if isinstance(item, _Call):
                _settle(item.done, item.run)
            elif isinstance(item, _Cut):
                for job in [job for job in self._jobs if job.pull.peer.name == item.name]:
                    self._cut_off(job, item.reason)
                self._forget(item.name)
            else:
                self._begin(item)
        self._jobs = [job for job in self._jobs if self._runs_on(job)]
        self._strays = [job for job in self._strays if not self._ended(job)]
        if self._nixl is not None and self._expects():
            self._collect_notices()
        return True

    def _open(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        from nixl_cu13 import nixl_agent, nixl_agent_config

        # With a progress thread of its own NIXL spins on a core for ever, idle or not; here a turn that looks at a
        # running pull, or for notices while prompts are held, makes the progress.
        self._nixl = nixl_agent(self.name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._nixl.create_backend("UCX", apply(self._devices))
        spans = [(region.address, region.num_blocks * region.block_bytes, 0, "") for region in self.regions]
        self._registered = self._nixl.register_memory(spans, "DRAM")
        self.metadata = self._nixl.get_agent_metadata()

    def _begin(self, job: _Job) -> None:
        try:
            self._post(job)
        except Exception as error:
            named = "" if isinstance(error, ValueError) else f"cannot read from {job.pull.peer.name}: "
            self._fail(job, named + _reason(error))
        else:
            self._jobs.append(job)

    def _post(self, job: _Job) -> None:
        pull = job.pull
        peer = pull.peer.holding(pull.remote_rank)
        region = peer.regions[pull.remote_rank - peer.first_rank]
        merged = runs(pull.remote_ids, pull.local_ids)
        theirs = region.spans([(run.remote, run.count) for run in merged])
        ours = self.regions[pull.local_rank].spans([(run.local, run.count) for run in merged])
        if peer.name not in self._known:
            self._nixl.add_remote_agent(peer.metadata)
            self._known.add(peer.name)
        job.handle = self._nixl.initialize_xfer(
            "READ",
            self._nixl.get_xfer_descs(ours, "DRAM"),
            self._nixl.get_xfer_descs(theirs, "DRAM"),
            peer.name,
            pull.notice,
        )
        job.bytes = sum(size for _, size, _ in ours)
        if self._nixl.transfer(job.handle) == "ERR":
            raise TransferError("the transfer could not be posted")

    def _runs_on(self, job: _Job) -> bool:
        """Looks at one pull; settles it and returns False when nobody waits for it any more."""
        if job.done.done():
            return False
        name, state = job.pull.peer.name, self._state(job)
        if state == "DONE":
            self._release(job)
            job.done.set_result(job.bytes)
        elif state != "PROC":
            self._fail(job, f"reading from {name} failed: {state}")
        elif time.monotonic() >= job.deadline:
            self._cut_off(job, f"reading from {name} took too long")
        return not job.done.done()

    def _ended(self, job: _Job) -> bool:
        """Whether a READ that nobody waits for has come to its end."""
        state = self._state(job)
        if state == "PROC":
            return False
        self._release(job)
        log.info("a pull that was cut is over", extra={"peer": job.pull.peer.name, "state": state})
        if state != "DONE":
            self._forget(job.pull.peer.name)
        return True

    def _state(self, job: _Job) -> str:
        try:
            return str(self._nixl.check_xfer_state(job.handle))
        except Exception as error:
            return f"ERR ({_reason(error)})"

    def _fail(self, job: _Job, message: str) -> None:
        """It is over, and its connection with it: other pulls that use it will find the same."""
        self._release(job)
        self._forget(job.pull.peer.name)
        job.done.set_exception(TransferError(message))

    def _cut_off(self, job: _Job, message: str) -> None:
        """Told at once, and looked after until no byte can come any more."""
        self._strays.append(job)
        job.done.set_exception(PullCut(message, job.over))

    def _forget(self, name: str) -> None:
        """A later pull connects anew. Not while a READ from there is under way: it has to come to its end."""
        running = [job for job in (*self._jobs, *self._strays) if job.pull.peer.name == name and not job.over.done()]
        if name in self._known and not running:
            self._known.discard(name)
            with contextlib.suppress(Exception):
                self._nixl.remove_remote_agent(name)

    def _release(self, job: _Job) -> None:
        """The last that happens to a READ."""
        if job.handle is not None:
            try:
                job.handle.release()
            except Exception as error:
                log.warning("a transfer handle is not released", extra={"reason": _reason(error)})
            job.handle = None
        if not job.over.done():
            job.over.set_result(None)

    def _collect_notices(self) -> None:
        for notices in self._nixl.get_new_notifs().values():
            for notice in notices:
                self._on_notice(notice)

    def _shut(self) -> None:
        for job in self._jobs:
            self._fail(job, "the pod is going away")
        for job in self._strays:
            self._release(job)
        with self._gate:
            self._over = True
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if item is not None and not isinstance(item, _Cut) and not item.done.done():
                item.done.set_exception(TransferError("the pod is going away"))
            if isinstance(item, _Job):
                self._release(item)
        if self._nixl is not None:
            with contextlib.suppress(Exception):
                self._nixl.deregister_memory(self._registered)
            self._nixl = None


def _settle(done: Future[Any], run: Callable[[], object]) -> None:
    if not done.set_running_or_notify_cancel():
        return  # who asked has gone
    try:
        done.set_result(run())
    except BaseException as error:
        done.set_exception(error)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
