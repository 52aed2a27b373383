"""What an operator of a cluster does on a normal day, under constant load: not one request fails."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from e2e.busy import NAME
from e2e.cluster import Cluster, tour
from e2e.cluster.progress import Progress
from e2e.deployed import READY_SECONDS, Deployed, is_ready
from e2e.kube import Kubectl, total, until
from e2e.traffic import Traffic

pytestmark = [pytest.mark.cluster, pytest.mark.disruptive, pytest.mark.timeout(2 * READY_SECONDS)]

LEAST_REQUESTS = 1000
NOWHERE = "127.0.0.1:9/engine:404"
"""Refused at once by the node itself: a name that has to be looked up keeps a closed network busy for a minute."""


@pytest.fixture(scope="module")
def traffic(busy_url: str) -> Iterator[Traffic]:
    with Traffic(busy_url, clients=4, max_tokens=16, rate=5) as traffic:
        # Each prompt once, so that every later answer is compared.
        traffic.wait_for_more(12)
        yield traffic


@pytest.fixture
def window(traffic: Traffic, busy: Deployed, request: pytest.FixtureRequest) -> Iterator[Traffic]:
    """The traffic during one test, which fails with any request that fails."""
    traffic.mark(request.node.name)
    yield traffic
    traffic.wait_for_more(5)
    print(traffic.windows()[-1])
    assert traffic.failures() == []
    assert not busy.status().get("crashes")


def restart_is_over(busy: Deployed, before: dict[str, str]) -> None:
    """Ready again, and no pod is one of those before."""
    busy.wait()
    assert not set(before.values()) & set(busy.uids().values())


def tokens(busy: Deployed) -> list[str]:
    """What pods take, the one that they send first."""
    secret = busy.kube.get("secret", f"{NAME}-internal")
    assert secret is not None
    return base64.b64decode(secret["data"]["token"]).decode().split()


def set_tokens(busy: Deployed, lines: list[str]) -> None:
    """As operations.md says it, the shell around it left out. Each step is right by itself, whichever ran before."""
    literal = "--from-literal=token=" + "\n".join(lines)
    made = busy.kube("create", "secret", "generic", f"{NAME}-internal", literal, "--dry-run=client", "-o", "yaml")
    busy.kube("patch", "secret", f"{NAME}-internal", "--patch-file=/dev/stdin", input=made.stdout)


def test_decode_scales_up_and_down(busy: Deployed, window: Traffic) -> None:
    busy.kube("scale", "glm52", NAME, "--replicas=3")
    busy.wait()
    new = busy.pod(f"{NAME}-decode-2")["metadata"]
    until(
        "the new pod generates",
        lambda: total(busy.kube.metrics(new["name"]), "vllm:generation_tokens_total") > 0,
        timeout=60,
    )
    busy.kube("scale", "glm52", NAME, "--replicas=2")
    busy.wait_condition("Draining", status="True")
    assert busy.drained(new["uid"])["outcome"] == "Drained"
    busy.wait_told("Drained", new["name"])
    busy.wait()
    assert new["name"] not in busy.pods()


@pytest.mark.runbook("Restart everything", "Change the internal token")
def test_a_restart_replaces_every_pod_and_everybody_learns_a_new_token(busy: Deployed, window: Traffic) -> None:
    before = busy.uids()
    set_tokens(busy, [*tokens(busy), "new-one"])
    busy.edit(restart="everybody takes the new token")
    busy.wait_condition("DecodeReady", reason="RollingOut")
    restart_is_over(busy, before)
    assert busy.outcomes(before.values()) == {"Drained"}
    assert busy.told("Replacing")


@pytest.mark.runbook("Change the internal token", "Upgrade")
def test_another_operator_goes_on_with_a_restart_where_the_one_before_was_killed(
    kubectl: Kubectl, busy: Deployed, window: Traffic
) -> None:
    before = busy.uids()
    set_tokens(busy, tokens(busy)[::-1])
    busy.edit(restart="everybody sends the new token")
    until("a first pod is replaced", lambda: set(busy.uids().values()) - set(before.values()), timeout=120)
    system = kubectl.within("glm52-system")
    system("delete", "pod", "-l", "app.kubernetes.io/name=glm52-operator", "--grace-period=0", "--force")
    restart_is_over(busy, before)
    # A pod that was gone before the next operator looked has left no word.
    assert busy.outcomes(before.values()) <= {"Drained", "Unknown"}


@pytest.mark.runbook("Upgrade", "Change the internal token")
def test_an_upgrade_waits_while_it_is_paused_and_the_old_token_is_forgotten(
    busy: Deployed, window: Traffic, cluster: Cluster, other_image: str
) -> None:
    before = busy.uids()
    set_tokens(busy, tokens(busy)[:1])
    busy.edit(rollout={"paused": True})
    try:
        tour.install_operator(replace(cluster, images={**cluster.images, "engine": other_image}), Progress())
        busy.wait_condition("DecodeReady", reason="Paused")
        assert busy.uids() == before
        busy.edit(rollout={"paused": False})
        restart_is_over(busy, before)
        assert images(busy) == {other_image}
        before = busy.uids()
        busy.edit(image=other_image)
    finally:
        tour.install_operator(cluster, Progress())
    busy.wait()
    assert busy.uids() == before, "the deployment names its image, so the installation's changes nothing"


def images(busy: Deployed) -> set[str]:
    return {container["image"] for pod in busy.pods().values() for container in pod["spec"]["containers"]}


@pytest.mark.runbook("Roll out a change", "Resize the pools")
def test_an_edit_taken_back_in_the_middle_replaces_only_what_it_had_reached(busy: Deployed, window: Traffic) -> None:
    before = busy.uids()
    busy.edit(decode={"hostPoolGiB": 2})
    busy.wait_status(
        "one of two decode replicas is of the new size",
        lambda seen: seen["decode"].get("updatedReplicas") == 1 and seen["decode"]["readyReplicas"] >= 1,
        READY_SECONDS,
    )
    busy.edit(decode={"hostPoolGiB": 1})
    busy.wait()
    after = busy.uids()
    kept = {name for name in before if after.get(name) == before[name]}
    assert kept == {name for name in before if name != f"{NAME}-decode-0"}
    assert busy.status()["decode"]["memory"]["hostPools"] == "1 GiB"


@pytest.mark.runbook("Resize the pools", "A rollout that does not get on")
def test_a_size_that_no_node_has_is_told_and_taking_it_back_heals(busy: Deployed, window: Traffic) -> None:
    busy.edit(decode={"hostPoolGiB": 640})
    try:
        busy.wait_condition("Schedulable", reason="NoRoom")
        assert "640" in busy.status()["decode"]["memory"]["explanation"]
    finally:
        busy.edit(decode={"hostPoolGiB": 1})
    busy.wait()


@pytest.mark.runbook("A rollout that does not get on")
def test_an_image_that_is_nowhere_is_told_and_taking_it_back_heals(busy: Deployed, window: Traffic) -> None:
    before, resource = busy.uids(), busy.resource()
    assert resource is not None
    busy.edit(image=NOWHERE)
    try:
        found = busy.wait_condition("DecodeReady", reason="ImagePullBackOff", timeout=240)
        assert NOWHERE in found["message"]
        busy.wait_told("ImagePullBackOff", NOWHERE)
    finally:
        # Also where this fails: behind half a rollout no node can be drained.
        busy.edit(image=resource["spec"].get("image"))
    busy.wait()
    # Of each role one replica had gone for it, and no router: a new one comes before an old one goes.
    assert len(set(busy.uids().values()) & set(before.values())) >= len(before) - 2


@pytest.fixture
def room_on_each_node(kubectl: Kubectl, busy: Deployed) -> Iterator[None]:
    """One node takes everything that is busy: what else this cluster serves, as the example of `make up`, rests."""
    found = json.loads(kubectl("get", "glm52", "--all-namespaces", "-o", "json").stdout)["items"]
    serving = [each["metadata"] for each in found if not each["spec"].get("suspend")]
    others = [Deployed(kubectl.within(each["namespace"]), each["name"]) for each in serving]
    others.remove(busy)
    for other in others:
        other.edit(suspend=True)
    until("all others rest", lambda: not any(other.pods() for other in others), timeout=READY_SECONDS)
    yield
    for other in others:
        other.edit(suspend=False)


@pytest.mark.usefixtures("room_on_each_node")
@pytest.mark.runbook("Drain by hand")
def test_a_node_is_drained_for_maintenance(busy: Deployed, window: Traffic) -> None:
    node = busy.pod(f"{NAME}-decode-0")["spec"]["nodeName"]
    # One that never ran, as of the image that was nowhere, has nothing to drain.
    going = [
        pod["metadata"]["uid"] for pod in busy.pods().values() if pod["spec"]["nodeName"] == node and is_ready(pod)
    ]
    try:
        # Ours only: others' pods on this cluster may not find room elsewhere.
        selected = f"--pod-selector=glm52.dev/name={NAME}"
        flags = ["--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={READY_SECONDS}s", selected]
        busy.kube("drain", node, *flags, timeout=READY_SECONDS + 30)
        outcomes = {uid: busy.drained(uid)["outcome"] for uid in going}
        assert set(outcomes.values()) == {"Drained"}, outcomes
        busy.wait()
        assert node not in {pod["spec"]["nodeName"] for pod in busy.pods().values()}
    finally:
        busy.kube("uncordon", node)


def test_no_request_has_failed_of_a_thousand(traffic: Traffic) -> None:
    traffic.mark("nothing is done")
    traffic.wait_for_all(LEAST_REQUESTS, timeout=READY_SECONDS)
    print(*traffic.windows(), sep="\n")
    assert traffic.failures() == []
