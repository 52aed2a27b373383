"""Who owns which KV block of one pool. Pure bookkeeping: no tensor, no lock (its single caller is the event loop)."""

from __future__ import annotations


class BlockError(Exception):
    """The books do not balance: a bug in the caller, never a condition to retry."""


class BlockAllocator:
    """Blocks 0 … num_blocks-1; each is free or has exactly one owner (a request id).

    The block freed last is handed out first: its pages are the warmest.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owned: dict[str, tuple[int, ...]] = {}

    @property
    def free_count(self) -> int:
        return len(self._free)

    def owned(self, owner: str) -> tuple[int, ...]:
        """Blocks of an owner in token order; empty when it has none."""
        return self._owned.get(owner, ())

    def allocate(self, owner: str, count: int) -> tuple[int, ...]:
        """`count` ≥ 1 blocks for an owner that has none; raises BlockError when that cannot be."""
        if owner in self._owned:
            raise BlockError(f"{owner} already owns {len(self._owned[owner])} blocks")
        if not 1 <= count <= len(self._free):
            raise BlockError(f"{owner} asked for {count} of {len(self._free)} free blocks: admission did not check")
        blocks = tuple(self._free.pop() for _ in range(count))
        self._owned[owner] = blocks
        return blocks

    def free(self, owner: str) -> None:
        """Take back everything of an owner; a second time is an error: the blocks may have a new owner by then."""
        try:
            blocks = self._owned.pop(owner)
        except KeyError:
            raise BlockError(f"{owner} owns no blocks: freed twice, or never allocated") from None
        self._free.extend(reversed(blocks))
