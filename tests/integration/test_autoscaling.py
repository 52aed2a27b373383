"""The cluster's own HorizontalPodAutoscaler on a deployment's decode replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from e2e.controlplane.audit import Audit
from e2e.controlplane.client import Object
from e2e.controlplane.cluster import Cluster
from e2e.controlplane.metrics import MetricsApi
from e2e.controlplane.operator import Process
from e2e.controlplane.plane import CONTROLLERS, ControlPlane
from e2e.controlplane.space import Space, deployment
from glm52_operator import names

HOSTS = 2
MOST = 6
LOOKS = 5
"""How often the autoscaler looks, and changes nothing, before that counts as rest."""


@dataclass
class Load:
    """Work for a number of replicas, which those that are ready have among them."""

    replicas: int = 1
    asked: set[str] = field(default_factory=set)
    """Names of all pods that the autoscaler has asked about."""

    def uses(self, namespace: str, pods: list[Object]) -> dict[str, int]:
        self.asked |= {pod["metadata"]["name"] for pod in pods}
        # One that is being deleted counts for nothing to the autoscaler, ready or not: with work on it the others would
        # seem to have less, and one of them would be too many.
        ready = [pod["metadata"]["name"] for pod in pods if _is_ready(pod) and _stays(pod)]
        return dict.fromkeys(ready, self.replicas * 1000 // max(len(ready), 1))


@pytest.fixture
def load() -> Load:
    return Load()


@pytest.fixture
def metrics(api: Cluster, plane: ControlPlane, space: Space, load: Load) -> Iterator[MetricsApi]:
    served = MetricsApi(api, plane.ca.parent, space.name, load.uses)
    yield served
    served.close()


def autoscaler() -> Object:
    """One replica for each core's work, without any damping: nothing may hide that it would flap."""
    at_once = {"stabilizationWindowSeconds": 0}
    cpu = {"name": "cpu", "target": {"type": "AverageValue", "averageValue": "1"}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "chat"},
        "spec": {
            "scaleTargetRef": {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": "chat"},
            "minReplicas": 1,
            "maxReplicas": MOST,
            "metrics": [{"type": "Resource", "resource": cpu}],
            "behavior": {"scaleUp": at_once, "scaleDown": at_once},
        },
    }


def test_decode_follows_its_load_and_nothing_flaps(
    space: Space, operator: Process, metrics: MetricsApi, load: Load, plane: ControlPlane
) -> None:
    """Through a rollout, an edit, and an operator that is away: the specification changes once for each new load."""
    scaled = Audit(plane.audit_log, CONTROLLERS)
    space.apply(deployment("chat", decode={"replicas": 1, "hostsPerReplica": HOSTS}))
    space.until_ready("chat")
    space.apply(autoscaler())
    edits = 0

    def rests(replicas: int) -> None:
        """So many replicas serve, and the autoscaler has looked at them again and again."""
        space.until(f"{replicas} are wanted", lambda: _wanted(space) == replicas, last=lambda: _said(space))
        space.until_ready("chat")
        seen = metrics.looks(space.name)
        space.until(
            "the autoscaler looks", lambda: metrics.looks(space.name) >= seen + LOOKS, last=lambda: _said(space)
        )
        selector = space.until_ready("chat")["status"]["decode"]["selector"]
        selected = {pod["metadata"]["name"] for pod in space.cluster.listed("Pod", space.name, selector)}
        assert selected == {f"chat-decode-{number * HOSTS}" for number in range(replicas)}
        assert len(space.pods("chat", "decode")) == replicas * HOSTS

    rests(1)
    load.replicas = 3
    rests(3)
    # Pods come and go: their work is on the others meanwhile.
    space.until_ready("chat", _generation(space.edit("chat", restart="once")))
    space.until_ready("chat", _generation(space.edit("chat", decode={"maxNumSeqs": 3})))
    edits += 2
    rests(3)
    operator.kill()
    load.replicas = 2
    space.until("2 are wanted", lambda: _wanted(space) == 2, last=lambda: _said(space))
    space.edit("chat", drain={"windowSeconds": 6})
    edits += 1
    operator.start()
    rests(2)
    changes = [f"{request.verb} {request.code}" for request in scaled.since() if request.is_write]
    assert changes == ["update 200"] * 2
    # Nobody else wrote: each change of the specification is one of these.
    assert _generation(space.get(names.KIND, "chat")) == 1 + edits + len(changes)
    # Hosts that do not lead are no replicas.
    assert load.asked == {f"chat-decode-{number * HOSTS}" for number in range(3)}


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _stays(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"]


def _generation(obj: Object | None) -> int:
    assert obj is not None
    return int(obj["metadata"]["generation"])


def _wanted(space: Space) -> int:
    return int((space.seen(names.KIND, "chat") or {})["spec"]["decode"]["replicas"])


def _said(space: Space) -> object:
    found = (space.get(kind, "chat") or {} for kind in ("HorizontalPodAutoscaler", names.KIND))
    return [obj.get("status") for obj in found]
