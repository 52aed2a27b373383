"""Replicas of several hosts whose pods fall or go: they do so together, and one of them is to blame at most."""

from __future__ import annotations

from typing import Any

import pytest

from glm52_engine.config import EXIT_CODES, Outcome
from glm52_operator.plan.endings import endings
from glm52_operator.plan.escalation import Crash, CrashPolicy, Series
from glm52_operator.plan.restarts import Action, Members, Restart, actions
from glm52_operator.status.crashes import keep_evidence
from tests.operator.builders import pod
from tests.operator.conftest import FakeClock
from tests.operator.ends import NOW, at, crashed, stamp, terminated, told, with_container
from tests.operator.test_ends import GRACE, RULES
from tests.operator.test_rollout_steps import gone, newer
from tests.operator.world import new_world

LEADER, HOST, THIRD = (f"chat-decode-{number}" for number in range(3))


def running(name: str, born: float, since: float, *, ready: bool = False, leaves: float | None = None) -> Any:
    """A pod made and its container started that many seconds after NOW; told to go at `leaves`."""
    state = {"running": {"startedAt": stamp(since)}}
    made = with_container(name, state, ready=ready, leaves=None if leaves is None else (leaves, 60))
    made["metadata"] |= {"creationTimestamp": stamp(born), "resourceVersion": "5"}
    return made


def decide(*pods: Any, crashes: tuple[float, ...] = (), policy: CrashPolicy = RULES) -> list[Action]:
    series = [Series(LEADER, "s", tuple(Crash(f"c{s}", HOST, at(s)) for s in crashes))] if crashes else []
    return actions(series, {LEADER: Members(len(pods), pods, GRACE)}, policy, NOW)


def restarted(*pods: Any, crashes: tuple[float, ...] = ()) -> list[tuple[str, int | None]]:
    chosen = decide(*pods, crashes=crashes)
    assert all(isinstance(each, Restart) for each in chosen)
    return [(each.pod, each.grace) for each in chosen if isinstance(each, Restart)]


def test_a_host_that_is_told_to_go_takes_the_others_along_and_they_drain() -> None:
    going = running(HOST, -500, -500, ready=True, leaves=-5)
    others = [running(name, -500, -500, ready=True) for name in (LEADER, THIRD)]
    assert restarted(others[0], going, others[1]) == [(LEADER, None), (THIRD, None)]
    # The API server's times are whole seconds.
    assert restarted(running(LEADER, -5, -5), going) == [(LEADER, None)]
    # What was made since is its successor's neighbour already.
    assert restarted(running(LEADER, -3, -3), going) == []
    # And alone a pod is no replica of several.
    assert decide(running(LEADER, -500, -500, leaves=-5)) == []


def test_a_replica_that_crashed_is_not_given_the_time_of_a_drain() -> None:
    """The leader ended at once and was started again in its place; the other host is frozen and will not hear TERM."""
    leader, frozen = running(LEADER, -500, -4), running(HOST, -500, -500)
    assert restarted(leader, frozen, crashes=(-5,)) == [(LEADER, GRACE), (HOST, GRACE)]
    going = running(LEADER, -500, -4, leaves=-2)
    assert restarted(going, frozen, crashes=(-5,)) == [(HOST, GRACE)]


def test_a_crash_that_is_over_cuts_no_drain_short() -> None:
    """All hosts have run since; now one is told to go, and its leader, which drains, is not ready any more."""
    leader, host = running(LEADER, -500, -90), running(HOST, -500, -90, ready=True, leaves=-5)
    assert restarted(leader, host, crashes=(-100,)) == [(LEADER, None)]


def lost(seconds: float, name: str, **more: Any) -> Any:
    return with_container(name, {"terminated": crashed(seconds, "rank host gone", consequence=True, **more)})


def counted(*pods: Any) -> list[Series]:
    crashes = [Crash(e.id, e.pod, e.time) for each in pods for e in endings(each) if e.is_crash]
    return [Series(LEADER, "s", tuple(sorted(crashes, key=lambda crash: crash.time)))]


def evidence(previous: list[dict[str, Any]], *pods: Any) -> list[dict[str, Any]]:
    return keep_evidence(previous, [e for each in pods for e in endings(each)], counted(*pods))


def shown(entries: list[dict[str, Any]]) -> list[tuple[str, str, Any]]:
    return [(entry["pod"], entry["reason"], entry.get("rank")) for entry in entries]


def test_of_hosts_that_fall_together_the_one_to_blame_is_told() -> None:
    killed = with_container(HOST, {"terminated": terminated(-10, 137)})
    leader, third = lost(-9, LEADER, rank=1), lost(-8, THIRD)
    # They are seen in any order, and looked at again and again.
    alone = evidence([], third)
    assert shown(alone) == [(THIRD, "HostLost", None)]
    both = evidence(alone, third, leader)
    assert shown(both) == [(LEADER, "HostLost", 1)]
    known = evidence(both, third, leader, killed)
    assert shown(known) == [(HOST, "Killed", 1)]
    assert evidence(known, killed, leader, third) == known
    # Also when what they show counts no more.
    assert keep_evidence(known, [e for each in (leader, third, killed) for e in endings(each)]) == known


def test_a_host_that_nobody_heard_of_again_is_told_by_its_leader() -> None:
    leader = lost(-9, LEADER, rank=1)
    (entry,) = evidence([], leader, lost(-8, THIRD))
    assert (entry["pod"], entry["reason"], entry["exitCode"], entry["rank"]) == (LEADER, "HostLost", 70, 1)
    assert "rank host gone" in entry["message"]


def test_crashes_of_one_replica_that_are_far_apart_are_told_one_by_one() -> None:
    assert shown(evidence([], lost(-9, LEADER), with_container(HOST, {"terminated": terminated(-300, 137)}))) == [
        (LEADER, "HostLost", None),
        (HOST, "Killed", None),
    ]


@pytest.mark.parametrize("outcome", [Outcome.DRAINED, Outcome.DRAIN_TIMED_OUT])
def test_a_drain_for_the_sake_of_another_host_is_no_crash(outcome: Outcome) -> None:
    def ends(**more: Any) -> list[bool]:
        ended = terminated(-9, EXIT_CODES[outcome], message=told(outcome, **more))
        return [e.is_crash for e in endings(with_container(LEADER, {"terminated": ended}))]

    assert ends(consequence=True) == [False]
    assert ends() == [True]


def test_a_pod_that_says_nothing_of_its_container_is_no_sign_of_a_drain() -> None:
    bare = pod(HOST)
    bare["metadata"] |= {"creationTimestamp": stamp(-500)}
    assert restarted(running(LEADER, -500, -4), bare, crashes=(-5,)) == [(LEADER, GRACE), (HOST, GRACE)]


@pytest.mark.parametrize("room", [True, False])
async def test_one_host_of_a_replica_is_evicted_and_the_others_go_with_it(clock: FakeClock, room: bool) -> None:
    world = new_world(clock)
    world.edit(decode={"replicas": 2, "hostsPerReplica": 2})
    await world.run()
    world.serve()
    await world.run()
    world.edit(decode={"replicas": 2, "hostsPerReplica": 2, "maxNumSeqs": 3})
    await world.run()
    newer(world, "chat-decode")
    if not room:
        world.api.refuse = lambda verb, kind, name: (429, "no room") if name.endswith("/eviction") else None
    await world.run()
    evicted = [("create", f"{LEADER}/eviction")]
    assert gone(world) == ([*evicted, ("delete", HOST)] if room else evicted)


def test_of_two_crashes_in_one_second_the_later_one_is_the_last() -> None:
    """Ids are a runtime's and say nothing; whichever of the two is the greater."""
    first, second = (
        with_container(THIRD, {"terminated": crashed(-10, f"crash {n}") | {"containerID": f"containerd://{n}"}})
        for n in (1, 2)
    )
    for before, after in ((first, second), (second, first)):
        known = keep_evidence(keep_evidence([], endings(before)), endings(after))
        assert [entry["message"] for entry in known] == [e.message for each in (after, before) for e in endings(each)]
        assert keep_evidence(known, endings(after)) == known
