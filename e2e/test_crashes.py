"""What befalls a deployment, under constant load: only requests that ran on that replica fail, in a way that a client
understands, the status says what happened, and the replica comes back without a hand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from e2e.busy import (
    NAME,
    READY_SECONDS,
    blamed_on,
    drained,
    edit,
    pod,
    pods,
    status,
    told,
    uids,
    wait_told,
)
from e2e.cluster import Cluster, tour
from e2e.cluster.progress import Progress
from e2e.faults import ENGINE, fill_memory, send_signal
from e2e.kube import Kubectl, Object, condition, until, wait_ready
from e2e.traffic import Traffic, Window

pytestmark = [pytest.mark.cluster, pytest.mark.disruptive, pytest.mark.timeout(READY_SECONDS)]

BACK_SECONDS = 240
"""Until a replica that was killed serves again: its start, and what else the machine does."""
HANGING_SECONDS = 300
"""The same of one that hangs: three liveness probes of 10 s, and its grace period, before that."""
DECODE, OTHER_DECODE, PREFILL = f"{NAME}-decode-0", f"{NAME}-decode-1", f"{NAME}-prefill-0"


@pytest.fixture(scope="module")
def traffic(busy_url: str) -> Iterator[Traffic]:
    with Traffic(busy_url, clients=4, max_tokens=48, rate=4) as traffic:
        traffic.wait_for_more(12)
        yield traffic


@pytest.fixture
def window(traffic: Traffic, request: pytest.FixtureRequest) -> Traffic:
    traffic.wait_for_more(4)
    traffic.mark(request.node.name)
    return traffic


def last_window(traffic: Traffic) -> Window:
    """The traffic of this test, once everything that it began has ended."""
    traffic.wait_for_more(traffic.clients * 3, timeout=HANGING_SECONDS)
    found = traffic.windows()[-1]
    print(found)
    return found


def new_crash(busy: Kubectl, name: str, known: set[str], timeout: float) -> Object:
    """The entry of status.crashes about that pod that was not there before."""

    def find() -> Object | None:
        entries = status(busy).get("crashes", [])
        return next((c for c in entries if c["pod"] == name and c["id"] not in known), None)

    found = until(f"a crash of {name} is told", find, timeout=timeout, last=lambda: status(busy).get("crashes"))
    assert found is not None
    return found


def crash_ids(busy: Kubectl) -> set[str]:
    return {crash["id"] for crash in status(busy).get("crashes", [])}


def is_false(busy: Kubectl, kind: str) -> bool:
    return condition(busy.get("glm52", NAME), kind).get("status") == "False"


def restarts(each: Object) -> int:
    return sum(int(c["restartCount"]) for c in each["status"]["containerStatuses"])


def ctl(cluster: Cluster, busy: Kubectl, *arguments: str) -> subprocess.CompletedProcess[str]:
    """glm52ctl as a person calls it."""
    where = ["-n", str(busy.namespace), "--kubeconfig", str(cluster.kubeconfig)]
    command = [sys.executable, "-c", "from glm52_operator.ctl.main import main; raise SystemExit(main())"]
    return subprocess.run([*command, *arguments, *where], capture_output=True, text=True, timeout=120, check=False)


def test_an_engine_that_is_killed(busy: Kubectl, cluster: Cluster, window: Traffic) -> None:
    victim, known = pod(busy, DECODE), crash_ids(busy)
    send_signal(cluster, victim, "KILL")
    until("DecodeReady is False", lambda: is_false(busy, "DecodeReady"), timeout=60, last=lambda: status(busy))
    crash = new_crash(busy, DECODE, known, BACK_SECONDS)
    assert (crash["reason"], crash["exitCode"]) == ("Killed", 137)
    assert "SIGKILL" in crash["message"]
    assert crash["node"] == victim["spec"]["nodeName"]
    wait_told(busy, "Killed", DECODE)
    wait_ready(busy, NAME, BACK_SECONDS)
    after = pod(busy, DECODE)
    assert after["metadata"]["uid"] == victim["metadata"]["uid"]
    assert restarts(after) == restarts(victim) + 1
    blamed_on(busy, victim, last_window(window).failed)


def test_an_engine_that_runs_out_of_memory(busy: Kubectl, window: Traffic) -> None:
    victim, known = pod(busy, PREFILL), crash_ids(busy)
    fill_memory(busy, PREFILL)
    crash = new_crash(busy, PREFILL, known, BACK_SECONDS)
    assert (crash["reason"], crash["exitCode"]) == ("OOMKilled", 137)
    assert "memory limit" in crash["message"]
    wait_told(busy, "OOMKilled", PREFILL)
    wait_ready(busy, NAME, BACK_SECONDS)
    blamed_on(busy, victim, last_window(window).failed)


def test_an_engine_that_hangs(busy: Kubectl, cluster: Cluster, window: Traffic) -> None:
    """Stopped, it neither serves nor ends: its liveness probe is what finds it."""
    victim, known = pod(busy, OTHER_DECODE), crash_ids(busy)
    send_signal(cluster, victim, "STOP")
    until("DecodeReady is False", lambda: is_false(busy, "DecodeReady"), timeout=120, last=lambda: status(busy))
    crash = new_crash(busy, OTHER_DECODE, known, HANGING_SECONDS)
    assert (crash["reason"], crash["exitCode"]) == ("Killed", 137)
    wait_told(busy, "Killed", OTHER_DECODE)
    wait_ready(busy, NAME, BACK_SECONDS)
    blamed_on(busy, victim, last_window(window).failed)


# Runbooks: stop a pod by force; drain by hand.
def test_a_pod_that_is_deleted_by_force_and_one_that_is_told_to_go(busy: Kubectl, window: Traffic) -> None:
    victim, known = pod(busy, DECODE), crash_ids(busy)
    busy("delete", "pod", DECODE, "--grace-period=0", "--force")
    assert drained(busy, victim["metadata"]["uid"])["outcome"] in ("Unknown", "Killed")
    wait_ready(busy, NAME, BACK_SECONDS)
    blamed_on(busy, victim, last_window(window).failed)
    assert crash_ids(busy) == known, "somebody wanted it so"

    window.mark("told to go")
    asked = pod(busy, DECODE)
    assert "nothing is in flight" in busy("exec", DECODE, "-c", ENGINE, "--", "glm52-engine", "drain").stdout
    busy("delete", "pod", DECODE, "--wait=false")
    assert drained(busy, asked["metadata"]["uid"])["outcome"] == "Drained"
    wait_told(busy, "Drained", DECODE)
    wait_ready(busy, NAME, BACK_SECONDS)
    assert last_window(window).failed == []


# Runbook: a pod that stays Terminating.
def test_a_pod_that_does_not_go_is_told_and_never_taken_by_force(busy: Kubectl, window: Traffic) -> None:
    victim = pod(busy, PREFILL)
    # To the API server this is the same as a kubelet that does not say that the pod has ended.
    busy("patch", "pod", PREFILL, "--type=merge", "-p", '{"metadata":{"finalizers":["glm52.dev/test-hold"]}}')
    busy("delete", "pod", PREFILL, "--grace-period=1", "--wait=false")
    until(
        "Stalled is True",
        lambda: condition(busy.get("glm52", NAME), "Stalled").get("reason") == "StuckTerminating",
        timeout=180,
        last=lambda: status(busy).get("drains"),
    )
    found = condition(busy.get("glm52", NAME), "Stalled")
    assert PREFILL in found["message"]
    assert victim["spec"]["nodeName"] in found["message"]
    wait_told(busy, "StuckTerminating", PREFILL)
    assert pod(busy, PREFILL)["metadata"]["uid"] == victim["metadata"]["uid"]
    busy("patch", "pod", PREFILL, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    wait_ready(busy, NAME, BACK_SECONDS)
    until("Stalled is over", lambda: not condition(busy.get("glm52", NAME), "Stalled"), timeout=60)
    assert told(busy, "NoStalled")
    blamed_on(busy, victim, last_window(window).failed)


# Runbook: a replica that is not started any more.
def test_a_replica_that_crashes_too_often_is_left_alone_until_an_edit(
    busy: Kubectl, cluster: Cluster, window: Traffic
) -> None:
    edit(busy, crashPolicy={"maxRestarts": 1})
    wait_ready(busy, NAME, BACK_SECONDS)
    victim = pod(busy, OTHER_DECODE)
    send_signal(cluster, victim, "KILL")
    until(
        "Degraded is True",
        lambda: condition(busy.get("glm52", NAME), "Degraded").get("reason") == "CrashLoop",
        timeout=120,
        last=lambda: status(busy),
    )
    assert OTHER_DECODE in condition(busy.get("glm52", NAME), "Degraded")["message"]
    wait_told(busy, "CrashLoop", OTHER_DECODE)
    assert [r["replica"] for r in status(busy)["restarts"] if r["latched"]] == [OTHER_DECODE]
    told_by_ctl = ctl(cluster, busy, "diagnose", NAME)
    assert told_by_ctl.returncode == 1, told_by_ctl.stderr
    assert OTHER_DECODE in told_by_ctl.stdout
    assert OTHER_DECODE in ctl(cluster, busy, "status", NAME).stdout
    blamed_on(busy, victim, last_window(window).failed)

    window.mark("latched")
    window.wait_for_more(12)
    edit(busy, crashPolicy={"maxRestarts": 8})
    old = victim["metadata"]["uid"]
    until("it has a successor", lambda: uids(busy).get(OTHER_DECODE, old) != old, timeout=BACK_SECONDS)
    wait_ready(busy, NAME, BACK_SECONDS)
    assert not condition(busy.get("glm52", NAME), "Degraded")
    assert last_window(window).failed == []
    assert ctl(cluster, busy, "diagnose", NAME).returncode == 0


# Runbook: stop and start again.
def test_everything_is_stopped_and_started_again(busy: Kubectl, traffic: Traffic) -> None:
    traffic.stop()
    leaving = {each["metadata"]["uid"] for each in pods(busy).values()}
    edit(busy, suspend=True)
    until("every pod is gone", lambda: not pods(busy), timeout=BACK_SECONDS, last=lambda: list(pods(busy)))
    assert condition(busy.get("glm52", NAME), "Ready")["reason"] == "Suspended"
    outcomes = [d["outcome"] for d in status(busy)["drains"] if d["uid"] in leaving]
    assert outcomes == ["Drained"] * len(leaving)
    edit(busy, suspend=False)
    began = time.monotonic()
    wait_ready(busy, NAME, BACK_SECONDS)
    print(f"six pods are back after {time.monotonic() - began:.0f} s")


# Runbook: uninstall.
def test_without_an_operator_everything_serves_on_and_can_be_deleted(
    busy: Kubectl, busy_url: str, cluster: Cluster
) -> None:
    tour.helm(cluster, "uninstall", tour.RELEASE, "--namespace", tour.NAMESPACE, "--wait")
    try:
        body = json.dumps({"model": "glm-5.2", "prompt": "once more", "max_tokens": 4}).encode()
        question = urllib.request.Request(f"{busy_url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(question, timeout=60) as response:
            assert response.status == 200
        busy("delete", "glm52", NAME)
        until("every pod is gone", lambda: not pods(busy), timeout=BACK_SECONDS, last=lambda: list(pods(busy)))
    finally:
        tour.install_operator(cluster, Progress())
