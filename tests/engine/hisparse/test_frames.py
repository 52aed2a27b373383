"""Where contexts lie while they lie whole, and when they do: pure bookkeeping."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.kv.hisparse.frames import Frames


def test_one_sequence_too_many_and_back() -> None:
    frames = Frames(10)
    frames.take(0, 4)
    frames.take(1, 6)
    assert (frames.whole, frames.used, len({*frames.of(0), *frames.of(1)})) == (True, 10, 10)
    frames.take(2, 1)
    assert (frames.whole, frames.used, frames.of(0), frames.switches) == (False, 0, (), 1)
    frames.leave(1)
    # Five of ten: half of them.
    assert not frames.can_return([0])
    assert frames.can_return([0, 2, 5])
    frames.bring_back()
    assert (frames.whole, frames.used, len(frames.of(0)), len(frames.of(2))) == (True, 5, 4, 1)


def test_right_at_the_border_they_do_not_return() -> None:
    frames = Frames(10)
    for seat, blocks in ((0, 6), (1, 6)):
        frames.take(seat, blocks)
    frames.leave(0)
    assert not frames.can_return([1])


def test_the_only_sequence_lies_whole_where_it_fits_at_all() -> None:
    """There is nothing to copy for others, and an idle rank is not bound to what it was under load."""
    frames = Frames(10)
    for seat in (0, 1):
        frames.take(seat, 7)
    for seat in (0, 1):
        frames.leave(seat)
    frames.take(3, 9)
    assert frames.whole
    frames.take(3, 11)
    assert not frames.whole


def test_without_frames_nothing_ever_lies_whole() -> None:
    frames = Frames(0)
    frames.take(0, 1)
    assert not frames.whole
    assert not frames.can_return([0])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=60))
def test_no_frame_is_given_twice(steps: list[tuple[int, int]]) -> None:
    """Whatever comes and goes: a seat's frames are as many as its blocks, nobody else's, and none is lost."""
    frames, needs = Frames(16), dict[int, int]()
    for seat, blocks in steps:
        if blocks:
            frames.take(seat, blocks)
            needs[seat] = blocks
        else:
            frames.leave(seat)
            needs.pop(seat, None)
        if frames.can_return(needs):
            frames.bring_back()
        given = [frame for other in needs for frame in frames.of(other)]
        assert len(given) == len(set(given)) == (sum(needs.values()) if frames.whole else 0)
        assert frames.whole or 2 * sum(needs.values()) > 16
        assert sorted([*given, *frames._free]) == list(range(16)) or not frames.whole
