"""Names and values: what two engines must have in common, and what is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.offload.values import TRAILER_BYTES, Names, holds, trailer

KEYS = st.binary(min_size=32, max_size=32)
CONTRACTS = st.dictionaries(st.text(max_size=8), st.one_of(st.text(max_size=8), st.integers()), max_size=5)


def sealed(key: bytes, block: bytes) -> bytes:
    return block + trailer(key, memoryview(block))


@given(KEYS, KEYS, CONTRACTS, CONTRACTS)
def test_a_name_says_whose_kv_it_is_and_of_which_prefix(
    a: bytes, b: bytes, mine: dict[str, str | int], other: dict[str, str | int]
) -> None:
    assert (Names(mine).of(a) == Names(other).of(b)) == ((a, mine) == (b, other))
    assert Names(dict(reversed(mine.items()))).of(a) == Names(mine).of(a)


@given(KEYS, st.binary(min_size=1, max_size=300))
def test_a_block_is_recognised(key: bytes, block: bytes) -> None:
    assert holds(key, memoryview(sealed(key, block)))


@given(KEYS, KEYS, st.binary(min_size=1, max_size=300), st.data())
def test_anything_else_is_not(key: bytes, other: bytes, block: bytes, data: st.DataObject) -> None:
    value = sealed(key, block)
    place = data.draw(st.integers(0, len(value) - 1))
    flipped = bytearray(value)
    flipped[place] ^= data.draw(st.integers(1, 255))
    assert not holds(key, memoryview(flipped))
    assert not holds(key, memoryview(value[: data.draw(st.integers(0, len(value) - 1))]))
    assert not holds(key, memoryview(bytes(len(block) + TRAILER_BYTES)))
    assert holds(other, memoryview(value)) == (other == key)
