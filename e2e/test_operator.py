"""The operator over time: Ready never comes early, a restart changes nothing, deletion leaves nothing."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from e2e.kube import Kubectl, Object, condition, is_current, until, wait_ready
from e2e.manifests import deployment

pytestmark = pytest.mark.cluster

CHILDREN = "statefulsets,deployments,services,secrets,poddisruptionbudgets,serviceaccounts,roles,rolebindings"
NAME = "steady"
PORT = 30082
STEADY = deployment(NAME, node_port=PORT)


def children(kube: Kubectl) -> dict[str, Object]:
    found = kube.list(CHILDREN, f"glm52.dev/name={NAME}")
    return {f"{o['kind']}/{o['metadata']['name']}": o["metadata"] for o in found}


def restart_operator(kubectl: Kubectl) -> None:
    kubectl("--namespace=glm52-system", "delete", "pod", "-l", "app.kubernetes.io/name=glm52-operator", "--wait=false")


def operator_is_back(kubectl: Kubectl) -> None:
    kubectl("--namespace=glm52-system", "rollout", "status", "deployment/glm52-operator", "--timeout=90s")


def patch(kube: Kubectl, spec: Object) -> None:
    kube("patch", "glm52", NAME, "--type=merge", "-p", json.dumps({"spec": spec}))


def seats(kube: Kubectl) -> int:
    pod = kube.get("pod", f"{NAME}-decode-0")
    assert pod is not None
    return int(json.loads(pod["metadata"]["annotations"]["glm52.dev/config"])["decode"]["max_num_seqs"])


@pytest.fixture(scope="module")
def steady(kube: Kubectl) -> Kubectl:
    kube.apply(STEADY)
    wait_ready(kube, NAME)
    return kube


def test_waiting_right_after_an_edit_does_not_return_early(steady: Kubectl) -> None:
    old = steady.get("pod", f"{NAME}-decode-0")
    assert old is not None
    patch(steady, {"decode": {"maxNumSeqs": 5}})
    wait_ready(steady, NAME)
    new = steady.get("pod", f"{NAME}-decode-0")
    assert seats(steady) == 5
    assert new is not None
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert all(c["status"] == "True" for c in new["status"]["conditions"] if c["type"] == "Ready")


def test_a_restart_at_rest_writes_nothing(kubectl: Kubectl, steady: Kubectl) -> None:
    before = children(steady)
    mine = steady.get("glm52", NAME)
    restart_operator(kubectl)
    operator_is_back(kubectl)
    # A change to another object proves that the new operator has worked through its queue.
    steady.apply(deployment("probe", prefill={"replicas": 0}, decode={"replicas": 0}))
    until("the new operator reconciles", lambda: (steady.get("glm52", "probe") or {}).get("status"), timeout=60)
    steady("delete", "glm52", "probe")
    assert {k: v["resourceVersion"] for k, v in children(steady).items()} == {
        k: v["resourceVersion"] for k, v in before.items()
    }
    after = steady.get("glm52", NAME)
    assert mine is not None
    assert after is not None
    assert after["metadata"]["resourceVersion"] == mine["metadata"]["resourceVersion"]
    assert "finalizers" not in after["metadata"]
    assert not [a for a in after["metadata"].get("annotations", {}) if "kubectl" not in a]


@pytest.mark.parametrize(
    ("change", "done"),
    [
        pytest.param(lambda kube: patch(kube, {"decode": {"maxNumSeqs": 7}}), lambda kube: seats(kube) == 7, id="edit"),
        pytest.param(
            lambda kube: kube("scale", "glm52", NAME, "--replicas=2"),
            lambda kube: kube.get("pod", f"{NAME}-decode-1") is not None,
            id="scale up",
        ),
        pytest.param(
            lambda kube: kube("scale", "glm52", NAME, "--replicas=1"),
            lambda kube: kube.get("pod", f"{NAME}-decode-1") is None,
            id="scale down",
        ),
    ],
)
def test_a_restart_in_the_middle_changes_nothing(
    kubectl: Kubectl, steady: Kubectl, change: Callable[[Kubectl], object], done: Callable[[Kubectl], bool]
) -> None:
    before = children(steady)
    change(steady)
    restart_operator(kubectl)
    until("the change is there", lambda: done(steady), timeout=120)
    wait_ready(steady, NAME)
    operator_is_back(kubectl)
    after = children(steady)
    assert lasting(after) == lasting(before)
    secret = f"Secret/{NAME}-internal"
    assert after[secret]["resourceVersion"] == before[secret]["resourceVersion"]
    assert is_current(steady.get("glm52", NAME), "Ready")


def lasting(children: dict[str, Object]) -> dict[str, str]:
    """Without budgets: a role of one pod has none."""
    return {name: meta["uid"] for name, meta in children.items() if not name.startswith("PodDisruptionBudget/")}


def test_a_deployment_that_is_deleted_and_applied_again_at_once_answers(steady: Kubectl) -> None:
    """Its new pods start where old ones still end: they must not be given what those had mounted."""
    steady("delete", "glm52", NAME)
    steady.apply(STEADY)
    wait_ready(steady, NAME)
    body = json.dumps({"model": "glm-5.2", "prompt": "once more", "max_tokens": 4}).encode()
    question = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
    )

    def asked() -> int | None:
        # Ready says that the pods serve; kube-proxy on the node that we enter by may be a moment behind.
        try:
            with urllib.request.urlopen(question, timeout=30) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    assert until("the router is reached", asked, timeout=30) == 200


def test_a_deletion_with_a_restart_in_the_middle_leaves_nothing(kubectl: Kubectl, steady: Kubectl) -> None:
    assert condition(steady.get("glm52", NAME), "Ready")
    steady("delete", "glm52", NAME, "--wait=false")
    restart_operator(kubectl)
    operator_is_back(kubectl)
    until(
        "every child is gone",
        lambda: not children(steady) and not steady.list("pods", f"glm52.dev/name={NAME}"),
        timeout=120,
        last=lambda: list(children(steady)),
    )
