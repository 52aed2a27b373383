"""What this machine is and can do, and which way to a cluster follows from it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from e2e.cluster.errors import Refused
from e2e.cluster.shell import ok

CAP_SYS_RESOURCE = 24


@dataclass(frozen=True)
class Facts:
    """What was found out without changing anything."""

    system: str
    machine: str
    root: bool
    docker_answers: bool
    dockerd: bool
    apt: bool
    foreign_docker: bool  # Docker's own packages, which docker.io would push out
    sys_resource: bool
    cgroup_v2: bool


@dataclass(frozen=True)
class Way:
    """How to get a cluster here."""

    docker: Literal["yours", "private"]
    node: Literal["published", "built"]


def probe() -> Facts:
    """Look around."""
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        root=os.geteuid() == 0,
        docker_answers=shutil.which("docker") is not None and ok(["docker", "info"], timeout=20),
        dockerd=shutil.which("dockerd") is not None,
        apt=shutil.which("apt-get") is not None,
        foreign_docker=ok(["dpkg", "-s", "docker-ce"]) or ok(["dpkg", "-s", "containerd.io"]),
        sys_resource=has_sys_resource(_read("/proc/self/status")),
        cgroup_v2=Path("/sys/fs/cgroup/cgroup.controllers").exists(),
    )


def has_sys_resource(status: str) -> bool:
    """Whether CAP_SYS_RESOURCE is in the bounding set, out of /proc/self/status: a container may then be given it."""
    for line in status.splitlines():
        if line.startswith("CapBnd:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1)
    return True


def decide(facts: Facts, published_image: bool) -> Way:
    """The way to a cluster, or one sentence on what is missing; `published_image`: kind's own can be had."""
    if facts.docker_answers and published_image:
        return Way("yours", "published")
    if facts.system != "Linux" or facts.machine not in ("x86_64", "aarch64"):
        raise Refused("No Docker daemon with kind's node image answers: start Docker (or use CLUSTER=kubeconfig).")
    if not facts.root:
        need = "kind's node image cannot be pulled" if facts.docker_answers else "No Docker daemon answers"
        raise Refused(
            f"{need}, and only root can do without: start Docker, run this as root, or use CLUSTER=kubeconfig."
        )
    if not facts.apt:
        raise Refused(
            "The node image is built from Debian packages and apt-get is missing: "
            "start Docker with access to kind's node image, or use CLUSTER=kubeconfig."
        )
    if facts.docker_answers:
        return Way("yours", "built")
    if not facts.dockerd and facts.foreign_docker:
        raise Refused(
            "Docker's packages are installed without their daemon: install docker-ce, or remove containerd.io."
        )
    return Way("private", "built")


def check_kubeconfig_mode(env: Mapping[str, str]) -> None:
    """CLUSTER=kubeconfig needs three things from the user."""
    wanted = {
        "KUBECONFIG": "the cluster to install into",
        "GLM52_OPERATOR_IMAGE": "the operator's image, as that cluster can pull it",
        "GLM52_ENGINE_IMAGE": "the engine's image, as that cluster can pull it",
    }
    missing = [f"{name} ({what})" for name, what in wanted.items() if not env.get(name)]
    if missing:
        raise Refused(f"CLUSTER=kubeconfig needs {', '.join(missing)}: set it and run this again.")
    for file in env["KUBECONFIG"].split(os.pathsep):
        if not Path(file).is_file():
            raise Refused(f"KUBECONFIG names {file}, which is no file: correct it and run this again.")


def _read(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""
