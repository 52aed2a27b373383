"""On the running cluster: the nodes are whole and hold our images, and each image holds only what it should."""

from __future__ import annotations

import subprocess
import sys

import pytest

from e2e.cluster import Cluster
from e2e.cluster.paths import REPO
from e2e.cluster.tour import kubectl

pytestmark = pytest.mark.cluster
WITHOUT = {"operator": "torch", "engine": "kopf"}


def test_three_nodes_are_ready(cluster: Cluster) -> None:
    ready = kubectl(cluster, "get", "nodes", "-o", "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}")
    assert ready.split() == ["True"] * 3


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_an_image_runs_unprivileged_and_holds_only_its_own(cluster: Cluster, name: str) -> None:
    package = WITHOUT[name]
    code = f"import glm52_engine.config, importlib.util as u, os; print(os.getuid(), u.find_spec({package!r}))"
    pod = f"holds-{name}"
    kubectl(cluster, "delete", "pod", pod, "--ignore-not-found")
    kubectl(
        cluster, "run", pod, "--restart=Never", "--image", cluster.images[name], "--image-pull-policy=Never",
        "--command", "--", "python3", "-c", code,
    )  # fmt: skip
    # Not --attach: it shows nothing of a container that ends before it is attached to.
    kubectl(cluster, "wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{pod}", "--timeout=110s", timeout=120)
    said = kubectl(cluster, "logs", pod)
    kubectl(cluster, "delete", "pod", pod, "--wait=false")
    assert said.split() == ["10001", "None"]


def test_up_again_changes_nothing(cluster: Cluster) -> None:
    before = kubectl(cluster, "get", "nodes", "-o", "jsonpath={.items[*].metadata.uid}")
    subprocess.run([sys.executable, "-m", "e2e.cluster", "up", "--cluster-only"], cwd=REPO, check=True, timeout=280)
    assert kubectl(cluster, "get", "nodes", "-o", "jsonpath={.items[*].metadata.uid}") == before
