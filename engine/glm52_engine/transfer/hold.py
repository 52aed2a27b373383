"""The prefill side of a hand-off: KV is held under leases until a peer has read it, gives it up or goes silent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from glm52_engine.runtime.types import Blocks, Engine
from glm52_engine.transfer.lease import Lease, LeaseTable
from glm52_engine.transfer.rates import Rates

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TransferCounters:
    """Bytes and outcomes of KV hand-offs, which only grow, and how fast the bytes come."""

    bytes_in: int = 0
    bytes_out: int = 0
    bytes_early: int = 0
    """Of those that came in, while the rest of their prompt was computed."""
    pulls: int = 0
    pulls_failed: int = 0
    handed_over: int = 0
    given_up: int = 0
    expired: int = 0
    rates: Rates = field(default_factory=Rates)


def notice(request_id: str, size: int, *, part: bool = False) -> bytes:
    """What a decode peer attaches to a pull: the owner's agent says it when the last byte is there.

    `part`: more will be pulled, so nothing is over with it.
    """
    return json.dumps({"id": request_id, "bytes": size, **({"part": True} if part else {})}).encode()


class Holder:
    def __init__(
        self,
        engine: Engine,
        counters: TransferCounters,
        *,
        table: LeaseTable | None = None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.counters = counters
        self.table = table or LeaseTable()
        self.on_change = on_change
        self.clock = clock
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self.table)

    def expects(self) -> bool:
        """Whether a peer may ask for KV at any moment."""
        return bool(self.table)

    def grant(self, request_id: str, blocks: Blocks, prompt: Sequence[int], readers: int = 1) -> Lease:
        """Holds the KV, unless it was given up before it was there: a router that goes away tells so on another
        connection than the one on which its call runs."""
        lease = self.table.grant(request_id, blocks, prompt, self.clock(), readers)
        if self.table.is_refused(request_id):
            self.give_up(request_id)
        return lease

    def holds(self, request_id: str) -> bool:
        return request_id in self.table

    def renew(self, request_id: str) -> Lease | None:
        return self.table.renew(request_id, self.clock())

    def give_up(self, request_id: str) -> bool:
        """Nobody needs the KV; unknown and already ended leases are harmless."""
        if self.table.end(request_id) is None:
            self.table.refuse(request_id, self.clock())
            return False
        self.counters.given_up += 1
        self._free(request_id)
        return True

    def notice_from_agent(self, message: bytes) -> None:
        """Called on the transfer thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._handed_over, message)

    def _handed_over(self, message: bytes) -> None:
        try:
            fields = json.loads(message)
            request_id, size, part = str(fields["id"]), int(fields["bytes"]), bool(fields.get("part"))
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("a notice that is none of ours", extra={"notice": message[:100]})
            return
        self.counters.bytes_out += size
        if part:
            return
        self.counters.handed_over += 1
        lease = self.table.read(request_id)
        if lease is None:
            log.warning("KV was read after its lease", extra={"request": request_id})
        elif not lease.readers:
            self._free(request_id)

    async def expire_forever(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for lease in self.table.expire(self.clock()):
                self.counters.expired += 1
                log.warning("lease expired, no peer came for the KV", extra={"request": lease.request_id})
                self._free(lease.request_id)

    def _free(self, request_id: str) -> None:
        self.engine.release(request_id)
        self.on_change()
