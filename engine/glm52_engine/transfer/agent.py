"""One NIXL agent, owned by one thread: the agent is not thread-safe, and posting a WRITE may copy in the call.

A pull asks the agent that owns the KV to write it here (`pulls`); `pushes` is what that one does.

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
from glm52_engine.transfer.descriptors import Region
from glm52_engine.transfer.devices import Choice, apply
from glm52_engine.transfer.pulls import Job, Peer, Pull, Pulls, TransferError, brought
from glm52_engine.transfer.pushes import Pushes
from glm52_engine.transfer.wire import Ask, Look, decode

log = logging.getLogger(__name__)

PULL_SECONDS = 60.0
"""Most for one pull: 12 GB, the longest prompts in bfloat16, at 0.2 GB/s. Heartbeats end it sooner where the lease or
the peer is lost."""

CLOSE_SECONDS = 1.0
"""For what peers still write to come to its end before the pools are let go."""

BUSY_POLL_SECONDS = 0.0005
NOTICE_POLL_SECONDS = 0.001
IDLE_POLL_SECONDS = 0.02
"""The first pull after a pause waits that long to be heard of."""

AWAKE_SECONDS = 0.05
"""For what an agent was woken for to come: peers ask all lanes at the same time."""

EVERY_DEVICE = Choice()


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
        """As peers need it to pull from here."""
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
    """`on_notice` runs on the agent's thread, once per finished pull of a peer, with the bytes the peer attached.

    `expects`: whether a peer may ask soon, and should not have to wait. `on_ask`: on the agent's thread, of what a peer
    asks for, before it begins.
    """

    def __init__(
        self,
        name: str,
        pools: Sequence[KvPool],
        *,
        on_notice: Callable[[bytes], None],
        expects: Callable[[], bool],
        devices: Choice = EVERY_DEVICE,
        on_ask: Callable[[Ask], None] = lambda ask: None,
    ) -> None:
        self.name = name
        self.regions = tuple(Region(pool.tensor.data_ptr(), pool.num_blocks, pool.block_bytes) for pool in pools)
        self.metadata = b""
        self._pools = pools
        self._on_notice = on_notice
        self._expects = expects
        self._on_ask = on_ask
        self._awake_until = 0.0
        self._devices = devices
        self._inbox: queue.SimpleQueue[Job | _Call | _Cut | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._over = False
        self._nixl: Any = None
        self._pulls: Pulls | None = None
        self._pushes: Pushes | None = None
        self._registered: Any = None
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    @property
    def described(self) -> Peer:
        """As peers need it to pull from here; after `start`."""
        return Peer(self.name, self.metadata, self.regions)

    def start(self) -> None:
        """Creates the agent and registers every pool once; blocks until that is done."""
        self._thread.start()
        call = _Call(self._open)
        self._hand_over(call)
        call.done.result()

    async def pull(self, pull: Pull, *, seconds: float = PULL_SECONDS) -> int:
        """Has the blocks written here, returns the bytes: see `pulls.brought`."""
        return await brought([self.ask(pull, seconds=seconds)])

    def ask(self, pull: Pull, *, seconds: float = PULL_SECONDS) -> Job:
        """Begins a pull; from any thread. What is wrong is told by the job."""
        job = Job(pull, Future(), time.monotonic() + seconds)
        try:
            self._hand_over(job)
        except TransferError as error:
            job.end(str(error))
        return job

    def wake(self) -> None:
        """A peer is about to ask, and should not have to wait; from any thread."""
        self._awake_until = time.monotonic() + AWAKE_SECONDS
        with contextlib.suppress(TransferError):
            self._hand_over(_Call(lambda: None))

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

    def _hand_over(self, item: Job | _Call | _Cut) -> None:
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
        """One round: take what came in, look at what peers said, at pulls and at pushes. False at the end."""
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=self._wait())
            if item is None:
                return False
            if isinstance(item, _Call):
                _settle(item.done, item.run)
            elif isinstance(item, Job):
                if self._pulls is None:
                    item.end("the agent has not been started")
                else:
                    self._pulls.begin(item)
            elif self._pulls is not None:
                self._pulls.cut(item.name, item.reason)
        self._tend(time.monotonic())
        return True

    def _wait(self) -> float:
        if self._pulls is None or self._pushes is None:
            return IDLE_POLL_SECONDS
        if self._pushes.busy or self._pulls.waited_for:
            return BUSY_POLL_SECONDS
        soon = self._pulls.open or self._expects() or time.monotonic() < self._awake_until
        return NOTICE_POLL_SECONDS if soon else IDLE_POLL_SECONDS

    def _open(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        from nixl_cu13 import nixl_agent, nixl_agent_config

        # With a progress thread of its own NIXL spins on a core for ever, idle or not; here a turn that looks at a
        # running push, or for what peers say, makes the progress.
        self._nixl = nixl_agent(self.name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._nixl.create_backend("UCX", apply(self._devices))
        spans = [(region.address, region.num_blocks * region.block_bytes, 0, "") for region in self.regions]
        self._registered = self._nixl.register_memory(spans, "DRAM")
        self.metadata = self._nixl.get_agent_metadata()
        self._pulls = Pulls(self._nixl, self.regions, self.metadata)
        self._pushes = Pushes(self._nixl, self.regions, self._on_notice)

    def _tend(self, now: float) -> None:
        if self._pulls is None or self._pushes is None:
            return
        for peer, messages in self._nixl.get_new_notifs().items():
            for message in messages:
                self._hear(self._pulls, self._pushes, peer, message)
        self._pushes.turn()
        self._pulls.turn(now)

    def _hear(self, pulls: Pulls, pushes: Pushes, peer: str, message: bytes) -> None:
        try:
            said = decode(message)
        except ValueError:
            log.warning("a notification that is none of ours", extra={"peer": peer, "notification": message[:100]})
            return
        if isinstance(said, Ask):
            self._on_ask(said)
            pushes.ask(peer, said)
        elif isinstance(said, Look):
            pushes.look(peer, said)
        else:
            pulls.hear(peer, said)

    def _shut(self) -> None:
        if self._pulls is not None:
            self._pulls.cut(None, "the pod is going away")
            until = time.monotonic() + CLOSE_SECONDS
            while self._pulls.open and self.failure is None and time.monotonic() < until:
                self._tend(time.monotonic())
                time.sleep(BUSY_POLL_SECONDS)
            self._pulls.close()
        with self._gate:
            self._over = True
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Job):
                item.end("the pod is going away")
            elif isinstance(item, _Call) and not item.done.done():
                item.done.set_exception(TransferError("the pod is going away"))
        if self._nixl is not None:
            if self._pushes is not None:
                self._pushes.close()
            with contextlib.suppress(Exception):
                self._nixl.deregister_memory(self._registered)
            self._pulls = self._pushes = self._nixl = None


def _settle(done: Future[Any], run: Callable[[], object]) -> None:
    if not done.set_running_or_notify_cancel():
        return  # who asked has gone
    try:
        done.set_result(run())
    except BaseException as error:
        done.set_exception(error)
