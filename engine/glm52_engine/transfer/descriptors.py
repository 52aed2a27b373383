"""Block id pairs → few contiguous runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glm52_engine import kv


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks that are contiguous on both sides."""

    remote: int
    local: int
    count: int


def runs(remote: Sequence[int], local: Sequence[int]) -> list[Run]:
    """Pairs remote[i] with local[i], in as few runs as their order allows."""
    if len(remote) != len(local):
        raise ValueError(f"{len(remote)} remote blocks for {len(local)} local ones")
    return [Run(theirs, ours, count) for (theirs, ours), count in kv.runs(remote, local)]


@dataclass(frozen=True, slots=True)
class Region:
    """One rank's pool as the transfer agent knows it."""

    address: int
    num_blocks: int
    block_bytes: int

    def spans(self, starts_and_counts: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """(address, bytes, device 0) of each run of blocks; raises ValueError for a block outside the pool."""
        for start, count in starts_and_counts:
            if start < 0 or start + count > self.num_blocks:
                raise ValueError(f"blocks {start}…{start + count - 1} of a pool of {self.num_blocks}")
        size = self.block_bytes
        return [(self.address + start * size, count * size, 0) for start, count in starts_and_counts]
