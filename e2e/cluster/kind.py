"""The cluster itself: kind's configuration, creating, waiting for what kind does not wait for, deleting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import network
from e2e.cluster.docker import CLUSTER, Docker
from e2e.cluster.errors import Failed
from e2e.cluster.layers import NODE_STORE
from e2e.cluster.machine import Facts, Way
from e2e.cluster.network import Addresses
from e2e.cluster.nodeimage import REPOSITORY
from e2e.cluster.paths import Paths
from e2e.cluster.progress import Phase
from e2e.cluster.shell import follow, ok, run

WORKERS = (f"{CLUSTER}-worker", f"{CLUSTER}-worker2")
NODES = (f"{CLUSTER}-control-plane", *WORKERS)
NODE_PORTS = (30080, 30081, 30082, 30083)  # the example's router; the rest are for tests


@dataclass(frozen=True)
class Kind:
    """One kind binary and the daemon that it works with."""

    binary: Path
    docker: Docker
    paths: Paths

    def variables(self) -> dict[str, str | None]:
        # Without the name kind would share the network "kind" with the user's own clusters.
        return {
            **self.docker.variables(),
            "KIND_EXPERIMENTAL_DOCKER_NETWORK": network.NETWORK,
            "KUBECONFIG": None,
        }

    def create(self, image: str, config: dict[str, Any], phase: Phase) -> None:
        file = self.paths.state / "kind.yaml"
        file.write_text(yaml.safe_dump(config, sort_keys=False))
        command: list[str | Path] = [
            self.binary,
            "create",
            "cluster",
            "--config",
            file,
            "--kubeconfig",
            self.paths.kubeconfig,
        ]
        if image:
            command += ["--image", image]
        follow(command, lambda line: phase.note(line.strip()), env=self.variables())

    def delete(self) -> None:
        run([self.binary, "delete", "cluster", "--name", CLUSTER, "--kubeconfig", self.paths.kubeconfig],
            env=self.variables(), timeout=120)  # fmt: skip

    def export_logs(self, folder: Path) -> None:
        run([self.binary, "export", "logs", "--name", CLUSTER, folder], env=self.variables(), timeout=300)


def configuration(addresses: Addresses, facts: Facts, way: Way, paths: Paths) -> dict[str, Any]:
    """kind's configuration: one control plane, two workers, reachable from this machine only."""
    node: dict[str, Any] = {}
    patches: list[dict[str, Any]] = []
    if way.node == "built":
        store = {"hostPath": str(paths.store), "containerPath": NODE_STORE, "readOnly": True}
        node["extraMounts"] = [store]
        patches.append({"kind": "ClusterConfiguration", "imageRepository": REPOSITORY})
    if not facts.cgroup_v2:
        patches.append({"kind": "KubeletConfiguration", "failCgroupV1": False})
    ports = [{"containerPort": port, "hostPort": port, "listenAddress": "127.0.0.1"} for port in NODE_PORTS]
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "name": CLUSTER,
        "networking": {
            "apiServerAddress": "127.0.0.1",
            "podSubnet": addresses.pods,
            "serviceSubnet": addresses.services,
        },
        "kubeadmConfigPatches": [yaml.safe_dump(patch) for patch in patches],
        "nodes": [{"role": "control-plane", **node, "extraPortMappings": ports}, {"role": "worker", **node},
                  {"role": "worker", **node}],
    }  # fmt: skip


def make_network(docker: Docker, addresses: Addresses) -> None:
    """The nodes' network: made before kind would, and without a way out."""
    if docker.ok("network", "inspect", network.NETWORK):
        return
    docker("network", "create", "--driver", "bridge", "--subnet", addresses.nodes, "--gateway", addresses.gateway,
           "--opt", f"com.docker.network.bridge.name={network.NODE_BRIDGE}",
           "--opt", "com.docker.network.bridge.enable_ip_masquerade=false", network.NETWORK)  # fmt: skip


def when_containerd_answers(docker: Docker, node: str, do: Callable[[], object], stop: threading.Event) -> None:
    """Do something on a node as soon as its containerd is up, which is long before the node is Ready."""
    while not stop.wait(0.25):
        if docker.ok("exec", node, "ctr", "version", timeout=10):
            do()
            return
    raise Failed(f"{node}: no containerd answered before the cluster's creation ended")


def wait_until_usable(docker: Docker, kubectl: list[str | Path], addresses: Addresses, phase: Phase) -> None:
    """All nodes Ready, names resolved, and the services' addresses working on every node."""
    phase.note("nodes Ready")
    run([*kubectl, "wait", "--for=condition=Ready", "nodes", "--all", "--timeout=120s"])
    phase.note("CoreDNS")
    run([*kubectl, "--namespace=kube-system", "rollout", "status", "deployment/coredns", "--timeout=120s"])
    deadline = time.monotonic() + 60
    for node in NODES:
        phase.note(f"service addresses on {node}")
        # A node is Ready even when its kube-proxy never writes a rule.
        while not service_answers(docker, node, addresses.api_service):
            if time.monotonic() > deadline:
                raise Failed(
                    f"{node} does not reach the service address {addresses.api_service}: kube-proxy is not working"
                )
            time.sleep(0.3)


def service_answers(docker: Docker, node: str, address: str) -> bool:
    return docker.ok("exec", node, "timeout", "2", "bash", "-c", f"</dev/tcp/{address}/443", timeout=10)


def api_answers(kubectl: list[str | Path]) -> bool:
    return ok([*kubectl, "get", "--raw=/readyz", "--request-timeout=5s"], timeout=10)
