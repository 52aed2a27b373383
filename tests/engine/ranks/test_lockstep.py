"""Under any interleaving of arrivals, ends, aborts and failures all ranks enter the same collectives in the same order,
and every request gets the tokens that it gets alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm52_engine.ranks.books import bucket_of
from glm52_engine.ranks.follower import OrderError
from glm52_engine.ranks.messages import Flags, RankOrder, RankResult, Shape, Start
from glm52_engine.runtime.rank import Event
from glm52_engine.runtime.types import Sampling
from tests.engine.ranks.simulated import LONGEST, SEATS, VOCABULARY, Replica, alone

PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9).map(tuple)


class LockStep(RuleBasedStateMachine):
    @initialize(world=st.integers(1, 4), launch_ahead=st.booleans())
    def begin(self, world: int, launch_ahead: bool) -> None:
        self.replica = Replica(world, launch_ahead=launch_ahead)
        self.count = 0
        self.failed = False

    @rule(prompt=PROMPTS, most=st.integers(1, 12))
    def arrive(self, prompt: tuple[int, ...], most: int) -> None:
        self.count += 1
        self.replica.submit(f"r{self.count}", prompt, min(most, LONGEST - len(prompt)))

    @precondition(lambda self: self.replica.tokens.keys() - self.replica.ended)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.replica.abort(data.draw(st.sampled_from(sorted(self.replica.tokens.keys() - self.replica.ended))))

    @precondition(lambda self: not self.failed)
    @rule(steps=st.integers(1, 5))
    def turn(self, steps: int) -> None:
        for _ in range(steps):
            self.replica.turn()

    @precondition(lambda self: not self.failed)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A rank that cannot compute fails the step; whatever the others did in it, nobody hears of a token."""
        broken = data.draw(st.sampled_from(self.replica.executors))
        before = {key: list(tokens) for key, tokens in self.replica.tokens.items()}
        broken.broken = True
        try:
            self.replica.turn()
        except MemoryError:
            self.failed = True
            assert self.replica.tokens == before
        broken.broken = False

    @invariant()
    def ranks_enter_the_same_collectives(self) -> None:
        if hasattr(self, "replica") and not self.failed:
            assert all(e.diary == self.replica.executors[0].diary for e in self.replica.executors)

    @invariant()
    def tokens_are_those_of_a_request_alone(self) -> None:
        for key, tokens in getattr(self, "replica", Replica(1, launch_ahead=False)).tokens.items():
            expected = alone(*self.replica.asked[key])
            assert tokens == expected[: len(tokens)]
            if key in self.replica.ended and key not in self.replica.aborted:
                assert tokens == expected

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "replica"):
            self.replica.admission.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "replica") or self.failed:
            return
        for _ in range(2000):
            if not self.replica.turn():
                break
        assert self.replica.ended == self.replica.tokens.keys(), "a request never ended"
        assert self.replica.books.idle
        self.tokens_are_those_of_a_request_alone()


TestLockStep = LockStep.TestCase
TestLockStep.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_launch_ahead_changes_no_token_and_is_used() -> None:
    ways = []
    for launch_ahead in (False, True):
        replica = Replica(2, launch_ahead=launch_ahead)
        for index in range(5):
            replica.submit(f"r{index}", (1 + index, 2, 3), 12)
        while replica.turn():
            pass
        ways.append(replica)
    assert ways[0].tokens == ways[1].tokens
    assert not any(shape.flags.lease for shape in ways[0].shapes)
    leased = [shape.number for shape in ways[1].shapes if shape.flags.lease]
    consumed = [shape.number for shape in ways[1].shapes if shape.flags.consume]
    assert leased
    assert [number + 1 for number in leased] == consumed


def test_idle_ranks_take_part_and_say_that_they_have_no_rows() -> None:
    replica = Replica(3, launch_ahead=False)
    replica.submit("r", (0,), 1)
    assert replica.turn()
    (shape,) = replica.shapes
    assert sorted(shape.active_rows) == [0, 0, 1]
    assert len({tuple(executor.diary) for executor in replica.executors}) == 1


def test_an_arrival_ends_a_lease_and_waits_one_step_at_most() -> None:
    replica = Replica(1, launch_ahead=True)
    replica.submit("a", (1, 2), 12)
    while not any(shape.flags.lease for shape in replica.shapes):
        replica.turn()
    replica.submit("b", (3, 4), 2)
    replica.turn()
    assert replica.shapes[-1].flags.consume
    assert not replica.shapes[-1].flags.lease
    replica.turn()
    assert replica.shapes[-1].flags.prefill


START = Start("k", 0, (0, 1), (1, 2, 3), Sampling(4, temperature=0.0), 0, False, 0, 1, 0, None)


def order(rows: int = 3, **changed: object) -> tuple[Shape, RankOrder]:
    """The first step of one sequence; `changed` goes to its shape."""
    shape = Shape(1, 4, (rows, 0), Flags(prefill=True))
    return replace(shape, **changed), RankOrder((START,), (), ((0, rows),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "part", "named"),
    [
        (*order(number=2), "comes after step 0"),
        (*order(bucket=2), r"bucket 2 for rows \(3, 0\)"),
        (*order(active_rows=(2, 0)), "it has 3 rows here and says 2"),
        (*order(active_rows=()), "for 0 ranks"),
        (*order(flags=Flags(False, consume=True)), "was not leased"),
        (*order(flags=Flags(True, lease=True)), "leases a step with rows of a prompt"),
        (order(4, active_rows=(4, 0))[0], order(4)[1], "4 rows for k, which has 3"),
        (order()[0], RankOrder((), (), ((0, 3),)), "seat 0, where nobody runs"),
        (order()[0], RankOrder((replace(START, seat=SEATS),), (), ((0, 3),)), f"seat {SEATS} of {SEATS}"),
        (order()[0], RankOrder((replace(START, blocks=(0, 99)),), (), ((0, 3),)), r"blocks \[99\]"),
        (order()[0], RankOrder((START, START), (), ((0, 3),)), "seat 0, which is not free"),
        (order()[0], RankOrder((START, replace(START, seat=1)), (), ((0, 3),)), "runs already"),
        (order()[0], RankOrder((START,), ("x",), ((0, 3),)), "x is to end and does not run"),
    ],
)
def test_an_order_that_does_not_fit_fails_before_anything_is_computed(
    shape: Shape, part: RankOrder, named: str
) -> None:
    replica = Replica(2, launch_ahead=False)
    with pytest.raises(OrderError, match=named) as failed:
        replica.ranks[0].execute(shape, part)
    assert "rank 0, step" in str(failed.value)
    assert not replica.executors[0].diary


def leased() -> tuple[Replica, Shape, RankOrder]:
    """A replica in the middle of a lease, and the order that would consume it."""
    replica = Replica(1, launch_ahead=True)
    replica.submit("a", (1, 2), 12)
    while not any(shape.flags.lease for shape in replica.shapes):
        replica.turn()
    planned = replica.books.next()
    assert planned is not None
    return replica, planned[0], planned[1][0]


@pytest.mark.parametrize(
    ("changed", "part", "named"),
    [
        ({"flags": Flags(False)}, {}, "a leased step is not consumed"),
        ({"bucket": 64}, {}, "not the step that was leased"),
        ({}, {"starts": (replace(START, seat=1),)}, "come or go in a leased step"),
        ({}, {"aborts": ("a",)}, "come or go in a leased step"),
    ],
)
def test_a_leased_step_is_consumed_as_it_was_promised(
    changed: dict[str, object], part: dict[str, object], named: str
) -> None:
    replica, shape, own = leased()
    with pytest.raises(OrderError, match=named):
        replica.ranks[0].execute(replace(shape, **changed), replace(own, **part))  # type: ignore[arg-type]


def test_results_of_another_step_are_refused() -> None:
    replica = Replica(2, launch_ahead=False)
    replica.submit("a", (1, 2), 4)
    replica.books.next()
    with pytest.raises(RuntimeError, match="planned twice"):
        replica.books.next()
    with pytest.raises(ValueError, match="results of 1 ranks for 2"):
        replica.books.settle([RankResult()])
    replica = Replica(1, launch_ahead=False)
    replica.submit("a", (1, 2), 4)
    replica.books.next()
    with pytest.raises(ValueError, match="news of b, which does not run there"):
        replica.books.settle([RankResult((-1,), (Event("b", None, True),))])


@given(st.integers(0, 5000))
def test_a_bucket_holds_its_rows_and_there_are_few_of_them(rows: int) -> None:
    bucket = bucket_of(rows)
    assert rows <= bucket <= max(2 * rows, rows + 64)
    assert bucket_of(bucket) == bucket
