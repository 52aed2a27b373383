"""Who is next, and for how long the queue will make a newcomer wait. Pure bookkeeping; time is an argument."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

MOST_OVERTAKEN = 16
"""So many requests may take what the head of the queue cannot use yet; then everybody waits for it."""

LOOK_BEHIND = 8
"""Requests that may be found too large for now before the search for a smaller one ends."""


@dataclass(slots=True, order=True)
class Waiting:
    """A request in the queue. `blocks` for its whole life; `prefix` and `work` as in `Admission.submit`."""

    priority: int
    arrival: int
    key: str = field(compare=False)
    blocks: int = field(compare=False)
    prefix: tuple[bytes, ...] = field(compare=False, default=())
    work: int = field(compare=False, default=0)
    overtaken: int = field(compare=False, default=0)


class Queue:
    """By priority, lower first, then by arrival.

    A request that does not fit yet may be overtaken by smaller ones of its own class, MOST_OVERTAKEN times in all: a
    long prompt at the head must not idle a pool that has room for short ones, nor may a stream of short ones keep it
    out for ever. A less urgent class never overtakes: it would take what the more urgent one waits for.
    """

    def __init__(self) -> None:
        self._entries: list[Waiting] = []
        self._of_key: dict[str, Waiting] = {}
        self._arrivals = itertools.count()
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._of_key

    @property
    def blocks(self) -> int:
        """That all who wait ask for."""
        return self._blocks

    def before(self, key: str) -> int:
        """How many come before it."""
        return bisect_left(self._entries, self._of_key[key])

    def put(self, key: str, blocks: int, *, priority: int, prefix: tuple[bytes, ...], work: int) -> None:
        entry = Waiting(priority, next(self._arrivals), key, blocks, prefix, work)
        insort(self._entries, entry)
        self._of_key[key] = entry
        self._blocks += blocks

    def remove(self, key: str) -> None:
        entry = self._of_key.pop(key)
        del self._entries[bisect_left(self._entries, entry)]
        self._blocks -= entry.blocks

    def candidates(self) -> Iterator[Waiting]:
        """Who may run next, best first; the caller calls `take` for those who can, before it asks for the next."""
        too_large = 0
        while too_large < min(len(self._entries), LOOK_BEHIND):
            entry, head = self._entries[too_large], self._entries[0]
            if too_large and (entry.priority != head.priority or head.overtaken >= MOST_OVERTAKEN):
                return
            yield entry
            if entry.key in self._of_key:
                too_large += 1

    def take(self, entry: Waiting) -> None:
        """The candidate runs; everybody before it was overtaken."""
        self.remove(entry.key)
        for passed in self._entries[: bisect_left(self._entries, entry)]:
            passed.overtaken += 1


class Departures:
    """How fast a queue that never ran empty moves: the times of its last departures, in seconds."""

    def __init__(self, keep: int = 64) -> None:
        self._times: deque[float] = deque(maxlen=keep)

    def note(self, now: float, count: int, *, left: int) -> None:
        """`count` requests left the queue, `left` still wait. Nobody waiting says nothing about the speed."""
        if left:
            self._times.extend([now] * count)
        else:
            self._times.clear()

    def seconds_for(self, waiting: int, now: float, *, unknown: int, most: int) -> int:
        """Whole seconds, 1 to `most`, in which `waiting` requests leave at this rate; `unknown` without a rate."""
        if len(self._times) < 2 or now <= self._times[0]:
            return unknown
        return max(1, min(most, math.ceil(waiting * (now - self._times[0]) / len(self._times))))
