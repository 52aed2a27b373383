"""A control plane, an installed operator and a stand-in for kubelets, for benchmarks of the operator."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from e2e.cluster.golang import KUBERNETES
from e2e.controlplane.client import Client, Object
from e2e.controlplane.cluster import Cluster, Loop
from e2e.controlplane.operator import Installed
from e2e.controlplane.plane import ADMIN, ControlPlane
from e2e.controlplane.programs import programs
from e2e.controlplane.space import CHILD_KINDS
from e2e.controlplane.standin import Kubelets
from e2e.kube import condition
from glm52_operator.api.crd import crd

SETTLED_SECONDS = 3.0
"""Without a request of the operator for that long, it has nothing more to do."""

PATIENCE = 900.0


class Rig:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        binaries = programs()
        self.plane = ControlPlane(binaries, folder / "plane")
        self.plane.start()
        self.loop = Loop()
        self.cluster = Cluster(self.plane, self.loop)
        self.cluster.install_crd(crd())
        self.cluster.watch()
        self.kubelets = Kubelets(self.plane, self.loop)
        self.client = self.loop.run(self._connect())
        self.cluster.create_namespace("operator")
        self.installed = Installed(self.cluster, binaries, folder, "operator", ())
        self.audit = self.installed.audit()

    async def _connect(self) -> Client:
        return Client(self.plane.server, self.plane.ca, self.plane.tokens[ADMIN], "bench")

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.installed.stop()
        self.kubelets.close()
        self.cluster.close()
        self.loop.run(self.client.close())
        self.loop.stop()
        self.plane.stop()

    def namespace(self, name: str) -> str:
        self.cluster.create_namespace(name)
        return name

    def remove_namespace(self, name: str) -> None:
        """Returns when nothing of it is left: what goes on there would count for what comes after."""
        self.cluster.delete("Namespace", None, name)
        self.cluster.until(
            f"{name} is empty",
            lambda: not any(self.cluster.count(kind, name) for kind in ("GLM52Deployment", *CHILD_KINDS)),
            PATIENCE,
            pause=0.05,
        )

    def until_count(self, kind: str, namespace: str, number: int) -> None:
        self.cluster.until(
            f"{number} {kind}s",
            lambda: self.cluster.count(kind, namespace) >= number,
            PATIENCE,
            lambda: self.cluster.count(kind, namespace),
        )

    def until_ready(self, namespace: str, number: int) -> None:
        self._until_all(namespace, number, "Ready")

    def until_reported(self, namespace: str, number: int) -> None:
        """Every deployment's children are applied."""
        self._until_all(namespace, number, "ConfigValid")

    def _until_all(self, namespace: str, number: int, kind: str) -> None:
        def all_there() -> bool:
            found = self.cluster.all_seen("GLM52Deployment", namespace)
            return len(found) >= number and all(_current(each, kind) for each in found)

        self.cluster.until(f"{number} deployments have {kind}=True", all_there, PATIENCE, pause=0.05)

    def until_settled(self, seconds: float = SETTLED_SECONDS) -> None:
        """The operator has asked for nothing for so long."""
        deadline = time.monotonic() + PATIENCE
        last, since = -1, time.monotonic()
        while time.monotonic() - since < seconds:
            assert time.monotonic() < deadline, "the operator does not come to rest"
            now = sum(r.resource != "leases" and r.verb != "watch" for r in self.audit.since())
            if now != last:
                last, since = now, time.monotonic()
            time.sleep(0.25)

    def children(self, namespace: str) -> int:
        return sum(
            "glm52.dev/name" in obj["metadata"].get("labels", {})
            for kind in CHILD_KINDS
            for obj in self.cluster.all_seen(kind, namespace)
        )

    def expect(self, kind: str, namespace: str, name: str, probe: Callable[[Object], bool]) -> asyncio.Future[float]:
        """Within the loop: when the watch brought the object in that state, on the monotonic clock."""
        return self.cluster.expect(kind, namespace, name, probe)

    async def expecting(
        self, kind: str, namespace: str, name: str, probe: Callable[[Object], bool]
    ) -> asyncio.Future[float]:
        return self.expect(kind, namespace, name, probe)

    async def when(self, seen: asyncio.Future[float]) -> float:
        return await seen


def _current(obj: Object, kind: str) -> bool:
    found = condition(obj, kind)
    return found.get("status") == "True" and found.get("observedGeneration") == obj["metadata"]["generation"]


def process_figures(pid: int) -> dict[str, float]:
    """CPU seconds since its start, and resident memory now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    ticks = os.sysconf("SC_CLK_TCK")
    return {"cpu_seconds": (int(fields[11]) + int(fields[12])) / ticks, "rss_mib": round(kib / 1024, 1)}


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * int(percent) // 100) - 1))]


def describe_machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "machine": {"cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory)},
        "versions": {
            "kubernetes": KUBERNETES,
            "python": platform.python_version(),
            "kopf": version("kopf"),
            "kubernetes client": version("kubernetes"),
        },
    }
