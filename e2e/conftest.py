"""One deployment that the serving tests share, and the oracle beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import Cluster
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
    import urllib.request

    url = f"http://127.0.0.1:{CHAT_PORT}"

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    # Ready says that the pods serve; kube-proxy on the node that we enter by may be a moment behind.
    until("the router answers on its node port", answers, timeout=30)
    return url
