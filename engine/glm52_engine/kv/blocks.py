"""Who holds which KV block of one pool. Pure bookkeeping: no tensor, no lock (its single caller is the event loop)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from glm52_engine.kv.prefix import PrefixIndex


class BlockError(Exception):
    """The books do not balance: a bug in the caller, never a condition to retry."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks in token order; the first `cached` of them hold the KV of the asked prefix already, and are read only."""

    blocks: tuple[int, ...]
    cached: int


class BlockAllocator:
    """Blocks 0 … num_blocks-1; each is free, idle, or held by one or more owners (request ids).

    Idle blocks hold a published prefix that nobody uses now. They count as free, and are taken when no empty block is
    left: the one that was let go the longest ago first. Of the empty ones the block freed last is handed out first: its
    pages are the warmest.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_blocks
        self._owned: dict[str, tuple[int, ...]] = {}
        self._prefixes = PrefixIndex()

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds, idle ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    def owned(self, owner: str) -> tuple[int, ...]:
        """Blocks of an owner in token order; empty when it has none."""
        return self._owned.get(owner, ())

    def owners(self) -> set[str]:
        return set(self._owned)

    def cached(self, prefix: Sequence[bytes], count: int) -> int | None:
        """How many leading blocks `allocate` with the same arguments would find; None when it could not succeed."""
        if count - len(prefix) > self.free_count:
            return None
        found = self._prefixes.find(prefix)
        return len(found) if self._fresh(found, count) <= self.free_count else None

    def allocate(self, owner: str, count: int, prefix: Sequence[bytes] = ()) -> Allocation:
        """`count` ≥ 1 blocks for an owner that has none; raises BlockError when that cannot be.

        `prefix`: keys of leading blocks that may be shared, at most `count`.
        """
        if owner in self._owned:
            raise BlockError(f"{owner} already owns {len(self._owned[owner])} blocks")
        if len(prefix) > count:
            raise BlockError(f"{owner} asked for {count} blocks with the keys of {len(prefix)}")
        found = self._prefixes.find(prefix)
        if count < 1 or self._fresh(found, count) > self.free_count:
            raise BlockError(f"{owner} asked for {count} of {self.free_count} free blocks: admission did not check")
        # Held before anything is evicted: what was found must not be taken for the rest.
        for block in found:
            self._idle.pop(block, None)
            self._holders[block] += 1
        fresh = [self._take() for _ in range(count - len(found))]
        self._owned[owner] = blocks = (*found, *fresh)
        return Allocation(blocks, len(found))

    def known(self, prefix: Sequence[bytes]) -> int:
        """How many leading blocks of a prefix somebody has computed and not yet evicted."""
        return len(self._prefixes.find(prefix))

    def share(self, owner: str, blocks: Sequence[int]) -> None:
        """Hold blocks that are held already, for an owner that has none: they stay as they are until it frees them."""
        if owner in self._owned:
            raise BlockError(f"{owner} already owns {len(self._owned[owner])} blocks")
        strangers = [block for block in blocks if not self._holders[block]]
        if strangers:
            raise BlockError(f"{owner} shares blocks {strangers}, which nobody holds")
        for block in blocks:
            self._holders[block] += 1
        self._owned[owner] = tuple(blocks)

    def publish(self, owner: str, keys: Sequence[bytes]) -> None:
        """The KV of the owner's first `len(keys)` blocks is computed and complete: others may share it from now on."""
        blocks = self._owned.get(owner, ())
        if len(keys) > len(blocks):
            raise BlockError(f"{owner} publishes {len(keys)} blocks and owns {len(blocks)}")
        for key, block in zip(keys, blocks, strict=False):
            self._prefixes.add(key, block)

    def distrust(self, owner: str) -> None:
        """The KV of the owner's blocks may be wrong: nobody new finds any of them."""
        for block in self._owned.get(owner, ()):
            if block in self._prefixes:
                self._prefixes.drop(block)

    def free(self, owner: str) -> None:
        """Let go of everything of an owner; a second time is an error: the blocks may have a new owner by then."""
        try:
            blocks = self._owned.pop(owner)
        except KeyError:
            raise BlockError(f"{owner} owns no blocks: freed twice, or never allocated") from None
        # From the end: the start of a prefix is of use to more prompts, so it must be evicted last.
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0 and block in self._prefixes:
                self._idle[block] = None
            elif self._holders[block] == 0:
                self._empty.append(block)

    def check_integrity(self) -> None:
        """Raises BlockError unless each block is in exactly one state and every hold has an owner."""
        holders = [0] * self.num_blocks
        for blocks in self._owned.values():
            for block in blocks:
                holders[block] += 1
        if holders != self._holders:
            raise BlockError("the holds of the blocks differ from what their owners have")
        held = [block for block, count in enumerate(holders) if count]
        if sorted([*self._empty, *self._idle, *held]) != list(range(self.num_blocks)):
            raise BlockError(f"{len(self._empty)} empty, {len(self._idle)} idle, {len(held)} held of {self.num_blocks}")
        if not self._prefixes.is_consistent():
            raise BlockError("keys and blocks of the prefixes do not match")
        if any(block in self._prefixes for block in self._empty) or any(b not in self._prefixes for b in self._idle):
            raise BlockError("a block is idle without a prefix, or empty with one")

    def _fresh(self, found: Sequence[int], count: int) -> int:
        """Blocks that an allocation takes from the free ones: new ones, and found ones that are idle."""
        return count - sum(self._holders[block] > 0 for block in found)

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._prefixes.drop(block)
        self._holders[block] = 1
        return block
