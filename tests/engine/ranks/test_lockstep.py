"""Under any interleaving of arrivals, ends, aborts and failures all ranks enter the same collectives in the same order,
and every request gets the tokens that it gets alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from glm52_engine.ranks.books import bucket_of
from glm52_engine.ranks.follower import OrderError
from glm52_engine.ranks.messages import Flags, RankOrder, RankResult, Shape, Start
from glm52_engine.runtime.rank import Event, Running
from glm52_engine.runtime.types import Sampling, Token
from glm52_engine.schedule.launch_ahead import may_lease
from tests.engine.ranks.simulated import (
    BLOCK,
    EOS,
    LONGEST,
    SEATS,
    VOCABULARY,
    FakeExecutor,
    FakeWork,
    Kind,
    Replica,
    alone,
)

PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9).map(tuple)
KINDS: tuple[Kind, ...] = ("whole", "prefill", "continued")


class LockStep(RuleBasedStateMachine):
    """What must hold is asserted by `Replica` whenever something happens."""

    @initialize(world=st.integers(1, 4), launch_ahead=st.booleans())
    def begin(self, world: int, launch_ahead: bool) -> None:
        self.replica = Replica(world, launch_ahead=launch_ahead)

    @rule(prompt=PROMPTS, most=st.integers(1, 12), kind=st.sampled_from(KINDS))
    def arrive(self, prompt: tuple[int, ...], most: int, kind: Kind) -> None:
        count = len(self.replica.requests)
        self.replica.submit(f"r{count}", prompt, min(most, LONGEST - len(prompt)), kind)

    @precondition(lambda self: self.replica.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.replica.abort(data.draw(st.sampled_from(self.replica.open)))

    @rule(steps=st.integers(1, 5))
    def turn(self, steps: int) -> None:
        for _ in range(steps):
            self.replica.turn()

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.replica.crash(data.draw(st.integers(0, self.replica.world - 1)))

    def teardown(self) -> None:
        if hasattr(self, "replica"):
            self.replica.finish()


TestLockStep = LockStep.TestCase
TestLockStep.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def churn(seed: int) -> Replica:
    """A replica under 30 things that happen at random, most of them steps, until all is over."""
    chance = random.Random(seed)
    replica = Replica(chance.randint(1, 4), launch_ahead=chance.random() < 0.8)
    for _ in range(30):
        what = chance.random()
        if what < 0.35:
            prompt = tuple(chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 9)))
            kind = chance.choice(KINDS)
            replica.submit(f"r{len(replica.requests)}", prompt, chance.randint(1, LONGEST - len(prompt)), kind)
        elif what < 0.45 and replica.open:
            replica.abort(chance.choice(replica.open))
        elif what < 0.46:
            replica.crash(chance.randrange(replica.world))
        else:
            replica.turn()
    replica.finish()
    return replica


def test_thousands_of_interleavings() -> None:
    """Much faster than the state machine, which finds the shortest of what goes wrong."""
    leased = 0
    for seed in range(2000):
        try:
            leased += any(shape.flags.lease for shape in churn(seed).shapes)
        except Exception as error:
            raise AssertionError(f"churn({seed}): {error}") from error
    assert leased > 500


def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are given away with the last token, while a leased step may still write to them."""
    deliver = Replica._deliver

    def early(self: Replica, event: Event) -> None:
        last = event.token is not None and event.token.finish is not None
        if not self.requests[event.key].ended:
            deliver(self, replace(event, ended=event.ended or last))

    monkeypatch.setattr(Replica, "_deliver", early)


def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is given up while a step with its prompt may still write."""
    monkeypatch.setattr(FakeExecutor, "settle", lambda self: None)


def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seat that is handed on keeps the blocks of who had it before."""
    begin = FakeExecutor.begin

    def kept(self: FakeExecutor, seat: int, blocks: Sequence[int], *, arrived: int) -> None:
        if seat not in self._seats:
            begin(self, seat, blocks, arrived=arrived)

    monkeypatch.setattr(FakeExecutor, "begin", kept)


def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without rows stays out of a step."""
    start = FakeExecutor._start

    def alone(self: FakeExecutor, work: FakeWork) -> FakeWork:
        before = len(self.diary)
        started = start(self, work)
        if not work.rows:
            del self.diary[before:]
        return started

    monkeypatch.setattr(FakeExecutor, "_start", alone)


@pytest.mark.parametrize("fault", [hasty, unsettled, stale, absent])
def test_the_simulation_notices(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what must not be is seen."""
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        list(map(churn, range(300)))


def prompts_with_ends(*after: int) -> list[tuple[int, ...]]:
    """Prompts of three tokens that end by themselves after so many tokens."""
    found: dict[int, tuple[int, ...]] = {}
    for one, two, three in itertools.product(range(VOCABULARY), repeat=3):
        said = alone((one, two, three), 12)
        if said[-1] == EOS:
            found.setdefault(len(said), (one, two, three))
    return [found[count] for count in after]


def test_outputs_that_end_at_different_steps_on_different_ranks() -> None:
    """A rank whose output has ended goes on as an idle one, in the leased step with a row that is for nobody."""
    replica = Replica(3, launch_ahead=True)
    for key, prompt in zip("abc", prompts_with_ends(3, 5, 8), strict=True):
        replica.submit(key, prompt, 12)
    assert {replica.requests[key].rank for key in "abc"} == {0, 1, 2}
    replica.finish()
    assert [len(replica.tokens(key)) for key in "abc"] == [3, 5, 8]
    leased = [shape.active_rows for shape in replica.shapes if shape.flags.consume]
    assert {sum(rows) for rows in leased} == {1, 2, 3}


def test_an_output_that_ends_under_a_lease_keeps_seat_and_blocks_until_that_step_is_over() -> None:
    replica = Replica(1, launch_ahead=True)
    (prompt,) = prompts_with_ends(3)
    replica.submit("a", prompt, 12)
    while len(replica.tokens("a")) < 3:
        replica.turn()
    assert replica.shapes[-1].flags.lease
    assert replica.admission.seats_taken == (1,)
    assert not replica.requests["a"].ended
    replica.turn()
    assert replica.shapes[-1].flags.consume
    assert replica.requests["a"].ended
    assert len(replica.tokens("a")) == 3
    assert replica.admission.seats_taken == (0,)


def test_a_seat_that_is_handed_on_under_the_same_shape_is_no_leased_step() -> None:
    """One output ends by its length and the next request takes its seat and blocks: no number of the shape shows it."""
    replica = Replica(1, launch_ahead=True)
    (prompt,) = prompts_with_ends(12)
    for other in range(SEATS - 1):
        replica.submit(f"other{other}", prompt, 8, "continued")
    for key in ("first", "second"):
        replica.submit(key, prompt, 4, "continued")
    seat = replica.requests["first"].seat
    assert replica.requests["second"].seat is None
    while not replica.requests["first"].ended:
        replica.turn()
    assert replica.requests["second"].seat == seat
    replica.turn()
    before, after = replica.shapes[-2:]
    assert (before.bucket, before.active_rows) == (after.bucket, after.active_rows)
    assert not before.flags.lease, "its last token was known to be one by its length"
    assert not after.flags.consume
    assert after.flags.lease
    replica.finish()


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_step_is_leased_up_to_the_last_place_of_a_block_and_not_beyond(room: int) -> None:
    """Of a sequence whose blocks end `room` tokens behind what the running step writes, though it may say more."""
    running = Running(
        "a", 0, (0, 1), (1,) * 5, Sampling(100, temperature=0.0), seed=0, prefill_only=False, computed=5,
        last=Token(3, 2 * BLOCK - 5 - 1 - room),
    )  # fmt: skip
    row = running.row(BLOCK)
    assert row.room == room
    assert may_lease([[row]], arrivals=False, stopping=False) == (room >= 1)


def test_launch_ahead_changes_no_token_and_is_used() -> None:
    ways = []
    for launch_ahead in (False, True):
        replica = Replica(2, launch_ahead=launch_ahead)
        for index in range(5):
            replica.submit(f"r{index}", (1 + index, 2, 3), 12)
        while replica.turn():
            pass
        ways.append(replica)
    said = [{key: asked.tokens for key, asked in replica.requests.items()} for replica in ways]
    assert said[0] == said[1]
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
