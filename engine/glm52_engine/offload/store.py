"""`PrefixStore`: blocks of prefixes out to the store and in from it, beside the step loop.

Two threads, each with its own channel to the client's process, so that a prompt that waits for its prefix does not
wait for what is being saved. The event loop only puts jobs into their queues. Whatever fails is a prefix less.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from glm52_engine.config import StoreConfig
from glm52_engine.offload.child import Channel, Child, StoreDown
from glm52_engine.offload.link import Link
from glm52_engine.offload.values import TRAILER_BYTES, Names, holds, trailer
from glm52_engine.runtime.stored import BlockStore, Fetch, StoreCounters
from glm52_engine.sizing import GIB

FETCH_SECONDS = 5.0
"""After which no further batch of a prompt's blocks is begun: computing the rest is the surer way by then."""

BATCH_SECONDS = 5.0
"""Most for one batch of blocks, and for a probe: Mooncake takes 4.5 s to say that its master does not answer."""

TEND_SECONDS = 1.0
"""Between two looks at an idle client, and at a store that was lost."""

MOST_QUEUED_BLOCKS = 1024
"""Blocks that wait to be saved, at most a quarter of a pool: they are held there meanwhile. More are not saved."""

READ, WRITE = 0, 1


@dataclass(frozen=True, slots=True)
class Job:
    """`work` may raise StoreDown; `done` gets its result, or 0."""

    work: Callable[[Channel], int]
    done: Callable[[int], None]


class PrefixStore:
    """See `BlockStore`. `start` and `close` frame its life; neither waits for the store."""

    def __init__(
        self,
        config: StoreConfig,
        contract: Mapping[str, str | int],
        *,
        block_bytes: int,
        pool_blocks: int,
        host: str,
    ) -> None:
        """`contract`: see `values.Names`; `pool_blocks`: of one rank; `host`: the pod's own address."""
        self.counters = StoreCounters()
        self._names = Names(contract)
        self._most_queued = min(MOST_QUEUED_BLOCKS, pool_blocks // 4)
        self._queued = 0
        self._lock = threading.Lock()
        self._closed = False
        self.link = Link(
            lambda: Child(
                master=config.master,
                host=host,
                segment_bytes=config.store_gib * GIB,
                slot_bytes=block_bytes + TRAILER_BYTES,
                channels=2,
            ),
            self.counters,
        )
        self._jobs: tuple[queue.SimpleQueue[Job | None], ...] = (queue.SimpleQueue(), queue.SimpleQueue())
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=name, daemon=True)
            for index, name in ((READ, "store-read"), (WRITE, "store-write"))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for jobs in self._jobs:
                jobs.put(None)
        # What waits for an answer learns at once that none comes.
        self.link.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self.link.close()

    @property
    def room(self) -> int:
        with self._lock:
            return self._most_queued - self._queued

    def find(self, keys: Sequence[bytes], done: Callable[[int], None], *, within: float) -> None:
        deadline = time.monotonic() + within

        def work(channel: Channel) -> int:
            left = deadline - time.monotonic()
            if left <= 0:
                return 0
            codes = channel.call("exist", [self._names.of(key) for key in keys], left)
            return next((index for index, code in enumerate(codes) if code != 1), len(codes))

        self._ask(READ, Job(work, done))

    def fetch(self, pool: Any, blocks: Sequence[int], keys: Sequence[bytes], done: Callable[[int], None]) -> Fetch:
        fetch = Fetch()
        deadline = time.monotonic() + FETCH_SECONDS

        def work(channel: Channel) -> int:
            there = 0
            while there < len(keys) and not fetch.cancelled and time.monotonic() < deadline:
                batch = slice(there, there + self.link.slots)
                got = self._fetch(channel, pool, blocks[batch], keys[batch])
                there += got
                if got < len(keys[batch]):
                    self.counters.fetches_failed += 1
                    break
            self.counters.blocks_fetched += there
            return there

        self._ask(READ, Job(work, done))
        return fetch

    def save(self, pool: Any, blocks: Sequence[int], keys: Sequence[bytes], done: Callable[[int], None]) -> bool:
        if not (len(keys) <= self.room and self.counters.up):
            self.counters.blocks_dropped += len(keys)
            return False

        def work(channel: Channel) -> int:
            codes = channel.call("exist", [self._names.of(key) for key in keys], BATCH_SECONDS)
            missing = [index for index, code in enumerate(codes) if code != 1]
            saved, slots = 0, self.link.slots
            for first in range(0, len(missing), slots):
                batch = missing[first : first + slots]
                saved += self._save(channel, pool, [blocks[i] for i in batch], [keys[i] for i in batch])
            return saved

        def settled(saved: int) -> None:
            with self._lock:
                self._queued -= len(keys)
            done(saved)

        with self._lock:
            self._queued += len(keys)
        self._ask(WRITE, Job(work, settled))
        return True

    def discard(self, keys: Sequence[bytes]) -> None:
        names = [self._names.of(key) for key in keys]
        self._ask(WRITE, Job(lambda channel: len(channel.call("remove", names, BATCH_SECONDS)), lambda count: None))

    def _ask(self, index: int, job: Job) -> None:
        with self._lock:
            # Behind the end of a queue nobody would ever be told.
            taken = self.counters.up and not self._closed
            if taken:
                self._jobs[index].put(job)
        if not taken:
            job.done(0)

    def _run(self, index: int) -> None:
        while True:
            try:
                job = self._jobs[index].get(timeout=TEND_SECONDS if index == READ else None)
            except queue.Empty:
                self.link.tend(index, BATCH_SECONDS)
                continue
            if job is None:
                return
            self._do(index, job)

    def _do(self, index: int, job: Job) -> None:
        result = 0
        try:
            # What was queued before the store was lost would wait for its deadline, one job after the other.
            if self.counters.up:
                result = job.work(self.link.channel(index))
        except StoreDown as error:
            self.link.lost(error)
        finally:
            job.done(result)

    def _fetch(self, channel: Channel, pool: torch.Tensor, blocks: Sequence[int], keys: Sequence[bytes]) -> int:
        """The number of leading blocks that came whole. A store that is lost meanwhile has brought none."""
        try:
            codes = channel.call("get", [self._names.of(key) for key in keys], BATCH_SECONDS)
        except StoreDown as error:
            self.link.lost(error)
            return 0
        for place, (block, key, code) in enumerate(zip(blocks, keys, codes, strict=True)):
            value = channel.slot(place)
            if code != len(value) or not holds(key, value):
                return place
            pool[block].copy_(torch.frombuffer(value[:-TRAILER_BYTES], dtype=torch.uint8))
        return len(keys)

    def _save(self, channel: Channel, pool: torch.Tensor, blocks: Sequence[int], keys: Sequence[bytes]) -> int:
        for place, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            value = channel.slot(place)
            body = value[:-TRAILER_BYTES]
            torch.frombuffer(body, dtype=torch.uint8).copy_(pool[block])
            value[-TRAILER_BYTES:] = trailer(key, body)
        names = [self._names.of(key) for key in keys]
        channel.call("put", names, BATCH_SECONDS)
        # A put is answered well also where the name is taken by one that was broken off, of which nobody gets a byte.
        saved = sum(code == 1 for code in channel.call("exist", names, BATCH_SECONDS))
        self.counters.blocks_saved += saved
        self.counters.blocks_dropped += len(names) - saved
        return saved


if TYPE_CHECKING:

    def _conforms(store: PrefixStore) -> BlockStore:
        return store
