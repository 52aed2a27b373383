"""What befalls a deployment, under constant load: only requests that ran on that replica fail, in a way that a client
understands, the status says what happened, and the replica comes back without a hand."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator

import pytest

from e2e.busy import NAME, blamed_on
from e2e.cluster import Cluster, tour
from e2e.cluster.progress import Progress
from e2e.ctl import glm52ctl
from e2e.deployed import READY_SECONDS, Deployed
from e2e.faults import fill_memory, send_signal, silent_kubelet
from e2e.kube import Object, until
from e2e.traffic import Traffic, Window

pytestmark = [pytest.mark.cluster, pytest.mark.disruptive, pytest.mark.timeout(READY_SECONDS)]

BACK_SECONDS = 240
"""Until a replica that was killed serves again: its start, and what else the machine does."""
HANGING_SECONDS = 300
"""The same of one that hangs: three liveness probes of 10 s, and the time to end, before that."""
DECODE, OTHER_DECODE, PREFILL = f"{NAME}-decode-0", f"{NAME}-decode-1", f"{NAME}-prefill-0"


@pytest.fixture(scope="module")
def traffic(busy_url: str) -> Iterator[Traffic]:
    with Traffic(busy_url, clients=8, max_tokens=48, rate=4) as traffic:
        traffic.wait_for_more(12)
        yield traffic


@pytest.fixture
def window(traffic: Traffic, request: pytest.FixtureRequest) -> Traffic:
    traffic.wait_for_more(4)
    traffic.mark(request.node.name)
    return traffic


def last_window(traffic: Traffic) -> Window:
    """The traffic of this test, once everything that it began has ended."""
    traffic.wait_for_more(traffic.clients * 2, timeout=HANGING_SECONDS)
    found = traffic.windows()[-1]
    print(found)
    return found


def new_crash(busy: Deployed, name: str, known: set[str], timeout: float) -> Object:
    """The entry of status.crashes about that pod that was not there before."""

    def find() -> Object | None:
        entries = busy.status().get("crashes", [])
        return next((c for c in entries if c["pod"] == name and c["id"] not in known), None)

    found = until(f"a crash of {name} is told", find, timeout=timeout, last=lambda: busy.status().get("crashes"))
    assert found is not None
    return found


def crash_ids(busy: Deployed) -> set[str]:
    return {crash["id"] for crash in busy.status().get("crashes", [])}


def restarts(pod: Object) -> int:
    return sum(int(c["restartCount"]) for c in pod["status"]["containerStatuses"])


@pytest.mark.runbook("A replica crashed")
def test_an_engine_that_is_killed(busy: Deployed, cluster: Cluster, window: Traffic) -> None:
    victim, known = busy.pod(DECODE), crash_ids(busy)
    send_signal(cluster, victim, "KILL")
    busy.wait_condition("DecodeReady", status="False")
    crash = new_crash(busy, DECODE, known, BACK_SECONDS)
    assert (crash["reason"], crash["exitCode"]) == ("Killed", 137)
    assert "SIGKILL" in crash["message"]
    assert crash["node"] == victim["spec"]["nodeName"]
    busy.wait_told("Killed", DECODE)
    busy.wait(BACK_SECONDS)
    after = busy.pod(DECODE)
    assert after["metadata"]["uid"] == victim["metadata"]["uid"]
    assert restarts(after) == restarts(victim) + 1
    blamed_on(busy, victim, last_window(window).failed)


@pytest.mark.runbook("A replica crashed")
def test_an_engine_that_runs_out_of_memory(busy: Deployed, window: Traffic) -> None:
    victim, known = busy.pod(PREFILL), crash_ids(busy)
    fill_memory(busy.kube, PREFILL)
    crash = new_crash(busy, PREFILL, known, BACK_SECONDS)
    assert (crash["reason"], crash["exitCode"]) == ("OOMKilled", 137)
    assert "memory limit" in crash["message"]
    busy.wait_told("OOMKilled", PREFILL)
    busy.wait(BACK_SECONDS)
    blamed_on(busy, victim, last_window(window).failed)


def test_an_engine_that_hangs(busy: Deployed, cluster: Cluster, window: Traffic) -> None:
    """Stopped, it neither serves nor ends: its liveness probe is what finds it."""
    victim, known = busy.pod(OTHER_DECODE), crash_ids(busy)
    send_signal(cluster, victim, "STOP")
    busy.wait_condition("DecodeReady", status="False")
    crash = new_crash(busy, OTHER_DECODE, known, HANGING_SECONDS)
    assert (crash["reason"], crash["exitCode"]) == ("Killed", 137)
    busy.wait_told("Killed", OTHER_DECODE)
    busy.wait(BACK_SECONDS)
    blamed_on(busy, victim, last_window(window).failed)


@pytest.mark.runbook("Stop a pod by force")
def test_a_pod_that_is_deleted_by_force(busy: Deployed, window: Traffic) -> None:
    victim, known = busy.pod(DECODE), crash_ids(busy)
    busy.kube("delete", "pod", DECODE, "--grace-period=0", "--force")
    assert busy.drained(victim["metadata"]["uid"])["outcome"] in ("Unknown", "Killed")
    busy.wait(BACK_SECONDS)
    blamed_on(busy, victim, last_window(window).failed)
    assert crash_ids(busy) == known, "somebody wanted it so"


@pytest.mark.runbook("A pod does not go")
def test_a_pod_that_does_not_go_is_told_and_never_taken_by_force(
    busy: Deployed, cluster: Cluster, window: Traffic
) -> None:
    victim, known = busy.pod(PREFILL), crash_ids(busy)
    node = victim["spec"]["nodeName"]
    with silent_kubelet(cluster, node):
        busy.kube("delete", "pod", PREFILL, "--grace-period=1", "--wait=false")
        found = busy.wait_condition("Stalled", reason="StuckTerminating", timeout=180)
        assert PREFILL in found["message"]
        assert node in found["message"]
        busy.wait_told("StuckTerminating", PREFILL)
        assert busy.pod(PREFILL)["metadata"]["uid"] == victim["metadata"]["uid"]
        # What the runbook has last: a person who knows that the node is off.
        busy.kube("delete", "pod", PREFILL, "--grace-period=0", "--force")
        assert busy.drained(victim["metadata"]["uid"])["outcome"] == "Unknown"
    busy.wait(BACK_SECONDS)
    assert not busy.condition("Stalled")
    busy.wait_told("NoStalled", PREFILL)
    # It was sent nothing any more when it was killed.
    assert last_window(window).failed == []
    assert crash_ids(busy) == known


@pytest.mark.runbook("A replica is not started any more")
def test_a_replica_that_crashes_too_often_is_left_alone_until_an_edit(
    busy: Deployed, cluster: Cluster, window: Traffic
) -> None:
    busy.edit(crashPolicy={"maxRestarts": 1})
    busy.wait(BACK_SECONDS)
    victim = busy.pod(OTHER_DECODE)
    send_signal(cluster, victim, "KILL")
    degraded = busy.wait_condition("Degraded", reason="CrashLoop")
    assert OTHER_DECODE in degraded["message"]
    busy.wait_told("CrashLoop", OTHER_DECODE)
    latched = {r["replica"]: r for r in busy.status()["restarts"] if r["latched"]}
    assert set(latched) == {OTHER_DECODE}, latched
    told = glm52ctl(busy.kube, "diagnose", NAME)
    assert told.returncode == 1, told.stderr
    assert OTHER_DECODE in told.stdout
    assert OTHER_DECODE in glm52ctl(busy.kube, "status", NAME).stdout
    blamed_on(busy, victim, last_window(window).failed)

    window.mark("latched")
    window.wait_for_more(12)
    busy.edit(crashPolicy={"maxRestarts": 8})
    old = victim["metadata"]["uid"]
    until("it has a successor", lambda: busy.uids().get(OTHER_DECODE, old) != old, timeout=BACK_SECONDS)
    busy.wait(BACK_SECONDS)
    assert not busy.condition("Degraded")
    assert last_window(window).failed == []
    assert glm52ctl(busy.kube, "diagnose", NAME).returncode == 0


@pytest.mark.runbook("Stop and start again")
def test_everything_is_stopped_and_started_again(busy: Deployed, traffic: Traffic) -> None:
    traffic.stop()
    leaving = busy.uids().values()
    busy.edit(suspend=True)
    until("every pod is gone", lambda: not busy.pods(), timeout=BACK_SECONDS, last=lambda: list(busy.pods()))
    assert busy.condition("Ready")["reason"] == "Suspended"
    assert {uid: busy.drained(uid)["outcome"] for uid in leaving} == dict.fromkeys(leaving, "Drained")
    busy.edit(suspend=False)
    began = time.monotonic()
    busy.wait(BACK_SECONDS)
    print(f"six pods are back after {time.monotonic() - began:.0f} s")


@pytest.mark.runbook("Uninstall")
def test_without_an_operator_everything_serves_on_and_can_be_deleted(
    busy: Deployed, busy_url: str, cluster: Cluster
) -> None:
    tour.helm(cluster, "uninstall", tour.RELEASE, "--namespace", tour.NAMESPACE, "--wait")
    try:
        body = json.dumps({"model": "glm-5.2", "prompt": "once more", "max_tokens": 4}).encode()
        question = urllib.request.Request(f"{busy_url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(question, timeout=60) as response:
            assert response.status == 200
        busy.kube("delete", "glm52", NAME)
        until("every pod is gone", lambda: not busy.pods(), timeout=BACK_SECONDS, last=lambda: list(busy.pods()))
    finally:
        tour.install_operator(cluster, Progress())
