"""Who may run: a seat and blocks for a request's whole lifetime, first come first served. Nothing is ever preempted.

Pure bookkeeping on the event loop's side: no tensor, no clock, no lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from glm52_engine.kv.blocks import BlockAllocator


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds one request. `seats` and `blocks` are those of one rank; lengths in tokens."""

    max_model_len: int
    block_size: int
    seats: int
    blocks: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A place to run: the seat is a row of the rank's block table, `blocks` are in token order."""

    key: str
    rank: int
    seat: int
    blocks: tuple[int, ...]


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class _Rank:
    def __init__(self, limits: Limits) -> None:
        self.allocator = BlockAllocator(limits.blocks)
        self.free_seats = list(range(limits.seats - 1, -1, -1))
        self.seats: dict[str, int] = {}

    def load(self) -> tuple[int, int]:
        return len(self.seats), self.allocator.num_blocks - self.allocator.free_count


class Admission:
    """One queue before all ranks: the head goes to the least loaded rank that can hold it, and nobody overtakes it.

    A queue per rank would let a request wait behind a long one while another rank is idle.
    """

    def __init__(self, ranks: int, limits: Limits) -> None:
        self._ranks = [_Rank(limits) for _ in range(ranks)]
        self._waiting: OrderedDict[str, int] = OrderedDict()
        self._place: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def seats_taken(self) -> Sequence[int]:
        return tuple(len(rank.seats) for rank in self._ranks)

    @property
    def blocks_free(self) -> int:
        return sum(rank.allocator.free_count for rank in self._ranks)

    @property
    def blocks_total(self) -> int:
        return sum(rank.allocator.num_blocks for rank in self._ranks)

    def submit(self, key: str, blocks: int) -> None:
        """Queue a request that needs `blocks` blocks; `key` is unique among all that have not been finished."""
        if key in self._waiting or key in self._place:
            raise ValueError(f"{key} is already queued or running")
        self._waiting[key] = blocks

    def withdraw(self, key: str) -> None:
        """Leave the queue without having run."""
        del self._waiting[key]

    def admit(self) -> list[Grant]:
        """Everybody at the head of the queue who fits now."""
        grants = []
        while self._waiting:
            key, blocks = next(iter(self._waiting.items()))
            able = [
                (rank.load(), index)
                for index, rank in enumerate(self._ranks)
                if rank.free_seats and rank.allocator.free_count >= blocks
            ]
            if not able:
                break
            del self._waiting[key]
            index = min(able)[1]
            rank = self._ranks[index]
            seat = rank.seats[key] = rank.free_seats.pop()
            self._place[key] = index
            grants.append(Grant(key, index, seat, rank.allocator.allocate(key, blocks)))
        return grants

    def leave_seat(self, key: str) -> None:
        """Give the seat back and keep the blocks: a finished prefill whose KV has not been fetched yet."""
        rank = self._ranks[self._place[key]]
        rank.free_seats.append(rank.seats.pop(key))

    def finish(self, key: str) -> None:
        """Give back everything; a second time is an error."""
        rank = self._ranks[self._place.pop(key)]
        if key in rank.seats:
            rank.free_seats.append(rank.seats.pop(key))
        rank.allocator.free(key)
