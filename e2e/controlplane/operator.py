"""The operator as it is installed: the chart's own permissions, a token of its service account, a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.paths import REPO
from e2e.cluster.shell import run
from e2e.controlplane.audit import Audit
from e2e.controlplane.client import Object, path
from e2e.controlplane.cluster import Cluster, Late
from e2e.controlplane.daemon import Daemon, free_port
from e2e.controlplane.programs import Programs
from e2e.kube import parse_metrics

CHART = REPO / "charts/glm52-operator"
NAME = "glm52-operator"
ENGINE_IMAGE = "engine:test"
TOKEN_SECONDS = 4 * 3600

Edit = Callable[[list[Object]], None]
"""Changes the chart's objects before they are applied: takes a verb away, for instance."""


class Installed:
    """One release of the chart in a namespace of its own, without its Deployment: processes here run instead.

    `serves`: the namespaces that it is told to serve; empty with `cluster_wide` for all.
    """

    def __init__(
        self,
        cluster: Cluster,
        programs: Programs,
        folder: Path,
        release: str,
        serves: tuple[str, ...],
        *,
        cluster_wide: bool = True,
        edit: Edit | None = None,
    ) -> None:
        self.cluster = cluster
        self.release = release
        self.folder = folder
        self.serves = serves
        self.user = f"system:serviceaccount:{release}:{NAME}"
        self._count = 0
        self._processes: list[Process] = []
        values = [f"rbac.clusterWide={str(cluster_wide).lower()}", "crd.install=false"]
        if serves:
            values.append(f"watchNamespaces={{{','.join(serves)}}}")
        objects = render(programs, release, *values)
        (self.deployment,) = (obj for obj in objects if obj["kind"] == "Deployment")
        objects.remove(self.deployment)
        for obj in objects:
            if obj["kind"].startswith("Cluster"):
                # Releases of several tests stand side by side.
                obj["metadata"]["name"] += f"-{release}"
                if "roleRef" in obj:
                    obj["roleRef"]["name"] += f"-{release}"
        if edit is not None:
            edit(objects)
        cluster.apply(*objects)
        self.token = self._token()

    def audit(self) -> Audit:
        """What this release asks of the API server from now on."""
        return Audit(self.cluster.plane.audit_log, self.user)

    def start(
        self,
        *,
        server: str | None = None,
        ready: bool = True,
        more: tuple[str, ...] = (),
        hurry: int = 1,
        alone: bool = False,
    ) -> Process:
        """Another process with the arguments that the chart gives.

        `server`: through a proxy; `hurry`: its timers are so many times as fast; `alone`: it has no lease that it would
        end for want of when an API server is away for longer than ten seconds.
        """
        self._count += 1
        stem = self.folder / f"operator-{self._count}"
        kubeconfig = self.cluster.plane.kubeconfig(
            stem.with_suffix(".kubeconfig"), self.token, server=server, namespace=self.release
        )
        given = [word for word in self._arguments() if not (alone and word.startswith("--lease"))]
        arguments = [*given, *more]
        process = Process(stem.with_suffix(".log"), kubeconfig, arguments, identity=stem.name, hurry=hurry)
        self._processes.append(process)
        if ready:
            process.until_ready()
        return process

    def stop(self) -> None:
        for process in self._processes:
            process.kill()

    def _arguments(self) -> list[str]:
        (container,) = self.deployment["spec"]["template"]["spec"]["containers"]
        given = [word for word in container["args"] if not word.startswith("--engine-image")]
        return [*given, f"--engine-image={ENGINE_IMAGE}"]

    def _token(self) -> str:
        where = path("ServiceAccount", self.release, NAME, "token")
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": TOKEN_SECONDS},
        }
        return str(self.cluster.request("POST", where, body)["status"]["token"])


def render(programs: Programs, release: str, *values: str) -> list[Object]:
    """What the chart makes of these values."""
    sets = [part for value in values for part in ("--set", value)]
    text = run([programs.helm, "template", NAME, CHART, "--namespace", release, *sets])
    return [obj for obj in yaml.safe_load_all(text) if obj]


class Process(Daemon):
    """`glm52-operator run` with a health port of its own."""

    def __init__(self, log: Path, kubeconfig: Path, arguments: list[str], identity: str, hurry: int = 1) -> None:
        self.identity = identity
        """The pod: it stays the same when the process is started again."""
        self.health_port = free_port()
        env: dict[str, str] = {
            "KUBECONFIG": str(kubeconfig),
            "PYTHONPATH": os.pathsep.join(str(REPO / part) for part in ("operator", "engine", ".")),
            "GLM52_IDENTITY": identity,
        }
        health = ["--health-host=127.0.0.1", f"--health-port={self.health_port}"]
        program = ["e2e.controlplane.hurried", str(hurry)] if hurry > 1 else ["glm52_operator"]
        super().__init__([sys.executable, "-m", *program, *arguments, *health], log, env)
        self.start()

    def until_ready(self, seconds: float = 60.0) -> None:
        """Its lists are complete and its watches begin."""
        self.until("it is ready", lambda: self.status("/readyz") == 200, seconds)

    def until(self, what: str, probe: Callable[[], Any], seconds: float = 60.0) -> None:
        """Wait for something that only the process itself tells; `Late` with its last words when it does not."""
        deadline = time.monotonic() + seconds
        while not probe():
            if not self.running():
                raise Late(f"the operator ended with {self.code()} before {what}:\n{self.text()[-3000:]}")
            if time.monotonic() > deadline:
                raise Late(f"not within {seconds:.0f} s: {what}:\n{self.text()[-3000:]}")
            time.sleep(0.02)

    def status(self, where: str) -> int | None:
        """The HTTP status of /healthz or /readyz; None where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}{where}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def metrics(self) -> dict[str, float]:
        """Sample name with labels → value."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/metrics", timeout=5) as answer:
            return parse_metrics(answer.read().decode())

    def wait_ended(self, seconds: float = 60.0) -> int:
        """Its exit code once it ends by itself."""
        try:
            return self.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Late(f"the operator did not end within {seconds:.0f} s:\n{self.text()[-3000:]}") from None
