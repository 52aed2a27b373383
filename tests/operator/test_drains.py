"""Pods that leave: what is told of each, and that it is told once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from glm52_engine.config import Outcome
from glm52_operator.plan.drains import KEPT, KILL_MARGIN, LATE_NEWS, Drain, DrainOutcome, Heard, Phase, advance, askable
from glm52_operator.status.drains import MOST, draining, read_drains, stalled, write_drains
from tests.operator.builders import pod
from tests.operator.ends import BACKING_OFF, NOW, RUNNING, at, crashed, stamp, terminated, told, with_container

POD = "chat-decode-0"


def leaving(state: Any = RUNNING, last: Any = None, *, name: str = POD, asked: int = -10, grace: int = 60) -> Any:
    return with_container(name, state, last, leaves=(asked, grace))


def run(pods: Any = (), previous: Any = (), *, departed: Any = (), heard: Any = None, now: float = 0) -> list[Drain]:
    return advance(previous, pods, departed, heard or {}, at(now))


def test_a_pod_that_leaves_is_followed_with_its_deadline_and_what_it_says() -> None:
    made = leaving()
    (silent,) = run([made])
    assert (silent.phase, silent.in_flight, silent.started, silent.deadline) == (Phase.DRAINING, None, at(-10), at(50))
    (heard,) = run([made], [silent], heard={made["metadata"]["uid"]: Heard(3)})
    assert (heard.phase, heard.in_flight) == (Phase.DRAINING, 3)
    # What was heard last stays when the pod is too busy to answer once.
    (later,) = run([made], [heard])
    assert later.in_flight == 3
    (over,) = run([made], [later], heard={made["metadata"]["uid"]: Heard(0, stopped=True)})
    assert over.phase is Phase.TERMINATING


@pytest.mark.parametrize(
    ("ended", "outcome", "cut_off"),
    [
        pytest.param(terminated(-1, 0, message=told(Outcome.DRAINED)), DrainOutcome.DRAINED, 0, id="drained"),
        pytest.param(
            terminated(-1, 75, message=told(Outcome.DRAIN_TIMED_OUT, in_flight=4)),
            DrainOutcome.TIMED_OUT,
            4,
            id="timed out",
        ),
        pytest.param(terminated(-1, 137), DrainOutcome.KILLED, 0, id="killed"),
        pytest.param(terminated(-1, 137, reason="OOMKilled"), DrainOutcome.KILLED, 0, id="out of memory"),
        pytest.param(crashed(-1, in_flight=2), DrainOutcome.CRASHED, 2, id="crashed"),
        pytest.param(terminated(-1, 0), DrainOutcome.DRAINED, 0, id="told to go while it started"),
    ],
)
def test_how_it_ended_is_read_from_its_last_state_also_when_nobody_saw_it_leave(
    ended: Any, outcome: DrainOutcome, cut_off: int
) -> None:
    made = leaving({"terminated": ended})
    (there,) = run([made])
    assert (there.phase, there.outcome, there.cut_off) == (Phase.TERMINATING, outcome, cut_off)
    for previous in ([], [there], run([leaving()])):
        (gone,) = run([], previous, departed=[made])
        assert (gone.phase, gone.outcome, gone.cut_off, gone.ended) == (Phase.ENDED, outcome, cut_off, NOW)
        assert run([], [gone], departed=[made], now=99) == [gone]


def test_a_pod_whose_end_nobody_saw_is_not_called_drained() -> None:
    (before,) = run([leaving()])
    # For a moment the news of its end may be on their way.
    (going,) = run([], [before])
    assert (going.phase, going.outcome) == (Phase.TERMINATING, None)
    (lost,) = run([], [going], now=LATE_NEWS.total_seconds())
    assert (lost.phase, lost.outcome, lost.ended) == (Phase.ENDED, DrainOutcome.UNKNOWN, NOW)
    (forced,) = run([], [], departed=[leaving()])
    assert forced.outcome is DrainOutcome.UNKNOWN


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(with_container(POD, RUNNING), id="stays"),
        pytest.param(leaving({"waiting": {"reason": "ContainerCreating"}}), id="never began"),
        pytest.param(pod(POD, leaving=True), id="has no node"),
        pytest.param(leaving(BACKING_OFF, crashed(-100)), id="is broken"),
        pytest.param(leaving({"terminated": crashed(-100)}), id="crashed before"),
    ],
)
def test_where_nothing_drains_nothing_is_told(made: Any) -> None:
    if made["metadata"].get("deletionTimestamp"):
        made["metadata"]["deletionTimestamp"] = stamp(50)
        assert run([], [], departed=[made]) == []
    assert run([made]) == []


@pytest.mark.parametrize("state", [RUNNING, {"terminated": terminated(-1, 0)}, BACKING_OFF])
def test_a_pod_that_outlives_its_grace_is_told_with_its_node_until_it_is_gone(state: Any) -> None:
    made = leaving(state, crashed(-100))
    late = 50 + KILL_MARGIN.total_seconds()
    assert all(drain.phase is not Phase.STUCK for drain in run([made], now=late))
    found = run([made], now=late + 1)
    assert [drain.phase for drain in found] == [Phase.STUCK]
    alarm = stalled(found)
    assert alarm is not None
    assert (alarm.holds, alarm.reason) == (True, "StuckTerminating")
    for part in (POD, "node worker", "kubectl describe node worker", "never deletes a pod by force", "--force"):
        assert part in alarm.message
    assert stalled(run([], found, now=late + 2)) is None


def test_an_end_that_is_learnt_late_is_told_after_all() -> None:
    made = leaving({"terminated": terminated(-1, 0, message=told(Outcome.DRAINED))})
    (going,) = run([], run([leaving()]))
    (found,) = run([], [going], departed=[made], now=1)
    assert (found.phase, found.outcome) == (Phase.ENDED, DrainOutcome.DRAINED)
    (lost,) = run([], [going], now=60)
    (found,) = run([], [lost], departed=[made], now=61)
    assert (found.outcome, found.ended) == (DrainOutcome.DRAINED, lost.ended)


def test_a_successor_of_the_same_name_is_another_pod() -> None:
    old = leaving({"terminated": terminated(-1, 0, message=told(Outcome.DRAINED))})
    new = leaving()
    new["metadata"]["uid"] = "successor"
    found = run([new], run([old]), departed=[old])
    assert [(d.uid, d.phase) for d in found] == [("successor", Phase.DRAINING), (old["metadata"]["uid"], Phase.ENDED)]


def test_the_condition_says_who_leaves_how_far_and_until_when() -> None:
    first, second = leaving(), leaving(name="chat-prefill-0")
    none = draining([])
    assert (none.holds, none.reason) == (False, "NoneLeaving")
    found = draining(run([first, second], heard={first["metadata"]["uid"]: Heard(3)}))
    assert (found.holds, found.reason) == (True, "PodsLeaving")
    assert f"2 pods leave: {POD} (3 in flight, until {stamp(50)} at most), chat-prefill-0 (until" in found.message


def test_only_pods_that_run_and_leave_are_asked() -> None:
    ended = leaving({"terminated": terminated(-1, 0)}, name="c")
    made = leaving()
    pods = [made, with_container("b", RUNNING), ended, pod("d", leaving=True)]
    assert askable(pods) == {made["metadata"]["uid"]: "10.0.0.9"}


states = st.sampled_from(
    [RUNNING, {"terminated": terminated(-1, 0)}, {"terminated": terminated(-1, 137)}, {"terminated": crashed(-1)}]
)


sights = st.tuples(st.integers(0, 150), states, st.booleans(), st.integers(-100, 0))
"""Number of the pod, its state, whether it is there, when it was told to go; one that is gone may be seen twice."""

Sight = tuple[int, Any, bool, int]


def looked_at(seen: list[Sight]) -> tuple[list[Any], list[Any]]:
    """Pods that are there and states of pods that are gone; three pods each share a name."""

    def made(number: int, state: Any, asked: int) -> Any:
        pod = leaving(state, name=f"p-{number // 3}", asked=asked)
        pod["metadata"]["uid"] = f"uid-{number}"
        return pod

    here = {number: made(number, state, asked) for number, state, there, asked in seen if there}
    return [*here.values()], [made(number, state, asked) for number, state, there, asked in seen if not there]


KILLED = {"terminated": terminated(-1, 137)}


@given(st.lists(sights, max_size=80), st.lists(sights, max_size=160), st.integers(0, 200))
@example([], [(0, RUNNING, False, 0), (0, KILLED, False, 0)], 0).via("its end came before it was told to go")
@example([], [(0, KILLED, False, -10), (1, RUNNING, False, -10)], 0).via("of one name, the end of one is known")
def test_whatever_is_seen_the_status_is_bounded_repeatable_and_comes_back_from_the_api(
    earlier: list[Sight], seen: list[Sight], now: int
) -> None:
    here, gone = looked_at(seen)
    # Of ends that were told before, and are seen once more, nothing is asked here: the status has long let them go.
    before, _ = looked_at([(number, state, True, asked) for number, state, _, asked in earlier])
    found = run(here, run(before), departed=gone, now=now)
    assert len({drain.uid for drain in found}) == len(found)
    assert sum(drain.phase is Phase.ENDED for drain in found) <= KEPT
    written = write_drains(found)
    assert len(written) <= MOST
    assert read_drains(written) == found[:MOST]
    assert run(here, found, departed=gone, now=now) == found
    # Once ended it stays as it was told, whatever is seen of the pod later.
    ended = {drain.uid: drain for drain in found if drain.phase is Phase.ENDED}
    again = run([], read_drains(written), departed=gone, now=now + 50)
    assert all(ended[drain.uid] == drain for drain in again if drain.uid in ended)


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_last_states_of_a_pod_the_one_with_its_end_counts(order: int) -> None:
    states = [leaving(), leaving({"terminated": terminated(-1, 0)})][::order]
    (told,) = run(departed=states)
    assert told.outcome is DrainOutcome.DRAINED


def test_a_drain_that_is_told_of_has_an_end_also_where_a_nodes_clock_puts_it_before_the_deletion() -> None:
    before = run([leaving()])
    killed = leaving({"terminated": terminated(-20, 137)})
    (there,) = run([killed], before)
    (gone,) = run([], [there], departed=[killed])
    assert [(d.phase, d.outcome) for d in (there, gone)] == [
        (Phase.TERMINATING, DrainOutcome.KILLED),
        (Phase.ENDED, DrainOutcome.KILLED),
    ]


def test_a_pod_that_was_taken_for_gone_and_is_there_has_not_ended() -> None:
    (lost,) = run(departed=[leaving()])
    (there,) = run([leaving()], [lost], now=9)
    assert (there.phase, there.outcome, there.ended) == (Phase.DRAINING, None, None)
