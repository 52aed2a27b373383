"""Who may act, by what a Lease says: two processes never both conclude that it is theirs."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from glm52_operator.plan.election import CLOCKS_DIFFER_SECONDS, Candidate, Record, Timing, held, read, released

NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
TIMING = Timing()


def record(holder: str, ago: float = 0.0) -> Record:
    before = Record(holder=holder)
    return read({"spec": held(holder, before, TIMING, NOW - datetime.timedelta(seconds=ago))})


def test_what_is_written_is_read_back() -> None:
    spec = held("a", Record(), TIMING, NOW)
    assert read({"spec": spec}) == Record("a", 15.0, NOW, spec["acquireTime"], 1)


def test_a_renewal_keeps_the_time_of_acquisition_and_counts_no_transition() -> None:
    first = read({"spec": held("a", Record(), TIMING, NOW)})
    again = read({"spec": held("a", first, TIMING, NOW + datetime.timedelta(seconds=4))})
    assert (again.acquired, again.transitions) == (first.acquired, first.transitions)
    other = read({"spec": held("b", again, TIMING, NOW)})
    assert (other.holder, other.transitions) == ("b", 2)


def test_a_lease_that_was_given_back_is_free_at_once() -> None:
    free = read({"spec": released(record("a"), NOW)})
    assert Candidate("b").wait(free, "1", 0.0, NOW) == 0.0


def test_ones_own_lease_is_taken_at_once_after_a_restart() -> None:
    assert Candidate("a").wait(record("a"), "1", 0.0, NOW) == 0.0


def test_somebody_elses_is_waited_for_since_it_was_last_seen_to_change() -> None:
    candidate = Candidate("b")
    assert candidate.wait(record("a"), "1", 100.0, NOW) == 15.0
    assert candidate.wait(record("a"), "1", 110.0, NOW) == 5.0
    assert candidate.wait(record("a"), "2", 114.0, NOW) == 15.0
    assert candidate.wait(record("a"), "2", 129.0, NOW) == 0.0


def test_a_clock_that_differs_does_not_shorten_the_wait() -> None:
    """The holder's clock is behind ours by less than clocks may differ."""
    seen = record("a", ago=TIMING.duration + CLOCKS_DIFFER_SECONDS - 1)
    assert Candidate("b").wait(seen, "1", 0.0, NOW) == 15.0


def test_what_ran_out_long_ago_is_not_waited_for() -> None:
    seen = record("a", ago=TIMING.duration + CLOCKS_DIFFER_SECONDS + 1)
    assert Candidate("b").wait(seen, "1", 0.0, NOW) == 0.0


def test_nonsense_in_the_lease_is_no_holder_or_is_waited_for() -> None:
    assert Candidate("b").wait(read({}), "1", 0.0, NOW) == 0.0
    assert Candidate("b").wait(read({"spec": None}), "1", 0.0, NOW) == 0.0
    odd = read({"spec": {"holderIdentity": "a", "leaseDurationSeconds": 7, "renewTime": "yesterday"}})
    assert Candidate("b").wait(odd, "1", 0.0, NOW) == 7.0


@dataclass
class Actor:
    """A process with a clock of its own; it acts while its last renewal is younger than the deadline."""

    candidate: Candidate
    skew: float
    renewed: float | None = None
    seen: Any = field(default=None)

    def acts(self, now: float) -> bool:
        return self.renewed is not None and now - self.renewed < TIMING.deadline


@given(
    skews=st.lists(st.floats(-CLOCKS_DIFFER_SECONDS / 2, CLOCKS_DIFFER_SECONDS / 2), min_size=3, max_size=3),
    steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["look", "write", "release"]), st.floats(0, 9))),
)
def test_never_two_at_once(skews: list[float], steps: list[tuple[int, str, float]]) -> None:
    """Reads and writes of three processes in any order, with any pause between a read and the write after it."""
    actors = [Actor(Candidate(f"p{n}"), skew) for n, skew in enumerate(skews)]
    now, version, stored = 1000.0, 1, Record()
    for number, what, pause in steps:
        now += pause
        actor = actors[number]
        wall = NOW + datetime.timedelta(seconds=now + actor.skew)
        if what == "look":
            actor.seen = (version, stored)
        elif actor.seen is None or actor.seen[0] != version:
            # Refused with a conflict: the process looks again.
            actor.seen = (version, stored)
            if stored.holder != actor.candidate.me:
                actor.renewed = None
        elif what == "write" and actor.candidate.wait(stored, str(version), now, wall) == 0:
            stored, version = read({"spec": held(actor.candidate.me, stored, TIMING, wall)}), version + 1
            actor.seen, actor.renewed = (version, stored), now
        elif what == "release" and stored.holder == actor.candidate.me and actor.acts(now):
            stored, version = read({"spec": released(stored, wall)}), version + 1
            actor.seen, actor.renewed = (version, stored), None
        assert sum(each.acts(now) for each in actors) <= 1
