"""Seats and blocks for a whole lifetime, by priority and arrival."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.schedule import Admission, Grant, Limits, blocks_for

LIMITS = Limits(max_model_len=100, block_size=4, seats=2, blocks=10, vocab_size=50)


def test_blocks_for() -> None:
    assert [blocks_for(tokens, 64) for tokens in (1, 63, 64, 65, 128, 129)] == [1, 1, 1, 2, 2, 3]


def test_a_small_request_uses_what_the_head_cannot() -> None:
    admission = Admission(1, LIMITS)
    for key, blocks in (("big", 7), ("head", 5), ("small", 2), ("medium", 3)):
        admission.submit(key, blocks)
    assert [grant.key for grant in admission.admit()] == ["big", "small"]
    assert admission.waiting == 2
    admission.finish("small")
    admission.finish("big")
    assert [grant.key for grant in admission.admit()] == ["head", "medium"]


def test_priorities() -> None:
    admission = Admission(1, LIMITS)
    for key, priority in (("a", 0), ("b", 0), ("later", 7), ("urgent", -1)):
        admission.submit(key, 1, priority=priority)
    assert [grant.key for grant in admission.admit()] == ["urgent", "a"]
    admission.finish("a")
    admission.finish("urgent")
    assert [grant.key for grant in admission.admit()] == ["b", "later"]


def compute(admission: Admission, key: str, keys: tuple[bytes, ...], **place: int) -> None:
    admission.submit(key, len(keys), prefix=keys, work=len(keys))
    (grant,) = admission.admit()
    assert {name: getattr(grant, name) for name in place} == place
    admission.publish(key, keys)


def test_the_rank_that_has_the_prefix_is_chosen_unless_it_is_too_busy() -> None:
    admission = Admission(2, LIMITS)
    keys = (b"1", b"2", b"3", b"4")
    compute(admission, "first", keys, rank=0, cached=0)
    admission.finish("first")
    compute(admission, "again", keys, rank=0, cached=4)
    # Its seat and its work are gone, its blocks are not: they are shared, not taken anew.
    admission.leave_seat("again")
    compute(admission, "shares", keys, rank=0, cached=4)
    assert (admission.blocks_free, admission.blocks_cached) == (16, 0)
    admission.finish("shares")
    admission.submit("long", 9, prefix=keys, work=20)
    assert [(grant.rank, grant.cached) for grant in admission.admit()] == [(0, 4)]
    compute(admission, "elsewhere", keys, rank=1, cached=0)


def test_a_request_fits_by_what_it_shares_with_one_that_runs() -> None:
    admission = Admission(1, LIMITS)
    keys = tuple(bytes([n]) for n in range(8))
    compute(admission, "a", keys)
    admission.submit("b", 9, prefix=keys, work=9)
    (grant,) = admission.admit()
    assert grant.cached == 8
    admission.finish("a")
    assert admission.blocks_free == 1
    admission.finish("b")
    assert (admission.blocks_free, admission.blocks_cached) == (10, 8)
    admission.check_integrity()


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


PREFIXES = st.lists(st.integers(0, 1), max_size=6).map(
    lambda bits: tuple("".join(map(str, bits[: n + 1])).encode() for n in range(len(bits)))
)


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["submit", "finish", "withdraw", "leave", "publish"]),
            st.integers(1, 10),
            st.integers(-1, 1),
            PREFIXES,
        ),
        max_size=60,
    )
)
def test_seats_and_blocks_are_never_given_twice(steps: list[tuple[str, int, int, tuple[bytes, ...]]]) -> None:
    admission = Admission(2, LIMITS)
    waiting: dict[str, tuple[int, int]] = {}
    running: dict[str, tuple[Grant, tuple[bytes, ...]]] = {}
    seated: set[str] = set()
    prefixes: dict[str, tuple[bytes, ...]] = {}

    def some(keys: Iterable[str], value: int) -> str:
        names = sorted(keys)
        return names[value % len(names)]

    for number, (what, value, priority, prefix) in enumerate(steps):
        if what == "submit":
            prefixes[f"{number}"] = prefix[:value]
            admission.submit(f"{number}", value, priority=priority, prefix=prefix[:value], work=value)
            waiting[f"{number}"] = (priority, number)
        elif what == "withdraw" and waiting:
            del waiting[key := some(waiting, value)]
            admission.withdraw(key)
        elif what == "finish" and running:
            seated.discard(key := some(running, value))
            del running[key]
            admission.finish(key)
        elif what == "leave" and seated:
            seated.remove(key := some(seated, value))
            admission.leave_seat(key)
        elif what == "publish" and running:
            admission.publish(key := some(running, value), prefixes[key])
        for grant in admission.admit():
            urgency, _ = waiting.pop(grant.key)
            assert urgency <= min((other for other, _ in waiting.values()), default=urgency), "most urgent first"
            running[grant.key] = (grant, prefixes[grant.key])
            seated.add(grant.key)
        admission.check_integrity()
        assert admission.waiting == len(waiting)
        places = [(running[key][0].rank, running[key][0].seat) for key in seated]
        assert len(places) == len(set(places)) == sum(admission.seats_taken)
        taken = {(grant.rank, block) for grant, _ in running.values() for block in grant.blocks}
        assert len(taken) == admission.blocks_total - admission.blocks_free
        for grant, prefix in running.values():
            for other, theirs in running.values():
                shared = len([b for b in grant.blocks if b in other.blocks]) if grant.rank == other.rank else 0
                assert shared <= len({*prefix} & {*theirs}) or grant is other, "equal prefixes only"
    for key in running:
        admission.finish(key)
    for key in waiting:
        admission.withdraw(key)
    admission.check_integrity()
    assert (admission.blocks_free, admission.waiting, sum(admission.seats_taken)) == (20, 0, 0)
