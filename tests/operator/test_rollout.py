"""Which replicas a rollout replaces next, rule by rule."""

from __future__ import annotations

import datetime

import pytest

from glm52_engine.config import Role
from glm52_operator import names
from glm52_operator.plan.rollout import Plan, State, leaders, preview
from glm52_operator.plan.rollout.replicas import ordinal_of
from glm52_operator.status.compute import Observed, compute
from tests.operator.builders import pod, resource, stateful_set, target
from tests.operator.simulated import Revision, SimCluster

NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
SAME = Revision("r1", "a")
OTHER = Revision("r1", "b")
BROKEN = Revision("r1", "b", broken=True)
NEXT = Revision("r2", "c")


def chosen(found: Plan) -> list[tuple[Role, int]]:
    return [(replacement.role, replacement.replica) for replacement in found.replacements]


def test_at_rest_nothing_is_replaced() -> None:
    found = SimCluster.running(2, 3).plan()
    assert found.replacements == ()
    assert [(p.newest, p.wanted, p.outdated) for p in found.progress.values()] == [(2, 2, ()), (3, 3, ())]


def test_one_replica_of_a_role_at_a_time_lowest_first() -> None:
    cluster = SimCluster.running(2, 3)
    cluster.edit(SAME, "decode")
    order: list[tuple[Role, int]] = []
    while not cluster.is_done() or not order:
        order += chosen(cluster.step())
        cluster.turn()
    assert order == [("decode", 0), ("decode", 1), ("decode", 2)]


def test_the_last_one_that_goes_is_named() -> None:
    cluster = SimCluster.running(1, 1)
    cluster.edit(SAME, "decode")
    assert cluster.plan().progress["decode"].absent == "chat-decode-0 is told to go"
    cluster.step()
    progress = cluster.plan().progress
    assert progress["decode"].absent == "chat-decode-0 finishes its requests and goes"
    assert (progress["decode"].outdated, progress["decode"].waits, progress["prefill"].absent) == ((), "", "")


def test_as_many_as_may_be_unavailable_at_a_time() -> None:
    cluster = SimCluster.running(2, 5, max_unavailable=2)
    cluster.edit(SAME, "decode")
    assert chosen(cluster.step()) == [("decode", 0), ("decode", 1)]
    assert chosen(cluster.step()) == []


@pytest.mark.parametrize("what", ["unready", "leaving", "missing"])
def test_a_replica_that_is_absent_for_any_reason_counts(what: str) -> None:
    cluster = SimCluster.running(2, 3)
    cluster.edit(SAME, "decode")
    pods = cluster.sets["decode"].pods
    pods[2].revision = SAME
    pods[2].ready = what != "unready"
    pods[2].leaving = what == "leaving"
    if what == "missing":
        del pods[2]
    found = cluster.plan()
    assert chosen(found) == []
    assert "chat-decode-2" in found.progress["decode"].waits
    assert "maxUnavailable is 1" in found.progress["decode"].waits


def test_what_never_started_goes_at_once_and_first() -> None:
    cluster = SimCluster.running(2, 4)
    cluster.edit(BROKEN, "decode")
    for _ in range(3):
        cluster.step()
        cluster.turn()
    # One pod is stuck in the broken revision, and it protects the other three.
    assert len(cluster.serving("decode")) == 3
    cluster.edit(NEXT, "decode")
    # The one that is stuck costs nothing; its successor is waited for before another one goes.
    assert chosen(cluster.step()) == [("decode", 0)]


def test_taking_a_broken_edit_back_heals_by_itself() -> None:
    cluster = SimCluster.running(2, 3)
    before = cluster.sets["decode"].revision
    cluster.edit(BROKEN)
    for _ in range(3):
        cluster.step()
        cluster.turn()
    cluster.edit(before)
    replaced = chosen(cluster.step())
    assert all(state is not State.SERVING for role, i in replaced for state in [list(cluster.replicas(role))[i][0]])
    cluster.run()


def test_many_that_falter_at_once_are_not_replaced_at_once() -> None:
    cluster = SimCluster.running(2, 4)
    cluster.edit(SAME, "decode")
    for one in cluster.sets["decode"].pods.values():
        one.ready = False
    assert chosen(cluster.step()) == [("decode", 0)]
    assert chosen(cluster.step()) == []


def test_all_hosts_of_a_replica_go_together() -> None:
    cluster = SimCluster.running(2, 3, hosts=4)
    cluster.edit(SAME, "decode")
    (replacement,) = cluster.step().replacements
    assert [host.name for host in replacement.hosts] == [f"chat-decode-{n}" for n in range(4)]
    assert len(cluster.serving("decode")) == 2


def test_hosts_that_a_dead_operator_left_behind_follow_without_waiting() -> None:
    cluster = SimCluster.running(2, 3, hosts=4)
    cluster.edit(SAME, "decode")
    (replacement,) = cluster.plan().replacements
    cluster.carry_out(replacement, hosts=2)
    cluster.turn()
    (rest,) = cluster.plan().replacements
    assert [host.name for host in rest.hosts] == ["chat-decode-2", "chat-decode-3"]


def test_paused_replaces_nothing_and_says_so() -> None:
    cluster = SimCluster.running(2, 3, paused=True)
    cluster.edit(OTHER)
    found = cluster.plan()
    assert found.replacements == ()
    assert found.progress["decode"].newest == 0
    assert found.progress["decode"].waits == "rollout.paused is true"


def test_both_roles_advance_together_when_their_kv_changes() -> None:
    cluster = SimCluster.running(2, 4)
    cluster.edit(OTHER)
    seen = []
    while not cluster.is_done():
        cluster.step()
        cluster.turn()
        seen.append((cluster.serving("prefill").count("b"), cluster.serving("decode").count("b")))
        assert cluster.pairs()
    assert seen == [(1, 1), (1, 2), (2, 3), (2, 4)]


def test_a_new_kv_that_one_role_cannot_start_stops_the_other_early() -> None:
    cluster = SimCluster.running(2, 8)
    cluster.edit(OTHER)
    cluster.sets["prefill"].revision = BROKEN
    for _ in range(10):
        cluster.step()
        cluster.turn()
    assert cluster.serving("prefill") == ["a"]
    # One of two prefill replicas is lost to the new KV, and no more than that half of decode.
    assert cluster.serving("decode").count("a") == 4
    waits = cluster.plan().progress["decode"].waits
    assert "chat-prefill-0 has not been ready since 2026-01-01T00:00:00Z" in waits
    assert "cannot exchange KV" in waits


def test_a_single_prefill_goes_when_half_of_decode_can_read_its_successor() -> None:
    cluster = SimCluster.running(1, 4)
    cluster.edit(OTHER)
    steps, gaps = [], 0
    while not cluster.is_done():
        steps.append(chosen(cluster.step()))
        gaps += not cluster.pairs()
        cluster.turn()
    assert steps[:3] == [[("decode", 0)], [("decode", 1)], [("prefill", 0)]]
    assert gaps == 1


def test_two_single_replicas_go_at_the_same_time() -> None:
    cluster = SimCluster.running(1, 1)
    cluster.edit(OTHER)
    assert chosen(cluster.step()) == [("prefill", 0), ("decode", 0)]


def test_a_single_replica_stays_while_its_counterpart_cannot_start() -> None:
    cluster = SimCluster.running(1, 3)
    cluster.edit(OTHER)
    cluster.sets["decode"].revision = BROKEN
    for _ in range(5):
        cluster.step()
        cluster.turn()
    assert cluster.pairs() == {"a"}


@pytest.mark.parametrize("decode", [1, 2])
def test_the_last_pair_stays_while_the_other_role_has_not_got_its_change(decode: int) -> None:
    cluster = SimCluster.running(1, decode)
    # The API server refused the other StatefulSet's new template.
    cluster.edit(OTHER, "prefill")
    for _ in range(3):
        assert chosen(cluster.step()) == []
        cluster.turn()
    assert "not of a revision whose KV the new prefill replicas understand" in cluster.plan().progress["prefill"].waits


def test_scaling_down_in_the_middle_leaves_the_newest() -> None:
    cluster = SimCluster.running(2, 4)
    cluster.edit(OTHER)
    for _ in range(2):
        cluster.step()
        cluster.turn()
    cluster.sets["decode"].replicas = 2
    cluster.turn()
    assert cluster.serving("decode") == ["b", "b"]
    assert cluster.pairs() == {"b"}
    cluster.run()


def test_nothing_is_decided_before_the_controller_has_seen_the_last_apply() -> None:
    cluster = SimCluster.running(2, 2)
    cluster.edit(SAME)
    for each in cluster.sets.values():
        each.seen = False
    assert cluster.plan().replacements == ()


@pytest.mark.parametrize(
    ("pod", "ordinal"),
    [
        ("chat-decode-0", 0),
        ("chat-decode-12", 12),
        ("chat-decode-", None),
        ("chat-decode", None),
        ("chat-decode-x", None),
        ("chat-decode-1-debug", None),
        ("chat-decode-²", None),
        ("other-decode-1", None),
    ],
)
def test_only_pods_of_the_set_have_a_number(pod: str, ordinal: int | None) -> None:
    assert ordinal_of(pod, "chat-decode") == ordinal


def test_a_preview_plays_the_planner_through() -> None:
    chosen = target(prefill={"replicas": 4}, decode={"replicas": 8}, rollout={"maxUnavailable": 2})
    steps = [[(r.role, r.replica) for r in step] for step in preview(chosen, new_kv=True)]
    assert set(steps[0]) == {("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)}
    assert len(steps) == 4
    assert sorted(one for step in steps for one in step) == sorted(
        [*(("prefill", n) for n in range(4)), *(("decode", n) for n in range(8))]
    )
    # With KV that both revisions read, decode has not to wait for prefill.
    assert len(list(preview(chosen, new_kv=False))) == 4
    assert list(preview(target(prefill={"replicas": 0}, decode={"replicas": 0}), new_kv=True)) == []


def test_leaders_are_one_pod_of_each_replica() -> None:
    several = target(decode={"replicas": 3, "hostsPerReplica": 8})
    assert leaders(several, "decode").endswith(",apps.kubernetes.io/pod-index in (0,8,16)")
    assert leaders(several, "prefill") == names.selector_text("chat", "prefill")


def test_the_status_counts_replicas_and_not_their_hosts() -> None:
    several = target(decode={"replicas": 2, "hostsPerReplica": 2})
    pods = [pod(f"chat-decode-{n}", ready=n != 3, containerStatuses=[{"name": "e", "started": True}]) for n in range(4)]
    seen = Observed(workloads={"decode": stateful_set(4, ready=3, updated=4)}, pods={"decode": pods})
    status = compute(resource(), several, seen, None, now=NOW)["decode"]
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 1, 2)
    assert status["ready"] == "1/2"
    assert status["selector"].endswith("pod-index in (0,2)")
