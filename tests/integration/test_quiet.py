"""At rest nothing is written and nothing is asked; what was settled stays untouched."""

from __future__ import annotations

import pytest

from e2e.controlplane.audit import Audit
from e2e.controlplane.client import Object, path
from e2e.controlplane.operator import Installed, Process
from e2e.controlplane.space import Space, deployment
from e2e.controlplane.standin import FOREVER, Kubelets, Life
from glm52_operator.reconcile.nodes import FRESH_SECONDS

HURRY = 20
"""All that the operator does by the clock it does so many times as often. `bench.reconcile` waits for true minutes."""

REST_SECONDS = 300.0 / HURRY
"""Five minutes of the operator's: its watches are renewed seven times."""

SETTLED_SECONDS = 20.0 / HURRY
"""What it has not done for so long it does not do by itself."""


def asked(audit: Audit) -> list[str]:
    """All requests but those that keep the lease, and watches, which are renewed by the clock."""
    return [str(r) for r in audit.since() if r.resource != "leases" and r.verb != "watch"]


def written(audit: Audit) -> list[str]:
    return [str(r) for r in audit.since() if r.is_write and r.resource != "leases"]


def settle(space: Space, audit: Audit) -> None:
    """Until the operator has asked for nothing for so long."""
    seen = -1
    while seen != (seen := len(asked(audit))):
        space.cluster.idle(SETTLED_SECONDS)


def watches(audit: Audit) -> int:
    return sum(r.verb == "watch" and r.resource == "glm52deployments" for r in audit.since())


def resting() -> list[Object]:
    """One that serves, and one that is scaled to zero."""
    none = {"replicas": 0}
    return [
        deployment("serves", decode={"replicas": 2}),
        deployment("idle", prefill=none, decode=none, router=none),
    ]


def test_nothing_is_asked_at_rest(space: Space, installed: Installed) -> None:
    audit = installed.audit()
    installed.start(hurry=HURRY)
    space.apply(*resting())
    space.until_ready("serves")
    space.until_condition("idle", "Ready", reason="ScaledToZero")
    settle(space, audit)
    audit.mark()
    space.cluster.idle(REST_SECONDS)
    assert asked(audit) == []
    # The clock that was hurried is the one that counts.
    assert watches(audit) >= 5


def test_nothing_is_written_while_nothing_changes_though_not_all_is_well(
    space: Space, installed: Installed, kubelets: Kubelets
) -> None:
    """Those that cannot be are looked at again and again; what is found is what stands there already."""
    kubelets.lacks_image("engine:nowhere")
    kubelets.live(Life(bound=False), space.name, matching="crowded-decode")
    kubelets.live(Life(warm_up=FOREVER), space.name, matching="starts-")
    space.apply(
        deployment("waits", image="engine:nowhere"),
        deployment("crowded", decode={"hostPoolGiB": 4000}),
        deployment("starts"),
    )
    audit = installed.audit()
    operator = installed.start(hurry=HURRY)
    space.until_condition("waits", "DecodeReady", reason="ImagePullBackOff")
    space.until_condition("crowded", "Schedulable", status="False")
    space.until_condition("starts", "Ready", status="False")
    seen = -1
    while seen != (seen := len(written(audit))):
        space.cluster.idle(SETTLED_SECONDS)
    for _ in range(5):
        pods = on_nodes(space)
        space.cluster.idle(FRESH_SECONDS / HURRY + SETTLED_SECONDS)
        audit.mark()
        passes = operator.metrics()
        space.cluster.idle(REST_SECONDS)
        # What pods of a test before leave free on the nodes is news, and told.
        if on_nodes(space) == pods:
            break
    assert written(audit) == []
    assert looks(operator.metrics()) >= looks(passes) + 3


def on_nodes(space: Space) -> set[str]:
    """Every pod of the cluster."""
    return {pod["metadata"]["uid"] for pod in space.cluster.request("GET", path("Pod"))["items"]}


def looks(metrics: dict[str, float]) -> float:
    """How many passes there were."""
    return sum(value for name, value in metrics.items() if name.startswith("glm52_operator_reconcile_seconds_count"))


def test_a_restart_writes_nothing(space: Space, installed: Installed) -> None:
    operator = installed.start(hurry=HURRY)
    space.apply(*resting())
    space.until_ready("serves")
    space.until_condition("idle", "Ready", reason="ScaledToZero")
    settle(space, installed.audit())
    operator.kill()
    audit = installed.audit()
    operator.start()
    operator.until_ready()
    settle(space, audit)
    assert written(audit) == []


@pytest.mark.parametrize("cascade", ["Background", "Foreground", "Orphan"])
def test_a_deletion_of_any_kind_is_quiet(space: Space, installed: Installed, cascade: str) -> None:
    """Children go by their owner, or stay where the user says so; the operator has no part in it."""
    operator = installed.start(hurry=HURRY)
    space.apply(deployment("chat"))
    space.until_ready("chat")
    audit = installed.audit()
    settle(space, audit)
    audit.mark()
    space.delete("GLM52Deployment", "chat", cascade)
    space.until("it is gone", lambda: space.seen("GLM52Deployment", "chat") is None)
    if cascade == "Orphan":
        settle(space, audit)
        assert "StatefulSet/chat-decode" in space.children("chat")
    else:
        space.until("its children are gone", lambda: not space.children("chat") and not space.pods("chat"))
        settle(space, audit)
    # An event that tells how pods ended may be late; children are neither made again nor taken away.
    assert [r for r in written(audit) if " events " not in r] == []
    assert "Traceback" not in operator.text()


def test_a_namesake_takes_over_what_was_orphaned(space: Space, operator: Process) -> None:
    """Nobody owns it, and it bears our labels: pods go on serving."""
    space.apply(deployment("chat"))
    space.until_ready("chat")
    pods = {name: pod["metadata"]["uid"] for name, pod in space.pods("chat", "decode").items()}
    space.delete("GLM52Deployment", "chat", "Orphan")
    space.until("it is gone", lambda: space.seen("GLM52Deployment", "chat") is None)
    new = space.apply(deployment("chat"))
    space.until_ready("chat")
    for name, obj in space.children("chat").items():
        if name.startswith("Secret/"):
            # The operator may make Secrets and not change them: this one serves on without an owner.
            continue
        (owner,) = obj["metadata"]["ownerReferences"]
        assert owner["uid"] == new["metadata"]["uid"]
    assert {name: pod["metadata"]["uid"] for name, pod in space.pods("chat", "decode").items()} == pods
