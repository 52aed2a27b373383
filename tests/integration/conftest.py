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
* `kube` is the real kubectl in a namespace of the test file, `server` asks about objects without writing them.
* `proxy` breaks connections between an operator and the API server; `plane.restart_apiserver()` breaks everybody's.

Deadlines are a minute unless said otherwise: they are for machines that are busy, and no measure of anything.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.paths import REPO
from e2e.controlplane.client import Object, Refused, path
from e2e.controlplane.cluster import Cluster, Loop
from e2e.controlplane.operator import Installed, Process
from e2e.controlplane.plane import ADMIN, ControlPlane
from e2e.controlplane.programs import Programs, programs
from e2e.controlplane.proxy import Proxy
from e2e.controlplane.space import Space
from e2e.controlplane.standin import Kubelets
from e2e.kube import Kubectl
from glm52_operator.api.crd import crd

ROOT = REPO
Install = Callable[..., Installed]
Server = Callable[[Object], tuple[bool, str]]


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


@pytest.fixture(scope="session")
def kubectl(plane: ControlPlane, api: Cluster, kubelets: Kubelets) -> Kubectl:
    """The real kubectl, for what is about what it says."""
    kubeconfig = plane.kubeconfig(plane.folder / "admin.kubeconfig", plane.tokens[ADMIN])
    return Kubectl(plane.program("kubectl"), kubeconfig)


@pytest.fixture(scope="module")
def server(api: Cluster, cluster_namespace: str) -> Server:
    """Ask the API server about an object, writing nothing: whether it takes it, and what it says.

    As strict as kubectl asks it to be, but without a process per question.
    """

    def ask(obj: Object) -> tuple[bool, str]:
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        try:
            api.request("POST", path("GLM52Deployment", cluster_namespace), obj, query)
        except Refused as error:
            return False, str(error)
        return True, ""

    return ask


@pytest.fixture
def install(binaries: Programs, api: Cluster, tmp_path: Path) -> Iterator[Install]:
    """`install(*namespaces, cluster_wide=True, edit=None)`: a release in a namespace of its own."""
    yield from _installer(binaries, api, tmp_path)


@pytest.fixture(scope="module")
def make_install(binaries: Programs, api: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Install]:
    """The same for an operator that all tests of a file use."""
    yield from _installer(binaries, api, tmp_path_factory.mktemp("releases"))


def _installer(binaries: Programs, api: Cluster, folder: Path) -> Iterator[Install]:
    made: list[Installed] = []

    def install(*serves: str, **more: Any) -> Installed:
        release = f"op-{uuid.uuid4().hex[:8]}"
        api.create_namespace(release)
        own = folder / release
        own.mkdir()
        made.append(Installed(api, binaries, own, release, serves, **more))
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
