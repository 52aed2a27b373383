"""What can befall an engine: signals from outside, memory that runs out, a node that falls silent. No pod takes part in
its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from e2e.cluster import Cluster
from e2e.kube import Failed, Kubectl, Object

ENGINE = "engine"

HOGS, HOG_MIB = 10, 512
"""Processes that fill a container, each smaller than an engine: the kernel ends the largest."""

FILL = f"""
import os, signal
for _ in range({HOGS}):
    if os.fork() == 0:
        kept = b"x" * ({HOG_MIB} << 20)
        signal.pause()
signal.pause()
"""


def send_signal(cluster: Cluster, pod: Object, name: str) -> None:
    """Sends a signal, for example KILL, to the engine's process from its node: within its container nothing, not even
    root, can send one to process 1 that it does not handle."""
    cluster.on_node(pod["spec"]["nodeName"], "kill", f"-{name}", str(engine_pid(cluster, pod)))


def engine_pid(cluster: Cluster, pod: Object) -> int:
    """The engine's process id on its node."""
    container = next(c for c in pod["status"]["containerStatuses"] if c["name"] == ENGINE)
    number = container["containerID"].rpartition("/")[2]
    # Under every version of cgroups and every driver of it the container's id is in the path.
    listed = f"cat $(find /sys/fs/cgroup -path '*{number}*' -name cgroup.procs) | sort -nu"
    first_in_container = (
        "for pid in $(" + listed + "); do grep -q '^NSpid:.*[^0-9]1$' /proc/$pid/status && echo $pid; done"
    )
    found = cluster.on_node(pod["spec"]["nodeName"], "sh", "-c", first_in_container + "; true").split()
    if len(found) != 1:
        raise Failed(f"pod {pod['metadata']['name']}: expected one process 1 in container {number}, found {found}")
    return int(found[0])


def fill_memory(kube: Kubectl, pod: str) -> None:
    """Takes memory in the engine's container until its limit is reached; returns when the kernel has ended it."""
    # As every process in it, this one ends with the container.
    kube("exec", pod, "-c", ENGINE, "--", "python3", "-c", FILL, check=False, timeout=120)


@contextlib.contextmanager
def silent_kubelet(cluster: Cluster, node: str) -> Iterator[None]:
    """The node's kubelet is stopped: containers run on, and the API server learns nothing of them. It is told that the
    node is not ready after 50 s."""
    cluster.on_node(node, "systemctl", "kill", "--signal=STOP", "kubelet")
    try:
        yield
    finally:
        cluster.on_node(node, "systemctl", "kill", "--signal=CONT", "kubelet")
