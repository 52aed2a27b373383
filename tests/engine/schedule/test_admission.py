"""Seats and blocks for a whole lifetime, in order of arrival."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.schedule import Admission, Limits, blocks_for

LIMITS = Limits(max_model_len=100, block_size=4, seats=2, blocks=10, vocab_size=50)


def test_blocks_for() -> None:
    assert [blocks_for(tokens, 64) for tokens in (1, 63, 64, 65, 128, 129)] == [1, 1, 1, 2, 2, 3]


def test_nobody_overtakes_the_head() -> None:
    admission = Admission(1, LIMITS)
    admission.submit("big", 9)
    admission.submit("head", 5)
    admission.submit("small", 1)
    assert [grant.key for grant in admission.admit()] == ["big"]
    assert admission.waiting == 2
    admission.finish("big")
    assert [grant.key for grant in admission.admit()] == ["head", "small"]


def test_the_least_loaded_rank_is_chosen() -> None:
    admission = Admission(3, LIMITS)
    for key, blocks in (("a", 3), ("b", 1), ("c", 2), ("d", 1)):
        admission.submit(key, blocks)
    # One seat each; then the rank with the fewest blocks in use.
    assert [grant.rank for grant in admission.admit()] == [0, 1, 2, 1]
    assert admission.seats_taken == (1, 2, 1)


def test_a_held_prefill_keeps_blocks_but_no_seat() -> None:
    admission = Admission(1, LIMITS)
    admission.submit("a", 4)
    (grant,) = admission.admit()
    admission.leave_seat("a")
    assert admission.seats_taken == (0,)
    assert admission.blocks_free == 6
    admission.finish("a")
    assert admission.blocks_free == admission.blocks_total == 10
    with pytest.raises(KeyError):
        admission.finish("a")
    assert len(grant.blocks) == 4


def test_a_key_is_unique_and_can_leave_the_queue() -> None:
    admission = Admission(1, LIMITS)
    admission.submit("a", 4)
    with pytest.raises(ValueError, match="a is already queued"):
        admission.submit("a", 1)
    admission.withdraw("a")
    assert (admission.waiting, admission.admit()) == (0, [])


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["submit", "finish", "withdraw", "leave"]), st.integers(1, 10)), max_size=60
    )
)
def test_seats_and_blocks_are_never_given_twice(steps: list[tuple[str, int]]) -> None:
    admission = Admission(2, LIMITS)
    waiting: list[str] = []
    running: dict[str, tuple[int, int | None, tuple[int, ...]]] = {}
    for number, (what, value) in enumerate(steps):
        if what == "submit":
            admission.submit(f"{number}", value)
            waiting.append(f"{number}")
        elif what == "withdraw" and waiting:
            admission.withdraw(waiting.pop(value % len(waiting)))
        elif what == "finish" and running:
            key = sorted(running)[value % len(running)]
            admission.finish(key)
            del running[key]
        elif what == "leave" and running:
            key = sorted(running)[value % len(running)]
            rank, seat, blocks = running[key]
            if seat is not None:
                admission.leave_seat(key)
                running[key] = (rank, None, blocks)
        for grant in admission.admit():
            assert grant.key == waiting.pop(0), "in order of arrival"
            running[grant.key] = (grant.rank, grant.seat, grant.blocks)
        seats = [(rank, seat) for rank, seat, _ in running.values() if seat is not None]
        blocks_taken = [(rank, block) for rank, _, blocks in running.values() for block in blocks]
        assert len(seats) == len(set(seats)) == sum(admission.seats_taken)
        assert len(blocks_taken) == len(set(blocks_taken)) == admission.blocks_total - admission.blocks_free
    for key in running:
        admission.finish(key)
    for key in waiting:
        admission.withdraw(key)
    assert (admission.blocks_free, admission.waiting, sum(admission.seats_taken)) == (20, 0, 0)
