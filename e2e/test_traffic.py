"""What an operator of a cluster does on a normal day, under constant load: not one request fails."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from e2e.busy import NAME, READY_SECONDS, drained, edit, is_ready, pod, pods, status, told, uids, wait_told
from e2e.cluster import Cluster
from e2e.kube import Kubectl, condition, total, until, wait_ready
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
def window(traffic: Traffic, request: pytest.FixtureRequest) -> Iterator[Traffic]:
    """The traffic during one test, which fails with any request that fails."""
    traffic.mark(request.node.name)
    yield traffic
    traffic.wait_for_more(5)
    print(traffic.windows()[-1])
    assert traffic.failures() == []


def restart_is_over(busy: Kubectl, before: dict[str, str]) -> None:
    """Ready again, and no pod is one of those before."""
    wait_ready(busy, NAME, READY_SECONDS)
    assert not set(before.values()) & set(uids(busy).values())


def token(busy: Kubectl) -> str:
    secret = busy.get("secret", f"{NAME}-internal")
    assert secret is not None
    return base64.b64decode(secret["data"]["token"]).decode().strip()


def set_token(busy: Kubectl, *lines: str) -> None:
    """As operations.md says it, the shell around it left out."""
    literal = "--from-literal=token=" + "\n".join(lines)
    made = busy("create", "secret", "generic", f"{NAME}-internal", literal, "--dry-run=client", "-o", "yaml")
    busy("patch", "secret", f"{NAME}-internal", "--patch-file=/dev/stdin", input=made.stdout)


def test_decode_scales_up_and_down(busy: Kubectl, window: Traffic) -> None:
    busy("scale", "glm52", NAME, "--replicas=3")
    wait_ready(busy, NAME, READY_SECONDS)
    new = pod(busy, f"{NAME}-decode-2")["metadata"]
    until(
        "the new pod generates",
        lambda: total(busy.metrics(new["name"]), "vllm:generation_tokens_total") > 0,
        timeout=60,
    )
    busy("scale", "glm52", NAME, "--replicas=2")
    assert drained(busy, new["uid"])["outcome"] == "Drained"
    wait_told(busy, "Drained", new["name"])
    wait_ready(busy, NAME, READY_SECONDS)
    assert new["name"] not in pods(busy)


# Runbooks: restart everything; change the internal token, step 1.
def test_a_restart_replaces_every_pod_and_everybody_learns_a_new_token(busy: Kubectl, window: Traffic) -> None:
    before = uids(busy)
    set_token(busy, token(busy), "new-one")
    edit(busy, restart="everybody takes the new token")
    restart_is_over(busy, before)
    assert told(busy, "Replacing")


# Runbooks: upgrade of the operator, whose process is another one from here on; change the internal token, step 2.
def test_another_operator_goes_on_with_a_restart_where_the_one_before_was_killed(
    kubectl: Kubectl, busy: Kubectl, window: Traffic
) -> None:
    before = uids(busy)
    set_token(busy, "new-one", token(busy).splitlines()[0])
    edit(busy, restart="everybody sends the new token")
    until("a first pod is replaced", lambda: set(uids(busy).values()) - set(before.values()), timeout=120)
    system = kubectl.within("glm52-system")
    system("delete", "pod", "-l", "app.kubernetes.io/name=glm52-operator", "--grace-period=0", "--force")
    restart_is_over(busy, before)


# Runbooks: upgrade of the engine; change the internal token, step 3.
def test_another_image_of_the_engine_and_the_old_token_is_forgotten(
    busy: Kubectl, window: Traffic, other_image: str
) -> None:
    before = uids(busy)
    set_token(busy, "new-one")
    edit(busy, image=other_image)
    restart_is_over(busy, before)
    images = {c["image"] for each in pods(busy).values() for c in each["spec"]["containers"]}
    assert images == {other_image}


# Runbook: resize the pools.
def test_an_edit_taken_back_in_the_middle_replaces_only_what_it_had_reached(busy: Kubectl, window: Traffic) -> None:
    before = uids(busy)
    edit(busy, decode={"hostPoolGiB": 2})
    until(
        "one of two decode replicas is of the new size",
        lambda: status(busy)["decode"].get("updatedReplicas") == 1 and status(busy)["decode"]["readyReplicas"] >= 1,
        timeout=READY_SECONDS,
        last=lambda: status(busy),
    )
    edit(busy, decode={"hostPoolGiB": 1})
    wait_ready(busy, NAME, READY_SECONDS)
    after = uids(busy)
    kept = {name for name in before if after.get(name) == before[name]}
    assert kept == {name for name in before if name != f"{NAME}-decode-0"}
    assert status(busy)["decode"]["memory"]["hostPools"] == "1 GiB"


# Runbooks: resize the pools, where no node has the room; a rollout that does not get on.
def test_a_size_that_no_node_has_is_told_and_taking_it_back_heals(busy: Kubectl, window: Traffic) -> None:
    edit(busy, decode={"hostPoolGiB": 640})
    until(
        "Schedulable is False",
        lambda: condition(busy.get("glm52", NAME), "Schedulable").get("reason") == "NoRoom",
        timeout=120,
        last=lambda: status(busy),
    )
    assert "640" in status(busy)["decode"]["memory"]["explanation"]
    edit(busy, decode={"hostPoolGiB": 1})
    wait_ready(busy, NAME, READY_SECONDS)


# Runbook: a rollout that does not get on.
def test_an_image_that_is_nowhere_is_told_and_taking_it_back_heals(
    busy: Kubectl, window: Traffic, other_image: str
) -> None:
    before = uids(busy)
    edit(busy, image=NOWHERE)
    until(
        "the image is named",
        lambda: any(NOWHERE in c["message"] for c in status(busy)["conditions"] if c["reason"] == "ImagePullBackOff"),
        timeout=240,
        last=lambda: status(busy),
    )
    wait_told(busy, "ImagePullBackOff", NOWHERE)
    edit(busy, image=other_image)
    wait_ready(busy, NAME, READY_SECONDS)
    # Of each role one replica had gone for it, and no router: a new one comes before an old one goes.
    assert len(set(uids(busy).values()) & set(before.values())) >= len(before) - 2


# Runbook: drain a node.
def test_a_node_is_drained_for_maintenance(busy: Kubectl, cluster: Cluster, window: Traffic) -> None:
    node = pod(busy, f"{NAME}-decode-0")["spec"]["nodeName"]
    # One that never ran, as of the image that was nowhere, has nothing to drain.
    going = {name: each for name, each in pods(busy).items() if each["spec"]["nodeName"] == node and is_ready(each)}
    try:
        # Ours only: others' pods on this cluster may not find room elsewhere.
        selected = f"--pod-selector=glm52.dev/name={NAME}"
        flags = ["--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={READY_SECONDS}s", selected]
        busy("drain", node, *flags, timeout=READY_SECONDS + 30)
        outcomes = {name: drained(busy, each["metadata"]["uid"])["outcome"] for name, each in going.items()}
        assert set(outcomes.values()) == {"Drained"}, outcomes
        wait_ready(busy, NAME, READY_SECONDS)
        assert node not in {each["spec"]["nodeName"] for each in pods(busy).values()}
    finally:
        busy("uncordon", node)


def test_no_request_has_failed_of_a_thousand(traffic: Traffic) -> None:
    traffic.mark("nothing is done")
    traffic.wait_for_all(LEAST_REQUESTS, timeout=READY_SECONDS)
    print(*traffic.windows(), sep="\n")
    assert traffic.failures() == []
