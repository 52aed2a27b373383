"""The KV that a prefill pod holds for decode peers, each under a lease. Pure bookkeeping; time is an argument."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from glm52_engine.runtime.types import Blocks

LEASE_SECONDS = 30.0
"""For a decode pod to be found that takes the request, and to be heard of."""

HEARD_SECONDS = 15.0
"""From a decode pod's last heartbeat: several of them may be late before its KV is anybody's, and one that died
frees the blocks after it."""


def prompt_digest(prompt: Sequence[int]) -> str:
    """Binds KV to the prompt it was computed from: a reference cannot serve another prompt of the same length."""
    return hashlib.blake2b(array("Q", prompt).tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Lease:
    request_id: str
    blocks: Blocks
    num_tokens: int
    digest: str
    ends_at: float
    readers: int = 1
    """How often the KV will be read: once for each choice that goes on from this prompt."""


class LeaseTable:
    """`seconds`: from the grant; `heard_seconds`: from a renewal."""

    def __init__(self, seconds: float = LEASE_SECONDS, heard_seconds: float = HEARD_SECONDS) -> None:
        self.seconds = seconds
        self.heard_seconds = heard_seconds
        self._leases: dict[str, Lease] = {}
        self._unwanted: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._leases

    def grant(self, request_id: str, blocks: Blocks, prompt: Sequence[int], now: float, readers: int = 1) -> Lease:
        lease = Lease(request_id, blocks, len(prompt), prompt_digest(prompt), now + self.seconds, readers)
        self._leases[request_id] = lease
        return lease

    def renew(self, request_id: str, now: float) -> Lease | None:
        """None when it ended: its blocks may hold another request's rows by now."""
        lease = self._leases.get(request_id)
        if lease is None or now >= lease.ends_at:
            return None
        self._leases[request_id] = lease = replace(lease, ends_at=now + self.heard_seconds)
        return lease

    def read(self, request_id: str) -> Lease | None:
        """One reader has all bytes; the lease is over with the last one, whose `readers` is 0."""
        lease = self._leases.get(request_id)
        if lease is None:
            return None
        lease = replace(lease, readers=lease.readers - 1)
        if lease.readers:
            self._leases[request_id] = lease
        else:
            del self._leases[request_id]
        return lease

    def end(self, request_id: str) -> Lease | None:
        return self._leases.pop(request_id, None)

    def refuse(self, request_id: str, now: float) -> None:
        """Nobody will come for this request's KV, should it be granted still: its end overtook its beginning."""
        self._unwanted[request_id] = now + self.seconds

    def is_refused(self, request_id: str) -> bool:
        return request_id in self._unwanted

    def expire(self, now: float) -> list[Lease]:
        """Removes and returns the leases whose time is over."""
        self._unwanted = {request_id: end for request_id, end in self._unwanted.items() if now < end}
        over = [lease for lease in self._leases.values() if now >= lease.ends_at]
        for lease in over:
            del self._leases[lease.request_id]
        return over
