"""kubectl as the tests use it, and waiting on conditions with a deadline."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

POLL_SECONDS = 0.25

Object = dict[str, Any]


class Failed(AssertionError):
    """A command or a wait did not end as expected; the text holds what was seen last."""


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl against one cluster and, if given, in one namespace."""

    binary: Path
    kubeconfig: Path
    namespace: str | None = None

    def within(self, namespace: str) -> Kubectl:
        return Kubectl(self.binary, self.kubeconfig, namespace)

    def __call__(
        self, *args: str, check: bool = True, input: str | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        command = [str(self.binary), "--kubeconfig", str(self.kubeconfig)]
        if self.namespace:
            command += ["--namespace", self.namespace]
        done = subprocess.run(
            [*command, *args], input=input, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise Failed(f"kubectl {' '.join(args)}: exit {done.returncode}: {done.stderr.strip() or done.stdout}")
        return done

    def apply(self, *objects: Object, check: bool = True, dry_run: bool = False) -> subprocess.CompletedProcess[str]:
        """`kubectl apply -f -` of the objects as one list."""
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        extra = ["--dry-run=server"] if dry_run else []
        return self("apply", "-f", "-", *extra, input=listed, check=check)

    def get(self, kind: str, name: str) -> Object | None:
        """One object, or None where there is none."""
        done = self("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(done.stdout) if done.stdout.strip() else None

    def list(self, kinds: str, selector: str = "") -> list[Object]:
        found = self("get", kinds, "-o", "json", *(["-l", selector] if selector else []))
        items: list[Object] = json.loads(found.stdout)["items"]
        return items

    def metrics(self, pod: str, port: int = 8000) -> dict[str, float]:
        """A pod's /metrics through the API server's proxy: sample name with labels → value."""
        text = self("get", "--raw", f"/api/v1/namespaces/{self.namespace}/pods/{pod}:{port}/proxy/metrics").stdout
        return parse_metrics(text)


def parse_metrics(text: str) -> dict[str, float]:
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def total(samples: dict[str, float], name: str, **labels: str) -> float:
    """Sum of the samples of one metric whose labels include the given ones; fails where the metric is absent."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [
        value
        for sample, value in samples.items()
        if sample.split("{", 1)[0] == name and all(label in sample for label in wanted)
    ]
    if not found:
        raise Failed(f"no metric {name}{labels or ''}; there are {sorted({s.split('{')[0] for s in samples})}")
    return sum(found)


T = TypeVar("T")


def until(what: str, probe: Callable[[], T], *, timeout: float = 120, last: Callable[[], object] | None = None) -> T:
    """The first true result of `probe`; fails at the deadline with `what` and what `last` (or the probe) shows."""
    deadline = time.monotonic() + timeout
    while True:
        seen = probe()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise Failed(f"not within {timeout:.0f} s: {what}; last seen: {last() if last else seen!r}")
        time.sleep(POLL_SECONDS)


def condition(deployment: Object | None, kind: str) -> Object:
    """One condition of a GLM52Deployment, or an empty dict."""
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == kind), {})


def is_current(deployment: Object | None, kind: str) -> bool:
    """The condition is True and speaks of the newest spec."""
    found = condition(deployment, kind)
    return bool(
        deployment
        and found.get("status") == "True"
        and found.get("observedGeneration") == deployment["metadata"]["generation"]
    )


def wait_ready(kubectl: Kubectl, name: str, timeout: int = 240) -> Object:
    """`kubectl wait --for=condition=Ready`, as a user does; on failure the error holds every condition."""
    done = kubectl(
        "wait", "--for=condition=Ready", f"glm52/{name}", f"--timeout={timeout}s", check=False, timeout=timeout + 30
    )
    deployment = kubectl.get("glm52", name)
    if done.returncode or deployment is None:
        status = json.dumps((deployment or {}).get("status"), indent=1)
        pods = kubectl("get", "pods", "-o", "wide", check=False).stdout
        raise Failed(f"glm52/{name} is not Ready: {done.stderr.strip()}\n{status}\n{pods}")
    return deployment
