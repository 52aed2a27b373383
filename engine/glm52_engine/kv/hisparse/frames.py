"""Whether a rank's contexts lie whole in the memory of its hot buffers, and where. Pure bookkeeping, no tensors.

Hot buffers pay where contexts do not fit beside the compute; below that a step would resolve and fetch for nothing.
Their memory is one run of rows a layer, so while contexts are few it holds them whole: a frame for each block, as in a
plain cache. One sequence too many, and the same memory becomes hot buffers for all; contexts return when they would
fit twice.
"""

from __future__ import annotations

from collections.abc import Collection

RETURN_SHARE = 2
"""Contexts return when they need at most one in so many of the frames. A return copies all of them from host memory,
while every row waits: right at the border each arrival would undo it."""


class Frames:
    """Frames 0 … count - 1, each as large as a block; the seats' contexts are in them while `whole`.

    A seat needs as many as its sequence has blocks, for its whole life, so that no step runs out of them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.whole = count > 0
        self.switches = 0
        self._free = list(range(count - 1, -1, -1))
        self._needs: dict[int, int] = {}
        self._of: dict[int, tuple[int, ...]] = {}

    @property
    def used(self) -> int:
        """Frames that hold a context; 0 while the memory is hot buffers."""
        return sum(map(len, self._of.values()))

    @property
    def seated(self) -> Collection[int]:
        return self._needs.keys()

    def of(self, seat: int) -> tuple[int, ...]:
        """In the order of the sequence's blocks; empty while the memory is hot buffers."""
        return self._of.get(seat, ())

    def take(self, seat: int, blocks: int) -> None:
        """A sequence takes the seat; from now on the memory is hot buffers where its context does not fit too."""
        self.leave(seat)
        self._needs[seat] = blocks
        if not self.whole and len(self._needs) == 1 and blocks <= self.count:
            self._switch(True)  # nobody else's context has to be brought
        if not self.whole:
            return
        if blocks > len(self._free):
            self._switch(False)
        else:
            self._give(seat)

    def leave(self, seat: int) -> None:
        """The seat's sequence is over; a seat that nobody has is left alone."""
        if self._needs.pop(seat, None) is not None:
            self._free += reversed(self._of.pop(seat, ()))

    def can_return(self, seats: Collection[int]) -> bool:
        """Whether all contexts may lie whole again; `seats`: those whose lengths are known."""
        fits = RETURN_SHARE * sum(self._needs.values()) <= self.count
        return self.count > 0 and not self.whole and fits and self._needs.keys() <= set(seats)

    def bring_back(self) -> None:
        """Every seat has frames again."""
        self._switch(True)
        for seat in self._needs:
            self._give(seat)

    def _switch(self, whole: bool) -> None:
        self.whole = whole
        self.switches += 1
        self._of.clear()
        self._free = list(range(self.count - 1, -1, -1))

    def _give(self, seat: int) -> None:
        self._of[seat] = tuple(self._free.pop() for _ in range(self._needs[seat]))
