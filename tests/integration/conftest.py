"""The operator on a real control plane without nodes: how to write a test.

    def test_a_crash_is_told(space: Space, operator: Process, kubelets: Kubelets) -> None:
        space.apply(deployment("chat", decode={"replicas": 2}))      # server-side apply into the test's own namespace
        space.until_ready("chat")
        kubelets.crash(space.name, "chat-decode-0", Exit(1, termination(reason="Crashed", message="rank 3 died")))
        space.until_condition("chat", "DecodeReady", status="True")

* `space` is a fresh namespace. `seen`, `all_seen`, `pods`, `children`, `condition` answer from watches and are meant
  for `space.until(what, probe, timeout, last)`, which asks again after each event of the cluster: no test polls.
  `get` asks the API server. An edit's generation is in its answer: `space.until_ready("chat", generation)`.
* `operator` is a process that serves the space, with the token and the permissions of the chart. `install(...)` makes
  other ones: `install(space.name, cluster_wide=False)`, `.start(server=proxy.url)`, and each process has `kill()`,
  `end()`, `start()` (again), `text()` (its log), `metrics()`, `status("/readyz")`. `installed.audit()` counts requests.
* `kubelets` plays scheduler and kubelets. Pods run and are ready at once; before an apply say otherwise by
  `kubelets.live(Life(warm_up=FOREVER), space.name, role="decode")`, `kubelets.lacks_image("x")`; afterwards do to a
  pod what shall befall it: `crash`, `oom_kill`, `ready(..., False)`, `restart`, `release`
  (see e2e/controlplane/standin.py).
* `proxy` breaks connections between an operator and the API server; `plane.restart_apiserver()` breaks everybody's.

Deadlines are a minute unless said otherwise: they are for machines that are busy, and no measure of anything.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.controlplane.cluster import Cluster, Loop
from e2e.controlplane.operator import Installed, Process
from e2e.controlplane.plane import ControlPlane
from e2e.controlplane.programs import Programs, programs
from e2e.controlplane.proxy import Proxy
from e2e.controlplane.space import Space
from e2e.controlplane.standin import Kubelets
from glm52_operator.api.crd import crd

Install = Callable[..., Installed]


@pytest.fixture(scope="session")
def binaries() -> Programs:
    return programs()


@pytest.fixture(scope="session")
def plane(binaries: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    plane = ControlPlane(binaries, tmp_path_factory.mktemp("plane"))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.stop()


@pytest.fixture(scope="session")
def api(plane: ControlPlane, loop: Loop) -> Iterator[Cluster]:
    """The whole cluster; the CRD is served."""
    cluster = Cluster(plane, loop)
    cluster.install_crd(crd())
    cluster.watch()
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def kubelets(plane: ControlPlane, api: Cluster, loop: Loop) -> Iterator[Kubelets]:
    kubelets = Kubelets(plane, loop)
    yield kubelets
    kubelets.close()


@pytest.fixture
def space(api: Cluster, kubelets: Kubelets, request: pytest.FixtureRequest) -> Iterator[Space]:
    """A fresh namespace; what is in it goes when the test is over."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    api.create_namespace(name)
    yield Space(api, name)
    api.delete("Namespace", None, name)


@pytest.fixture
def install(binaries: Programs, api: Cluster, tmp_path: Path) -> Iterator[Install]:
    """`install(*namespaces, cluster_wide=True, edit=None)`: a release in a namespace of its own."""
    made: list[Installed] = []

    def install(*serves: str, **more: Any) -> Installed:
        release = f"op-{uuid.uuid4().hex[:8]}"
        api.create_namespace(release)
        folder = tmp_path / release
        folder.mkdir()
        made.append(Installed(api, binaries, folder, release, serves, **more))
        return made[-1]

    yield install
    for each in made:
        each.stop()
        api.delete("Namespace", None, each.release)


@pytest.fixture
def installed(install: Install, space: Space) -> Installed:
    """A release that serves the test's namespace."""
    return install(space.name)


@pytest.fixture
def operator(installed: Installed) -> Process:
    return installed.start()


@pytest.fixture
def proxy(plane: ControlPlane, loop: Loop) -> Iterator[Proxy]:
    proxy = Proxy(plane.port, loop)
    yield proxy
    proxy.close()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.integration)
