"""When a silent pod is asked, and when it is frozen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.route.pulse import ANSWER_SECONDS, FROZEN_SECONDS, QUIET_SECONDS, UNANSWERED, Pulse


def test_a_pod_is_asked_when_it_is_silent_and_then_now_and_again() -> None:
    pulse = Pulse.begin(100)
    assert not pulse.is_due(100 + QUIET_SECONDS - 1)
    assert pulse.is_due(100 + QUIET_SECONDS)
    asked = pulse.ask(100 + QUIET_SECONDS)
    assert not asked.is_due(100 + QUIET_SECONDS + 1)
    assert asked.silent().is_due(100 + 2 * QUIET_SECONDS)
    assert not asked.answered(103 + QUIET_SECONDS).is_due(101 + 2 * QUIET_SECONDS)


def test_it_is_frozen_when_it_was_asked_often_enough_and_long_enough_ago() -> None:
    pulse = Pulse.begin(0)
    for _ in range(UNANSWERED):
        # The router may have been stopped itself: then only time went by.
        assert not pulse.is_frozen(10 * FROZEN_SECONDS)
        pulse = pulse.silent()
    assert not pulse.is_frozen(FROZEN_SECONDS - 1)
    assert pulse.is_frozen(FROZEN_SECONDS)
    assert not pulse.answered(FROZEN_SECONDS - 1).is_frozen(10 * FROZEN_SECONDS)


@given(st.lists(st.tuples(st.floats(0, 3 * FROZEN_SECONDS), st.sampled_from(["answered", "silent", "look"]))))
def test_whoever_answers_within_the_time_is_never_frozen(steps: list[tuple[float, str]]) -> None:
    now = heard = 0.0
    pulse = Pulse.begin(now)
    for seconds, what in steps:
        now += seconds
        if what == "answered":
            pulse, heard = pulse.answered(now), now
        elif what == "silent":
            pulse = pulse.silent()
        assert not pulse.is_frozen(now) or now - heard >= FROZEN_SECONDS


def test_a_frozen_pod_is_found_in_bounded_time() -> None:
    now, pulse = 0.0, Pulse.begin(0)
    asking: float | None = None
    while not pulse.is_frozen(now):
        now += 1
        if asking is not None and now - asking >= ANSWER_SECONDS:
            pulse, asking = pulse.silent(), None
        if asking is None and pulse.is_due(now):
            pulse, asking = pulse.ask(now), now
    assert now <= FROZEN_SECONDS + 2 * ANSWER_SECONDS
