"""Which steps of a status become events, and how repeats join."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_operator.plan.events import (
    BURST,
    NOTE_LIMIT,
    OBJECTS,
    REASONS,
    REFILL_SECONDS,
    SERIES,
    Aggregator,
    Notice,
)
from glm52_operator.status.notices import transition
from tests.operator.builders import UID, resource

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC)
GOOD = {"ConfigValid": "Valid", **dict.fromkeys(("PrefillReady", "DecodeReady", "RouterReady"), "AllReady")}
SERVING = {**GOOD, "Ready": "Serving"}


def status(
    *, decode: int = 1, false: dict[str, tuple[str, str]] | None = None, true: dict[str, str] = SERVING
) -> dict[str, Any]:
    said = {kind: ("True", reason, f"{kind} holds.") for kind, reason in true.items()}
    said |= {kind: ("False", *rest) for kind, rest in (false or {}).items()}
    conditions = [{"type": k, "status": s, "reason": r, "message": m} for k, (s, r, m) in said.items()]
    return {"conditions": conditions, "prefill": {"ready": "1/1"}, "decode": {"ready": f"0/{decode}"}}


def starting(decode: int = 1) -> dict[str, Any]:
    why = ("Starting", "0/1 decode replicas ready. Pods are starting.")
    return status(decode=decode, false={"DecodeReady": why, "Ready": why})


def reasons(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    return [(notice.type, notice.reason) for notice in transition(before, after)]


def broken(reason: str, message: str = "pod chat-decode-0, container engine: no.", ready: int = 0) -> dict[str, Any]:
    why = (reason, f"{ready}/2 decode replicas ready. {message}")
    waits = (reason, f"Waits for this to be solved: {why[1]}")
    return status(decode=2, false={"DecodeReady": why, "Progressing": waits, "Ready": why})


def test_a_new_deployment_that_starts_has_nothing_to_tell_until_it_serves() -> None:
    assert reasons({}, starting()) == []
    assert reasons(starting(), status()) == [("Normal", "Ready")]


def test_an_unchanged_state_is_never_told() -> None:
    for state in (status(), starting(), broken("ConfigRefused")):
        assert transition(state, state) == []


def test_counts_that_change_are_no_news() -> None:
    assert transition(broken("Crashed"), broken("Crashed", ready=1)) == []


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "ConfigRefused", "Forbidden", "NameTaken", "Crashed"])
def test_trouble_is_told_once_with_its_reason_and_without_counts(reason: str) -> None:
    (problem, fell) = transition(status(decode=2), broken(reason))
    assert (problem.type, problem.reason) == ("Warning", reason)
    assert problem.note == "pod chat-decode-0, container engine: no."
    assert (fell.type, fell.reason) == ("Warning", "NotReady")
    assert fell.note.startswith(f"{reason}: 0/2 decode replicas ready.")


def test_one_refused_object_that_every_part_needs_is_one_event() -> None:
    parts = {
        "PrefillReady": ("Forbidden", "0/1 prefill replicas ready. cannot patch Secret chat-internal"),
        "DecodeReady": ("Forbidden", "0/1 decode replicas ready. cannot patch Secret chat-internal"),
        "RouterReady": ("Forbidden", "0/1 routers ready. cannot patch Secret chat-internal"),
        "Progressing": ("Forbidden", "cannot patch Secret chat-internal"),
    }
    assert reasons(starting(), status(false={**parts, "Ready": parts["PrefillReady"]})) == [("Warning", "Forbidden")]


def test_a_refused_budget_shows_in_progressing_alone() -> None:
    refused = status(false={"Progressing": ("Forbidden", "cannot patch PodDisruptionBudget chat-decode")})
    assert reasons(status(), refused) == [("Warning", "Forbidden")]


def test_a_refused_specification_and_its_cure() -> None:
    said = ("InvalidSpec", "spec.decode.warp: unknown field.")
    bad = status(false={"ConfigValid": said, "Progressing": said, "Ready": said})
    assert reasons(status(), bad) == [("Warning", "InvalidSpec"), ("Warning", "NotReady")]
    assert reasons({}, bad) == [("Warning", "InvalidSpec")]
    assert reasons(bad, status()) == [("Normal", "ConfigValid"), ("Normal", "Ready")]


def test_scaling_tells_from_what_to_what_and_stands_for_the_starting_pods() -> None:
    (notice,) = transition(status(), starting(decode=3))
    assert notice == Notice("Normal", "Scaled", "Scale", "decode: scaled from 1 to 3 replicas.")


def test_a_rollout_is_no_alarm() -> None:
    assert reasons(status(), starting()) == [("Normal", "NotReady")]


def later(seconds: float) -> datetime.datetime:
    return NOW + datetime.timedelta(seconds=seconds)


def test_a_repeat_changes_the_series_and_nothing_else() -> None:
    told, notice = Aggregator("pod-1"), Notice("Warning", "Crashed", "Reconcile", "it crashed")
    first, second = told.event(resource(), notice, NOW), told.event(resource(), notice, later(60))
    assert first is not None
    assert second is not None
    assert "series" not in first
    assert second == {**first, "series": {"count": 2, "lastObservedTime": "2026-01-02T03:05:05.678901Z"}}
    assert first["eventTime"] == "2026-01-02T03:04:05.678901Z"
    assert first["regarding"]["uid"] == UID
    other = told.event(resource(), Notice("Warning", "Crashed", "Reconcile", "it crashed again"), later(60))
    assert other is not None
    assert other["metadata"]["name"] != first["metadata"]["name"]


def test_a_new_process_begins_another_event() -> None:
    notice = Notice("Normal", "Ready", "Reconcile", "")
    first, second = (Aggregator("p").event(resource(), notice, later(n)) for n in range(2))
    assert first is not None
    assert second is not None
    # The API server refuses another eventTime under the same name.
    assert first["metadata"]["name"] != second["metadata"]["name"]


def test_what_the_limit_holds_back_is_counted_in_the_next_write() -> None:
    told, notice = Aggregator("p"), Notice("Warning", "Crashed", "Reconcile", "")
    written = [told.event(resource(), notice, NOW) for _ in range(BURST + 30)]
    assert sum(event is not None for event in written) == BURST
    # Another deployment has its own.
    assert told.event(resource(uid="other"), notice, NOW) is not None
    event = told.event(resource(), notice, later(REFILL_SECONDS))
    assert event is not None
    assert event["series"]["count"] == BURST + 31
    assert told.event(resource(), notice, later(REFILL_SECONDS)) is None
    # A clock that was set back neither gives nor takes.
    assert told.event(resource(), notice, later(-3600)) is None
    assert told.event(resource(), notice, later(-3600 + REFILL_SECONDS)) is not None


def test_many_events_of_one_reason_hold_back_none_of_another() -> None:
    told = Aggregator("p")
    rollouts = [told.event(resource(), Notice("Normal", "Drained", "Drain", f"pod {n}"), NOW) for n in range(BURST + 1)]
    assert rollouts[-1] is None
    assert told.event(resource(), Notice("Warning", "ImagePullBackOff", "Reconcile", "no such image"), NOW) is not None


def test_memory_is_bounded() -> None:
    told = Aggregator("p")
    for number in range(OBJECTS + 10):
        told.event(resource(uid=f"u{number}"), Notice("Normal", "Ready", "Reconcile", ""), NOW)
    for number in range(max(SERIES, REASONS) + 10):
        told.event(resource(uid="u9999"), Notice("Normal", f"R{number}", "Reconcile", ""), later(3600.0 * number))
    assert len(told._tellers) == OBJECTS
    assert len(told._tellers["u9999"].series) == SERIES
    assert len(told._tellers["u9999"].budgets) == REASONS
    told.forget("u9999")
    assert "u9999" not in told._tellers


@given(st.text(max_size=2 * NOTE_LIMIT))
def test_a_note_fits_the_api(note: str) -> None:
    event = Aggregator("p").event(resource(), Notice("Normal", "Ready", "Reconcile", note), NOW)
    assert event is not None
    assert len(event["note"].encode()) <= NOTE_LIMIT


@pytest.mark.parametrize("reason", ["Paused", "Suspended"])
def test_what_somebody_wants_so_is_no_warning(reason: str) -> None:
    assert reasons(status(decode=2), broken(reason)) == [("Normal", "NotReady")]
