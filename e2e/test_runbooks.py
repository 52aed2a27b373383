"""What docs/operations.md tells a person on call to do, where no constant load is needed to see that it is right."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from e2e.busy import PORT  # its deployment is in a layer of its own
from e2e.conftest import router_url
from e2e.ctl import glm52ctl
from e2e.deployed import Deployed
from e2e.faults import ENGINE
from e2e.kube import Kubectl, Object, total, until
from e2e.manifests import deployment
from e2e.traffic import Answer, Failure, stream_completion

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NAME = "runbooks"
DECODE, OTHER_DECODE = f"{NAME}-decode-0", f"{NAME}-decode-1"
LONG = 16_000
"""Tokens of an answer that outlasts every drain here."""


def manifest(**decode: object) -> Object:
    return deployment(
        NAME,
        node_port=PORT,
        model={"preset": "tiny", "maxModelLen": 16_384},
        decode={"replicas": 2, **decode},
        drain={"windowSeconds": 1},
    )


@pytest.fixture(scope="module")
def runbooks(kube: Kubectl) -> Deployed:
    kube.apply(manifest())
    found = Deployed(kube, NAME)
    found.wait()
    return found


@pytest.fixture(scope="module")
def url(runbooks: Deployed) -> str:
    return router_url(PORT)


@pytest.mark.runbook("Roll out a change", "Resize the pools")
def test_a_plan_against_the_cluster_tells_whose_pods_a_change_replaces(runbooks: Deployed, tmp_path: Path) -> None:
    before = runbooks.resource()
    file = tmp_path / "bigger.json"
    file.write_text(json.dumps(manifest(hostPoolGiB=2)))
    told = glm52ctl(runbooks.kube, "plan", "-f", file, "--diff")
    assert told.returncode == 0, told.stderr
    assert f"{NAME}-decode" in told.stdout
    assert f"{NAME}-prefill" not in told.stdout
    file.write_text(json.dumps(manifest()))
    assert glm52ctl(runbooks.kube, "plan", "-f", file, "--diff").stdout != told.stdout
    assert runbooks.resource() == before
    assert glm52ctl(runbooks.kube, "diagnose", NAME).returncode == 0
    shown = glm52ctl(runbooks.kube, "status", NAME).stdout
    assert all(pod in shown for pod in runbooks.pods())


@pytest.mark.runbook("Is anything lost when pods leave?", "Stop a pod by force")
def test_requests_that_outlast_window_or_grace_are_cut_off_and_told(runbooks: Deployed, url: str) -> None:
    def both_leave() -> None:
        until("both generate", lambda: all(running(runbooks, name) > 0 for name in (DECODE, OTHER_DECODE)))
        first, second = runbooks.uids()[DECODE], runbooks.uids()[OTHER_DECODE]
        runbooks.kube("delete", "pod", DECODE, "--wait=false")
        runbooks.wait_condition("Draining", status="True")
        drain = runbooks.drained(first)
        assert drain["outcome"] == "DrainTimedOut", drain
        assert drain["cutOff"] >= 1
        runbooks.wait_told("DrainTimedOut", DECODE)
        runbooks.kube("delete", "pod", OTHER_DECODE, "--grace-period=1", "--wait=false")
        assert runbooks.drained(second)["outcome"] == "Killed"
        runbooks.wait_told("Killed", OTHER_DECODE)

    answers = asyncio.run(cut_by(both_leave, url))
    assert {answer.failure for answer in answers} == {Failure.CUT}, [answer.error for answer in answers]
    runbooks.wait()
    assert not runbooks.status().get("crashes"), "somebody wanted it so"


@pytest.mark.runbook("Drain by hand")
def test_a_pod_is_drained_by_hand(runbooks: Deployed) -> None:
    asked = runbooks.pod(DECODE)
    said = runbooks.kube("exec", DECODE, "-c", ENGINE, "--", "glm52-engine", "drain").stdout
    assert "nothing is in flight" in said
    runbooks.wait_condition("DecodeReady", status="False")
    runbooks.kube("delete", "pod", DECODE, "--wait=false")
    assert runbooks.drained(asked["metadata"]["uid"])["outcome"] == "Drained"
    runbooks.wait_told("Drained", DECODE)
    runbooks.wait()
    assert not runbooks.status().get("crashes")


@pytest.fixture
def no_more_pods(runbooks: Deployed) -> Iterator[None]:
    runbooks.kube("create", "quota", "no-more", f"--hard=pods={len(runbooks.pods())}")
    yield
    runbooks.kube("delete", "quota", "no-more")


@pytest.mark.runbook("A rollout that does not get on")
@pytest.mark.usefixtures("no_more_pods")
def test_a_replica_that_nobody_has_room_for_holds_a_rollout_until_it_is_not_wanted(runbooks: Deployed) -> None:
    runbooks.kube("scale", "glm52", NAME, "--replicas=3")
    refused = runbooks.wait_condition("DecodeReady", reason="PodsRefused")
    assert "exceeded quota" in refused["message"]
    before = runbooks.uids()
    runbooks.edit(decode={"maxNumSeqs": 5})
    resource = runbooks.resource()
    assert resource is not None
    generation = resource["metadata"]["generation"]
    runbooks.wait_status("the edit was looked at", lambda status: status["observedGeneration"] == generation)
    assert glm52ctl(runbooks.kube, "diagnose", NAME).returncode == 1
    assert runbooks.uids() == before
    runbooks.kube("scale", "glm52", NAME, "--replicas=2")
    runbooks.wait()
    replaced = {name for name, uid in runbooks.uids().items() if before.get(name) != uid}
    assert replaced == {DECODE, OTHER_DECODE}


@pytest.fixture
def second_budget(runbooks: Deployed) -> Iterator[Callable[[], None]]:
    """Somebody else's, for the same pods; ends when it is called, and with the test."""
    selector = f"--selector=glm52.dev/name={NAME},glm52.dev/role=decode"
    runbooks.kube("create", "poddisruptionbudget", "second", selector, "--max-unavailable=1")

    def remove() -> None:
        runbooks.kube("delete", "poddisruptionbudget", "second", "--ignore-not-found")

    yield remove
    remove()


@pytest.mark.runbook("A rollout that does not get on", "Change the internal token")
def test_a_second_budget_holds_a_restart_that_gives_everybody_a_new_token(
    runbooks: Deployed, url: str, second_budget: Callable[[], None]
) -> None:
    old, before = token(runbooks), runbooks.uids()
    runbooks.kube("delete", "secret", f"{NAME}-internal")
    runbooks.edit(restart="everybody reads the new token")
    until("there is a new token", lambda: token(runbooks) not in ("", old), timeout=60)
    runbooks.wait_status(
        "an eviction is refused",
        lambda status: any("is not let go" in c["message"] for c in status["conditions"] if c["type"] == "DecodeReady"),
    )
    second_budget()
    runbooks.wait()
    assert not set(runbooks.uids().values()) & set(before.values())
    body = json.dumps({"model": "glm-5.2", "prompt": "once more", "max_tokens": 4}).encode()
    question = urllib.request.Request(f"{router_url(PORT)}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(question, timeout=60) as response:
        assert response.status == 200


def token(of: Deployed) -> str:
    """Empty while there is none."""
    secret = of.kube.get("secret", f"{of.name}-internal")
    return base64.b64decode(secret["data"]["token"]).decode() if secret else ""


def running(of: Deployed, pod: str) -> float:
    return total(of.kube.metrics(pod), "vllm:num_requests_running")


async def cut_by(act: Callable[[], None], url: str) -> list[Answer]:
    """Long answers stream while `act` runs; those that ended then."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        asked = [
            asyncio.create_task(stream_completion(session, url, f"Question {n}: how long is a drain?", max_tokens=LONG))
            for n in range(6)
        ]
        try:
            await asyncio.to_thread(act)
            # The last pod that generated is gone: nothing streams on.
            return await asyncio.wait_for(asyncio.gather(*asked), timeout=60)
        finally:
            for task in asked:
                task.cancel()
