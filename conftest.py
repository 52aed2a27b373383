"""Fixtures of every test that runs on the cluster: tests/**/cluster and e2e/."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from e2e.cluster import Cluster, attach
from e2e.kube import Kubectl

# An example may take as long as a busy machine makes it: a test that says "too slow" of 200 ms is not about our code.
hypothesis.settings.register_profile("glm52", deadline=None)
hypothesis.settings.load_profile("glm52")

GROUPS = {
    "oracle": ("tests/engine/model/", "tests/engine/tokenizer/"),
    "chat": ("e2e/test_serving.py", "e2e/test_scale.py"),
    "operator": ("e2e/test_operator.py", "e2e/test_runbooks.py", "e2e/test_hosts.py"),
}
"""Files that one worker runs: the first import transformers, which takes ten seconds; the second share a deployment; of
the third the first takes the operator away, and the others ask how pods ended that no operator would then have seen."""


ENGINE = tuple(
    f"tests/engine/{part}/"
    for part in ("clients", "hisparse", "kernels", "local", "model", "offload", "route", "runtime", "serve", "transfer")
)
"""Tests that compute: a model or a kernel runs, or whole pods over HTTP within the process."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid.startswith(ENGINE):
        item.add_marker(pytest.mark.engine)


@pytest.hookimpl(trylast=True)  # when what is not asked for has been taken out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """xdist runs one of several tests that bear the same name, and says nothing of the others."""
    if hasattr(config, "workerinput"):
        twice = [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]
        if twice:
            raise pytest.UsageError(f"several tests are named {twice[0]}: run them without -n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file to a worker, but for `GROUPS`.

    Not --dist loadgroup: of pytest 9.2 on it reads no groups any more, says nothing, and deals out single tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return next((name for name, files in GROUPS.items() if file.startswith(files)), file)

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The running cluster (make up, or `python -m e2e.cluster up --no-example`) with the operator installed."""
    return attach()


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> Kubectl:
    return Kubectl(cluster.kubectl, cluster.kubeconfig)


@pytest.fixture(scope="module")
def cluster_namespace(kubectl: Kubectl, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace for each test module, gone with everything in it afterwards."""
    stem = re.sub(r"[^a-z0-9]+", "-", request.path.stem.removeprefix("test_").lower())
    name = f"t-{stem}-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="module")
def kube(kubectl: Kubectl, cluster_namespace: str) -> Kubectl:
    """kubectl within the module's namespace."""
    return kubectl.within(cluster_namespace)
