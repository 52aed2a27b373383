"""Who may run: a seat and blocks for a request's whole lifetime, by priority and arrival. Nothing is ever preempted.

Pure bookkeeping on the event loop's side: no tensor, no clock, no lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glm52_engine.kv.blocks import BlockAllocator, BlockError
from glm52_engine.schedule.queue import Queue, Waiting


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds one request. `seats` and `blocks` are those of one rank; lengths in tokens.

    `max_waiting`: most requests that wait before all ranks together.
    """

    max_model_len: int
    block_size: int
    seats: int
    blocks: int
    vocab_size: int
    max_waiting: int = 256


@dataclass(frozen=True, slots=True)
class Grant:
    """A place to run: the seat is a row of the rank's block table, `blocks` are in token order.

    The first `cached` blocks hold the prompt's KV already; other requests may be reading them too.
    """

    key: str
    rank: int
    seat: int
    blocks: tuple[int, ...]
    cached: int = 0


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class _Rank:
    def __init__(self, limits: Limits) -> None:
        self.allocator = BlockAllocator(limits.blocks)
        self.free_seats = list(range(limits.seats - 1, -1, -1))
        self.seats: dict[str, int] = {}
        self.work: dict[str, int] = {}

    def cost(self, entry: Waiting) -> tuple[int, int, int] | None:
        """What it would cost to put the request here: blocks to compute until its first token, then the load.

        None when it does not fit now. A rank that has the prefix wins unless others' prompts make it wait longer there.
        """
        cached = self.allocator.cached(entry.prefix, entry.blocks) if self.free_seats else None
        if cached is None:
            return None
        work = sum(self.work.values()) + max(0, entry.work - cached)
        return work, len(self.seats), self.allocator.num_blocks - self.allocator.free_count

    def seat(self, entry: Waiting) -> tuple[int, tuple[int, ...], int]:
        held = self.allocator.allocate(entry.key, entry.blocks, entry.prefix)
        seat = self.seats[entry.key] = self.free_seats.pop()
        self.work[entry.key] = max(0, entry.work - held.cached)
        return seat, held.blocks, held.cached

    def leave_seat(self, key: str) -> None:
        self.free_seats.append(self.seats.pop(key))
        del self.work[key]


class Admission:
    """One queue before all ranks: who is next goes to the rank that costs it least, of those that can hold it.

    A queue per rank would let a request wait behind a long one while another rank is idle.
    """

    def __init__(self, ranks: int, limits: Limits) -> None:
        self._limits = limits
        self._ranks = [_Rank(limits) for _ in range(ranks)]
        self._queue = Queue()
        self._place: dict[str, int] = {}
        self._changed = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def blocks_waited_for(self) -> int:
        """That all waiting requests together ask for."""
        return self._queue.blocks

    def before(self, key: str) -> int | None:
        """How many waiting requests come before this one; None when it does not wait."""
        return self._queue.before(key) if key in self._queue else None

    @property
    def placed(self) -> int:
        """Requests that have blocks, with or without a seat."""
        return len(self._place)

    @property
    def seats_taken(self) -> Sequence[int]:
        return tuple(len(rank.seats) for rank in self._ranks)

    @property
    def blocks_free(self) -> int:
        return sum(rank.allocator.free_count for rank in self._ranks)

    @property
    def blocks_cached(self) -> int:
        """Of the free ones, those that hold a prefix."""
        return sum(rank.allocator.idle_count for rank in self._ranks)

    @property
    def blocks_total(self) -> int:
        return sum(rank.allocator.num_blocks for rank in self._ranks)

    def submit(
        self, key: str, blocks: int, *, priority: int = 0, prefix: tuple[bytes, ...] = (), work: int = 0
    ) -> None:
        """Queue a request that needs `blocks` blocks; `key` is unique among all that have not been finished.

        `prefix`: keys of the prompt's leading blocks that may come from the cache; `work`: blocks that must be computed
        before its first token where none does.
        """
        if key in self._queue or key in self._place:
            raise ValueError(f"{key} is already queued or running")
        self._queue.put(key, blocks, priority=priority, prefix=prefix, work=work)
        self._changed = True

    def withdraw(self, key: str) -> None:
        """Leave the queue without having run."""
        self._queue.remove(key)
        self._changed = True

    def admit(self) -> list[Grant]:
        """Everybody who is next and fits now."""
        grants: list[Grant] = []
        if not self._changed:
            return grants
        self._changed = False
        for entry in self._queue.candidates():
            able = [(cost, index) for index, rank in enumerate(self._ranks) if (cost := rank.cost(entry)) is not None]
            if able:
                index = self._place[entry.key] = min(able)[1]
                self._queue.take(entry)
                grants.append(Grant(entry.key, index, *self._ranks[index].seat(entry)))
            elif not any(rank.free_seats for rank in self._ranks):
                break
        return grants

    def publish(self, key: str, prefix: Sequence[bytes]) -> None:
        """The KV of the request's first `len(prefix)` blocks is computed: prompts that begin so may share it."""
        self._ranks[self._place[key]].allocator.publish(key, prefix)
        self._changed = True

    def known(self, prefix: Sequence[bytes]) -> int:
        """Most leading blocks of a prefix that one rank has."""
        return max(rank.allocator.known(prefix) for rank in self._ranks)

    def share(self, key: str, of: str, blocks: Sequence[int]) -> None:
        """Hold some blocks of a placed request under a key of its own, without a seat, until `finish`."""
        place = self._place[of]
        self._ranks[place].allocator.share(key, blocks)
        self._place[key] = place

    def distrust(self, key: str) -> None:
        """The request came to no good: prompts that begin like it are computed anew."""
        self._ranks[self._place[key]].allocator.distrust(key)

    def leave_seat(self, key: str) -> None:
        """Give the seat back and keep the blocks: a finished prefill whose KV has not been fetched yet."""
        self._ranks[self._place[key]].leave_seat(key)
        self._changed = True

    def finish(self, key: str) -> None:
        """Give back everything; a second time is an error."""
        rank = self._ranks[self._place.pop(key)]
        if key in rank.seats:
            rank.leave_seat(key)
        rank.allocator.free(key)
        self._changed = True

    def blocks_of(self, key: str) -> tuple[int, ...]:
        """Blocks of a request that runs or is held; empty for any other."""
        return self._ranks[self._place[key]].allocator.owned(key) if key in self._place else ()

    def check_integrity(self) -> None:
        """Raises BlockError unless seats, blocks and the queue agree about who is where."""
        for index, rank in enumerate(self._ranks):
            rank.allocator.check_integrity()
            here = {key for key, place in self._place.items() if place == index}
            if here != rank.allocator.owners():
                raise BlockError(f"rank {index}: blocks belong to {rank.allocator.owners()}, placed are {here}")
            if sorted([*rank.free_seats, *rank.seats.values()]) != list(range(self._limits.seats)):
                raise BlockError(f"rank {index}: {len(rank.free_seats)} free seats, {len(rank.seats)} taken")
            if rank.seats.keys() != rank.work.keys() or not here >= rank.seats.keys():
                raise BlockError(f"rank {index}: seats of {set(rank.seats)}, placed are {here}")
        both = [key for key in self._place if key in self._queue]
        if both:
            raise BlockError(f"{both} wait and run at once")
