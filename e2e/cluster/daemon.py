"""A private dockerd: own socket, folders, bridge and cgroup, next to any Docker that the machine has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from e2e.cluster import debian, network, processes
from e2e.cluster.docker import Docker
from e2e.cluster.errors import Failed, Refused
from e2e.cluster.machine import Facts
from e2e.cluster.mounts import unmount_below
from e2e.cluster.network import Addresses
from e2e.cluster.paths import HERE, Paths, write_atomically
from e2e.cluster.progress import Phase
from e2e.cluster.shell import ok, run

START_SECONDS = 60
STOP_SECONDS = 20


def client(paths: Paths) -> Docker:
    return Docker(paths.docker / "docker.sock", shutil.which("docker") or "/usr/bin/docker")


def install(phase: Phase, private: bool) -> None:
    """Install what the node image's build, and with `private` the daemon, need and the machine lacks."""
    wanted = {"iptables": "iptables", "ip": "iproute2", "debootstrap": "debootstrap"}
    if private:
        wanted |= {"dockerd": "docker.io", "docker": "docker.io"}
    missing = sorted({package for program, package in wanted.items() if shutil.which(program) is None})
    if missing:
        debian.install(missing, phase)


def refuse_second(paths: Paths) -> None:
    """Two clusters of this project would share ports, bridges and cgroup, and each would sweep the other away."""
    for pid in processes.everyone():
        other = foreign_cache(processes.command_line(pid), paths)
        if other is not None:
            raise Refused(f"A cluster runs from another cache: use it, or end it with GLM52_CACHE={other} make down.")


def foreign_cache(command: str, paths: Paths) -> Path | None:
    """The cache of a private daemon that is not the one of `paths`, if that command line is of one."""
    program, _, file = command.partition(" --config-file ")
    if os.path.basename(program) != "dockerd" or not file.endswith("/state/docker/daemon.json"):
        return None
    cache = Path(file).parents[2]
    return None if cache == paths.cache else cache


def configuration(paths: Paths, addresses: Addresses, facts: Facts) -> dict[str, Any]:
    """The daemon's configuration file."""
    home = paths.docker
    config: dict[str, Any] = {
        "data-root": str(home / "data"),
        "exec-root": str(home / "exec"),
        "pidfile": str(home / "docker.pid"),
        "hosts": [f"unix://{home / 'docker.sock'}"],
        "bridge": network.DOCKER_BRIDGE,
        "default-address-pools": [{"base": addresses.nodes, "size": 24}],
        # Nothing listens there: a name that is not in the cluster fails at once and is asked for nowhere else.
        "dns": [addresses.docker_gateway],
        "ip6tables": False,
        "storage-driver": "overlay2",
        "cgroup-parent": f"/{processes.CGROUP}",
        "exec-opts": ["native.cgroupdriver=cgroupfs"],  # systemd may not be there, and would not take our parent
        "log-opts": {"max-size": "20m"},
    }
    if not facts.sys_resource:
        config["oom-score-adjust"] = 0
        config["runtimes"] = {"softened": {"path": str(home / "oci-runtime")}}
        config["default-runtime"] = "softened"
    return config


def start(paths: Paths, addresses: Addresses, facts: Facts) -> bool:
    """Start the daemon unless it answers; whether it was started."""
    docker = client(paths)
    if docker.answers():
        return False
    sweep(paths)
    home = paths.docker
    home.mkdir(parents=True, exist_ok=True)
    runtime = (HERE / "files" / "oci-runtime").read_text().replace("@RUNC@", shutil.which("runc") or "/usr/sbin/runc")
    # -IS: without site-packages it starts in a third of the time, and it runs before every docker exec.
    write_atomically(home / "oci-runtime", f"#!{os.path.realpath(sys.executable)} -IS\n{runtime}", 0o755)
    write_atomically(home / "daemon.json", json.dumps(configuration(paths, addresses, facts), indent=1))
    _make_bridge(addresses)
    with (home / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            [shutil.which("dockerd") or "/usr/sbin/dockerd", "--config-file", str(home / "daemon.json")],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
        )  # fmt: skip
    deadline = time.monotonic() + START_SECONDS
    while not docker.answers():
        if daemon.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join((home / "dockerd.log").read_text(errors="replace").splitlines()[-15:])
            raise Failed(f"dockerd did not start; the end of {home / 'dockerd.log'}:\n{tail}")
        time.sleep(0.1)
    return True


def _make_bridge(addresses: Addresses) -> None:
    """Docker makes only a bridge called docker0 itself, and that one may be someone else's."""
    bridge = network.DOCKER_BRIDGE
    if not ok(["ip", "link", "show", bridge]):
        run(["ip", "link", "add", bridge, "type", "bridge"])
    run(["ip", "address", "replace", addresses.docker_bip, "dev", bridge])
    run(["ip", "link", "set", bridge, "up"])


def stop(paths: Paths) -> None:
    """Stop the daemon and whatever is left of it or of its containers, whatever state they are in."""
    daemons = [pid for pid in processes.mentioning(paths.docker) if "dockerd" in processes.command_line(pid)]
    processes.end(daemons, STOP_SECONDS, lambda pid: "dockerd" in processes.command_line(pid))
    sweep(paths)


def sweep(paths: Paths) -> None:
    """Clear the remains of a daemon that was killed: shims, nodes' processes, mounts, cgroups, pid files, sockets."""
    left = processes.mentioning(paths.docker)
    processes.end(left, 5, lambda pid: processes.belongs(processes.command_line(pid), paths.docker))
    # Nodes are killed at once: systemd as a process 1 ignores TERM, and no one is left to collect its pods.
    for _ in range(20):
        inside = processes.in_cgroup()
        if not inside:
            break
        processes.end(inside, 0, lambda pid: pid in processes.in_cgroup())
    network.cut_cables()
    unmount_below(paths.docker)
    processes.remove_cgroups()
    for stale in ("docker.pid", "docker.sock"):
        (paths.docker / stale).unlink(missing_ok=True)
    # dockerd refuses to start on the pid file of a containerd that is no more.
    shutil.rmtree(paths.docker / "exec", ignore_errors=True)


def log_tail(paths: Paths) -> Path:
    return paths.docker / "dockerd.log"
