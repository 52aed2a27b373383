from __future__ import annotations

import pytest

from glm52_engine.lifecycle.states import Stage, State, live_probe, ready_probe, startup_probe


def ready() -> State:
    return State().enter("weights").ready()


def test_a_start_reports_its_phase_until_it_is_ready() -> None:
    state = State().enter("reading weights")
    assert (startup_probe(state).status, startup_probe(state).body["phase"]) == (503, "reading weights")
    assert ready_probe(state).body["reason"] == "starting: reading weights"
    assert startup_probe(state.ready()).status == ready_probe(state.ready()).status == 200


def test_a_late_phase_does_not_undo_ready() -> None:
    assert ready().enter("late").stage is Stage.READY


def test_a_drain_is_unready_at_once_and_still_serves_while_others_learn_of_it() -> None:
    state = ready().drain(100.0, window=30, propagation=5)
    assert ready_probe(state).status == 503
    assert startup_probe(state).status == 200
    assert state.admits(104.9)
    assert not state.admits(105.0)
    assert state.why_not(106.0) == "draining"


def test_a_drain_ends_when_nothing_is_in_flight_but_not_before_others_know() -> None:
    state = ready().drain(100.0, window=30, propagation=5)
    assert not state.drained(104.0, in_flight=0)
    assert not state.drained(106.0, in_flight=1)
    assert state.drained(105.0, in_flight=0)
    assert not state.overdue(134.9)
    assert state.overdue(135.0)


def test_a_second_drain_changes_nothing() -> None:
    state = ready().drain(100.0, window=30, propagation=5)
    assert state.drain(120.0, window=30, propagation=5) is state


def test_a_drain_while_starting_waits_for_nobody() -> None:
    state = State().enter("weights").drain(100.0, window=30, propagation=5)
    assert state.drained(100.0, in_flight=0)
    assert state.ready().stage is Stage.DRAINING


@pytest.mark.parametrize(
    ("stuck", "failure", "status", "word"),
    [
        pytest.param(0.0, "", 200, "live", id="idle or busy"),
        pytest.param(59.0, "", 200, "live", id="a long step"),
        pytest.param(61.0, "", 503, "wedged", id="stuck"),
        pytest.param(0.0, "RuntimeError: boom", 503, "crashed", id="a rank failed"),
    ],
)
def test_liveness_is_about_progress(stuck: float, failure: str, status: int, word: str) -> None:
    probe = live_probe(stuck, failure)
    assert (probe.status, probe.body["status"]) == (status, word)
