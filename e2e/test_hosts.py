"""Replicas of several hosts on real kubelets: examples/two-hosts.yaml answers as one host would, and its pods come, go
and fall together."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import Cluster
from e2e.faults import send_signal
from e2e.kube import Kubectl, Object, until, wait_ready
from e2e.reference import Reference

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parent.parent / "examples" / "two-hosts.yaml"
NAME = "two-hosts"
LEADER, HOST = f"{NAME}-decode-0", f"{NAME}-decode-1"
REPLICA = {LEADER, HOST}
SECOND = {f"{NAME}-decode-2", f"{NAME}-decode-3"}
OUTPUT = 12
LONG = 300
"""Tokens of an output that is not over before a pod is told to go."""
WINDOW_SECONDS = 180
"""For that output to end in, also on a machine that does other things as well."""
BACK_SECONDS = 240


@pytest.fixture(scope="module")
def hosts(kube: Kubectl) -> Kubectl:
    example = yaml.safe_load(EXAMPLE.read_text())
    example["spec"] |= {"drain": {"windowSeconds": WINDOW_SECONDS}, "crashPolicy": {"backoffBaseSeconds": 0}}
    kube.apply(example)
    wait_ready(kube, NAME, BACK_SECONDS)
    return kube


def complete(kube: Kubectl, prompt: list[int], tokens: int = OUTPUT) -> list[int]:
    """Greedy tokens through the router, which the API server's proxy reaches without a port of the node."""
    body = {
        "model": "glm-5.2", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    path = f"/api/v1/namespaces/{kube.namespace}/services/{NAME}-router:8000/proxy/v1/completions"
    answer = json.loads(kube("create", "--raw", path, "-f", "-", input=json.dumps(body), timeout=BACK_SECONDS).stdout)
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def pods(kube: Kubectl) -> dict[str, Object]:
    """Decode pods by name."""
    found = kube.list("pods", f"glm52.dev/name={NAME},glm52.dev/role=decode")
    return {pod["metadata"]["name"]: pod for pod in found}


def uids(kube: Kubectl) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in pods(kube).items()}


def status(kube: Kubectl) -> Any:
    return (kube.get("glm52", NAME) or {}).get("status") or {}


def scale_of(kube: Kubectl) -> Any:
    path = f"/apis/glm52.dev/v1alpha1/namespaces/{kube.namespace}/glm52deployments/{NAME}/scale"
    return json.loads(kube("get", "--raw", path).stdout)["status"]


def wait_anew(kube: Kubectl, before: dict[str, str]) -> None:
    """Until every pod of the replica is another one, and all is well."""

    def anew() -> bool:
        now = uids(kube)
        return all(now.get(name, before[name]) != before[name] for name in REPLICA)

    until("both hosts are new", anew, timeout=BACK_SECONDS, last=lambda: (uids(kube), status(kube)))
    wait_ready(kube, NAME, BACK_SECONDS)


def evict(kube: Kubectl, pod: str) -> None:
    """What `kubectl drain` of its node does to a pod."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": kube.namespace}}
    path = f"/api/v1/namespaces/{kube.namespace}/pods/{pod}/eviction"
    kube("create", "--raw", path, "-f", "-", input=json.dumps(body))


def outcomes(kube: Kubectl, before: dict[str, str]) -> list[str]:
    return [d.get("outcome", d["phase"]) for d in status(kube).get("drains", []) if d["uid"] in before.values()]


def test_two_hosts_give_the_tokens_of_one(hosts: Kubectl, reference: Reference) -> None:
    # More at once than one rank has seats, and lengths on both sides of the indexer's top-k.
    prompts = [
        [32 + (7 * n + place) % 90 for place in range(length)] for n, length in enumerate((1, 40, 9, 130, 65, 3))
    ]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(lambda prompt: complete(hosts, prompt), prompts))
    assert answers == [reference.greedy(prompt, OUTPUT) for prompt in prompts]


def test_a_replica_is_told_and_counted_by_its_leader(hosts: Kubectl) -> None:
    found = status(hosts)["decode"]
    assert (found["ready"], found["replicas"], found["readyReplicas"], found["updatedReplicas"]) == ("1/1", 1, 1, 1)
    scale = scale_of(hosts)
    assert scale["replicas"] == 1
    assert {pod["metadata"]["name"] for pod in hosts.list("pods", scale["selector"])} == {LEADER}
    nodes = {pod["spec"]["nodeName"] for pod in pods(hosts).values()}
    assert len(nodes) == 2, "hosts of a replica are on different nodes where there are some"


def test_replicas_are_added_and_removed_whole(hosts: Kubectl) -> None:
    hosts("scale", "glm52", NAME, "--replicas=2")
    wait_ready(hosts, NAME, BACK_SECONDS)
    scale = scale_of(hosts)
    assert scale["replicas"] == 2
    assert {pod["metadata"]["name"] for pod in hosts.list("pods", scale["selector"])} == {LEADER, min(SECOND)}
    before = uids(hosts)
    assert before.keys() == REPLICA | SECOND

    hosts("scale", "glm52", NAME, "--replicas=1")
    until("the second replica is gone", lambda: pods(hosts).keys() == REPLICA, timeout=BACK_SECONDS)
    wait_ready(hosts, NAME, BACK_SECONDS)
    assert uids(hosts) == {name: before[name] for name in REPLICA}
    assert outcomes(hosts, before) == ["Drained", "Drained"]
    assert "crashes" not in status(hosts)


def test_a_host_that_is_evicted_takes_its_replica_along_and_no_request(hosts: Kubectl) -> None:
    prompt, before = [40, 41, 42], uids(hosts)
    expected = complete(hosts, prompt, LONG)
    with ThreadPoolExecutor(1) as client:
        running = client.submit(complete, hosts, prompt, LONG)
        samples = "vllm:num_requests_running"
        until("the request runs", lambda: sum(v for k, v in hosts.metrics(LEADER).items() if samples in k), timeout=60)
        evict(hosts, HOST)
        assert running.result() == expected
    wait_anew(hosts, before)
    until("both drains are told", lambda: len(outcomes(hosts, before)) == 2, timeout=30, last=lambda: status(hosts))
    assert outcomes(hosts, before) == ["Drained", "Drained"]
    assert "crashes" not in status(hosts), "somebody wanted it so"


def test_a_host_that_is_killed_restarts_its_replica_as_one(hosts: Kubectl, cluster: Cluster) -> None:
    before, victim = uids(hosts), pods(hosts)[HOST]
    send_signal(cluster, victim, "KILL")
    until("a crash is told", lambda: status(hosts).get("crashes"), timeout=60, last=lambda: status(hosts))
    wait_anew(hosts, before)
    crashes = status(hosts)["crashes"]
    (crash,) = [each for each in crashes if each["pod"] == HOST]
    assert (crash["reason"], crash["exitCode"], crash["rank"]) == ("Killed", 137, 1)
    assert crash["node"] == victim["spec"]["nodeName"]
    # A kubelet may have started the container again just before it hears that the pod is to go, and then ends it only
    # with its grace period: the new leader has met it by then, and falls once more.
    assert all((each["pod"], each["reason"]) == (LEADER, "HostLost") for each in crashes if each is not crash), crashes
    (counted,) = status(hosts)["restarts"]
    assert (counted["replica"], counted["count"]) == (LEADER, len(crashes))
    assert complete(hosts, [50, 51])


def test_a_host_that_hangs_is_found_by_its_leader(hosts: Kubectl, cluster: Cluster) -> None:
    before, (counted,) = uids(hosts), status(hosts)["restarts"]
    send_signal(cluster, pods(hosts)[HOST], "STOP")
    wait_anew(hosts, before)
    crash = status(hosts)["crashes"][0]
    assert (crash["pod"], crash["reason"], crash["exitCode"], crash["rank"]) == (LEADER, "HostLost", 70, 1)
    assert crash["marker"] == f"CRASH_{LEADER}"
    assert "silent" in crash["message"]
    assert [entry["count"] for entry in status(hosts)["restarts"]] == [counted["count"] + 1]


def test_nothing_is_left_of_it(hosts: Kubectl) -> None:
    hosts("delete", "glm52", NAME)
    until("every pod is gone", lambda: not hosts.list("pods", f"glm52.dev/name={NAME}"), timeout=BACK_SECONDS)
