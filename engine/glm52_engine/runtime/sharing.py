"""Prefixes that a pod shares with others through a store: what of it is the event loop's business."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from glm52_engine.kv import following_keys
from glm52_engine.runtime.record import Record
from glm52_engine.runtime.stored import BlockStore
from glm52_engine.runtime.types import KvPool
from glm52_engine.schedule import Admission

LOOKUP_SECONDS = 0.25
"""Most that a prompt waits to learn what the store has; a master in the same cluster answers in milliseconds."""


class Sharing:
    """Books of what comes and goes. `on_free`: blocks were given back, so that others may be admitted."""

    def __init__(
        self, store: BlockStore, admission: Admission, pools: Sequence[KvPool], on_free: Callable[[], None]
    ) -> None:
        self.store = store
        self._admission = admission
        self._pools = pools
        self._on_free = on_free
        self._saving: set[str] = set()

    @property
    def saving(self) -> int:
        """Holds on blocks that are being saved."""
        return len(self._saving)

    async def find(self, prefix: Sequence[bytes]) -> int:
        """Leading blocks that the store has; 0 where a rank has them all already."""
        if self._admission.known(prefix) == len(prefix):
            return 0
        loop = asyncio.get_running_loop()
        found: asyncio.Future[int] = loop.create_future()
        tell = _to(loop, lambda count: None if found.done() else found.set_result(count))
        self.store.find(prefix, tell, within=LOOKUP_SECONDS)
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                return await found
        except TimeoutError:
            self.store.counters.lookups_failed += 1
            return 0

    def fetch(self, record: Record, fetched: Callable[[int], None]) -> None:
        """What the store has behind the blocks that the record's grant calls cached. Until `fetched`, they are its."""
        assert record.grant is not None
        wanted = slice(record.grant.cached, record.stored)
        pool = self._pools[record.grant.rank].tensor
        done = _to(asyncio.get_running_loop(), fetched)
        record.fetch = self.store.fetch(pool, record.grant.blocks[wanted], record.prefix[wanted], done)

    def save(self, record: Record, keys: Sequence[bytes], *, known: int = 0) -> None:
        """The record's leading blocks, which are complete in the pool; they are held until the store has them.

        `known`: the first ones, which others have saved before. They are only left out where not all find room: the pod
        that had them may be gone.
        """
        if len(keys) <= max(record.stored, known):
            return
        first = known if len(keys) > self.store.room else 0
        rank, blocks, hold = record.blocks.rank, record.blocks.ids[first : len(keys)], f"{record.key} to the store"
        self._admission.share(hold, record.key, blocks)
        self._saving.add(hold)

        def let_go() -> None:
            self._saving.remove(hold)
            self._admission.finish(hold)

        def saved(count: int) -> None:
            let_go()
            self._on_free()

        loop = asyncio.get_running_loop()
        if not self.store.save(self._pools[rank].tensor, blocks, keys[first:], _to(loop, saved)):
            let_go()

    def save_conversation(self, record: Record) -> None:
        """Of a decode that is over: prompt and output begin the prompt of a conversation's next turn."""
        assert record.output is not None
        size, known = self._pools[record.blocks.rank].block_size, len(record.chain) - 1
        # The last token was never an input, so that it has no KV.
        behind = (*record.request.prompt[known * size :], *record.output[:-1])
        self.save(record, (*record.chain[1:], *following_keys(record.chain[-1], behind, size)), known=known)


def _to(loop: asyncio.AbstractEventLoop, call: Callable[[int], None]) -> Callable[[int], None]:
    """The same call, from any thread; dropped where the loop is closed and nobody is left to tell."""

    def tell(count: int) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(call, count)

    return tell
