"""The block books, against a model that is a dictionary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.kv import BlockAllocator, BlockError

operations = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9)), max_size=60)


@given(operations=operations)
def test_a_block_has_at_most_one_owner(operations: list[tuple[str, int]]) -> None:
    blocks = BlockAllocator(16)
    books: dict[str, tuple[int, ...]] = {}
    for owner, count in operations:
        if owner in books:
            blocks.free(owner)
            del books[owner]
        elif 1 <= count <= blocks.free_count:
            books[owner] = blocks.allocate(owner, count).blocks
            assert len(books[owner]) == count
        else:
            with pytest.raises(BlockError):
                blocks.allocate(owner, count)
        taken = [block for owned in books.values() for block in owned]
        assert len(taken) == len(set(taken))
        assert blocks.free_count == 16 - len(taken)
        assert set(taken) <= set(range(16))
        assert all(blocks.owned(owner) == owned for owner, owned in books.items())


def test_errors_that_would_hand_a_block_to_two_requests() -> None:
    blocks = BlockAllocator(4)
    blocks.allocate("a", 3)
    with pytest.raises(BlockError, match="a already owns 3 blocks"):
        blocks.allocate("a", 1)
    with pytest.raises(BlockError, match="b asked for 2 of 1 free blocks"):
        blocks.allocate("b", 2)
    blocks.free("a")
    with pytest.raises(BlockError, match="a owns no blocks: freed twice"):
        blocks.free("a")
    assert blocks.owned("a") == ()
