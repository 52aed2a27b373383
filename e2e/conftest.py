"""One deployment that the serving tests share, and the oracle beside it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import busy as busy_deployment
from e2e.cluster import Cluster
from e2e.deployed import Deployed
from e2e.kube import Kubectl, until, wait_ready
from e2e.manifests import deployment
from e2e.reference import Reference

CHAT = "chat"
CHAT_PORT = 30081


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny preset, byte for byte what the pods make for themselves."""
    from glm52_engine.checkpoint.make import make_checkpoint

    out = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint("tiny", out)
    return out


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="session")
def chat(kubectl: Kubectl, cluster: Cluster) -> Iterator[Kubectl]:
    """kubectl in the namespace of a Ready deployment `chat`, whose router answers on CHAT_URL."""
    namespace = "t-chat"
    kubectl("delete", "namespace", namespace, "--ignore-not-found", timeout=180)
    kubectl("create", "namespace", namespace)
    within = kubectl.within(namespace)
    within.apply(deployment(CHAT, node_port=CHAT_PORT))
    wait_ready(within, CHAT)
    yield within
    kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="session")
def chat_url(chat: Kubectl) -> str:
    return router_url(CHAT_PORT)


@pytest.fixture(scope="module")
def busy(kubectl: Kubectl) -> Iterator[Deployed]:
    """A Ready deployment with two of everything; see e2e.busy."""
    namespace = "t-busy"
    kubectl("delete", "namespace", namespace, "--ignore-not-found", timeout=180)
    kubectl("create", "namespace", namespace)
    found = Deployed(kubectl.within(namespace), busy_deployment.NAME)
    found.kube.apply(busy_deployment.manifest())
    found.wait()
    yield found
    kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def busy_url(busy: Deployed) -> str:
    return router_url(busy_deployment.PORT)


@pytest.fixture(scope="session")
def other_image(kubectl: Kubectl, cluster: Cluster) -> str:
    """The engine image under another name, as one of another version would have it, on every node that takes pods."""
    image = cluster.images["engine"]
    other = f"{image}-upgrade"
    for node in kubectl.list("nodes", "!node-role.kubernetes.io/control-plane"):
        cluster.on_node(node["metadata"]["name"], "ctr", "-n", "k8s.io", "images", "tag", "--force", image, other)
    return other


def router_url(port: int) -> str:
    """Where a router answers that is Ready behind a node port."""
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    # Ready says that the pods serve; kube-proxy on the node that we enter by may be a moment behind.
    until("the router answers on its node port", answers, timeout=30)
    return url
