"""Block ids → few runs of neighbours, so that a copy is a few large pieces. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def runs(*sides: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Block i of each side belongs to block i of the others. As few runs as their order allows, of blocks that are
    neighbours on all sides: the first block on each side, and how many blocks it has."""
    starts: tuple[int, ...] = ()
    count = 0
    for blocks in zip(*sides, strict=True):
        if count and blocks == tuple(start + count for start in starts):
            count += 1
            continue
        if count:
            yield starts, count
        starts, count = blocks, 1
    if count:
        yield starts, count
