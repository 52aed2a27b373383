"""Blocks in few runs: all of them, in their order, on every side."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.kv import runs

IDS = st.integers(0, 12)


@given(st.lists(st.tuples(IDS, IDS), max_size=20))
def test_runs_are_the_blocks_of_both_sides_in_their_order(pairs: list[tuple[int, int]]) -> None:
    found = list(runs([a for a, _ in pairs], [b for _, b in pairs]))
    assert [(a + i, b + i) for (a, b), count in found for i in range(count)] == pairs
    ends = [tuple(start + count for start in starts) for starts, count in found]
    assert all(end != after for end, (after, _) in zip(ends, found[1:], strict=False)), "as few as can be"


@given(st.lists(IDS, max_size=20))
def test_one_side_alone(blocks: list[int]) -> None:
    found = list(runs(blocks))
    assert [block for (start,), count in found for block in range(start, start + count)] == blocks
    assert all(a + n != b for ((a,), n), ((b,), _) in itertools.pairwise(found)), "as few as can be"


def test_sides_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        list(runs([1, 2], [1]))
