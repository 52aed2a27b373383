"""From a bare machine to a usable cluster, and back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import build, daemon, golang, machine, network, nodeimage
from e2e.cluster.build import Built
from e2e.cluster.docker import Docker
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
from e2e.cluster.layers import prune
from e2e.cluster.machine import Facts, Way
from e2e.cluster.paths import Paths, digest, discard, find, sweep, write_atomically
from e2e.cluster.progress import Progress
from e2e.cluster.shell import run, together

NODE_IMAGE = "GLM52_NODE_IMAGE"  # a node image of the user's own, or "build" to build one in any case


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
            record, docker = _record(paths), _docker(paths)
            if record is not None:
                Kind(Path(record["kind"]), docker, paths).export_logs(folder)
            if docker.socket is not None:
                shutil.copy2(daemon.log_tail(paths), folder)
        dump: list[str | Path] = [
            self.kubectl,
            "--kubeconfig",
            self.kubeconfig,
            "get",
            "glm52,pods,events",
            "--all-namespaces",
            "-o",
            "yaml",
        ]
        with contextlib.suppress(Failed):
            (folder / "objects.yaml").write_text(run(dump, timeout=60))

    def on_node(self, node: str, *command: str, timeout: float = 60) -> str:
        """What a command prints that runs as root on a node; raises Failed where nodes are not ours to enter."""
        if self.mode != "kind":
            raise Failed(f"{node} is a node of your own cluster: {command[0]} is run on nodes of the local one only")
        return _docker(find(os.environ)).exec(node, *command, timeout=timeout)

    def down(self) -> None:
        down(Progress())


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
    if way.docker == "private":
        daemon.refuse_second(paths)
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
    private = way.docker == "private"
    if way.node == "built":
        with progress.phase("packages of this machine") as phase:
            daemon.install(phase, private)
    built = build.everything(paths, way, progress)
    before = network.remember(paths.network) if facts.root else None
    addresses = before.addresses if before else network.choose([])
    docker = daemon.client(paths) if private else Docker()
    restarted = False
    if private:
        with progress.phase("private Docker daemon"):
            restarted = daemon.start(paths, addresses, facts)
    image = env.get(NODE_IMAGE, "")
    if built.system is not None:
        with progress.phase("node image"):
            image = nodeimage.build(docker, facts, built.system, paths)
    config = configuration(addresses, facts, way, paths)
    key = digest([image, json.dumps(config)])
    kubectl: list[str | Path] = [built.tools.kubectl, "--kubeconfig", paths.kubeconfig]
    record = _record(paths)
    same = not restarted and record is not None and record["key"] == key
    if same and docker.nodes(running_only=True) == sorted(NODES) and api_answers(kubectl):
        with progress.phase("the cluster is up already; images of this code"):
            together(*(lambda node=node: built.give(docker, node) for node in WORKERS))
    else:
        paths.record.unlink(missing_ok=True)
        _delete_nodes(docker)
        prune(paths, time.time())
        make_network(docker, addresses)
        if facts.root:
            network.close(addresses, [network.NODE_BRIDGE, *([network.DOCKER_BRIDGE] if private else [])])
        _create(Kind(built.tools.kind, docker, paths), image, config, built, progress)
        with progress.phase("nodes, names and service addresses") as phase:
            wait_until_usable(docker, kubectl, addresses, phase)
    cluster = Cluster(paths.kubeconfig, built.tools.kubectl, built.tools.helm, built.images)
    write_atomically(paths.record, json.dumps({
        "key": key, "private": private, "kubeconfig": str(cluster.kubeconfig), "kubectl": str(cluster.kubectl),
        "helm": str(cluster.helm), "kind": str(built.tools.kind), "images": cluster.images,
    }))  # fmt: skip
    return cluster


def _create(kind: Kind, image: str, config: dict[str, Any], built: Built, progress: Progress) -> None:
    """Create the cluster, and bring our images in while kubeadm is at work."""
    ended = threading.Event()

    def create() -> None:
        try:
            with progress.phase("cluster of three nodes") as phase:
                kind.create(image, config, phase)
        finally:
            ended.set()

    def give(node: str) -> None:
        when_containerd_answers(kind.docker, node, lambda: built.give(kind.docker, node), ended)
        progress.say(f"our images are on {node}")

    together(create, *(lambda node=node: give(node) for node in WORKERS))


def _given(env: Mapping[str, str], paths: Paths, progress: Progress | None = None) -> Cluster:
    """CLUSTER=kubeconfig: the user's cluster, the user's images."""
    machine.check_kubeconfig_mode(env)
    with (progress or Progress()).phase("kubectl and helm") as phase:
        kubectl, helm = build.kubectl(paths), build.helm(paths, phase)
    images = {"operator": env["GLM52_OPERATOR_IMAGE"], "engine": env["GLM52_ENGINE_IMAGE"]}
    return Cluster(Path(env["KUBECONFIG"]), kubectl, helm, images, mode="kubeconfig")


def _published_image_is_to_be_had(facts: Facts, env: Mapping[str, str]) -> bool:
    """Whether the daemon that answers has, or can pull, a node image; asked only of a daemon of the user's own."""
    wish = env.get(NODE_IMAGE, "")
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


def _delete_nodes(docker: Docker) -> None:
    """What `kind delete cluster` does, without needing kind."""
    nodes = docker.nodes()
    if nodes:
        docker("rm", "--force", "--volumes", *nodes)


def _has_containers(paths: Paths) -> bool:
    folder = paths.docker / "data" / "containers"
    return folder.is_dir() and any(folder.iterdir())


def _record(paths: Paths) -> dict[str, Any] | None:
    try:
        record = json.loads(paths.record.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
