"""The phases of a start: those that overlap, and those that follow each other."""

from __future__ import annotations

import pytest

from glm52_engine.lifecycle.phases import Phase, Phases


class Clock(Phases):
    """With a clock of its own."""

    time = 0.0

    def now(self) -> float:
        return self.time


def test_phases_that_overlap_are_told_as_they_end() -> None:
    told: list[Phase] = []
    phases = Clock(told.append)
    with phases.phase("slow"):
        phases.time = 1.0
        with phases.phase("quick"):
            phases.time = 2.0
        phases.time = 5.0
    assert told == phases.done == [Phase("quick", 1.0, 2.0), Phase("slow", 0.0, 5.0)]


def test_one_that_fails_is_not_told() -> None:
    phases = Clock()
    with pytest.raises(ValueError, match="broken"), phases.phase("reading"):
        raise ValueError("broken")
    assert phases.done == []


def test_phases_that_follow_each_other_end_where_the_next_one_begins() -> None:
    phases = Clock()
    for moment, name in enumerate(("reading", "reading", "touching")):
        phases.time = float(moment)
        phases.enter(name)
    assert phases.done == [Phase("reading", 0.0, 2.0)]
    phases.time = 7.0
    phases.finish()
    phases.finish()
    assert phases.done[1:] == [Phase("touching", 2.0, 7.0)]


def test_times_count_from_the_beginning_of_the_process() -> None:
    phases = Phases()
    phases.note("so far", 0.0)
    # Python and what it has imported by now took longer than nothing.
    assert phases.done[0].ended > 0
