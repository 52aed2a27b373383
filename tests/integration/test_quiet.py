"""At rest nothing is written and nothing is asked; what was settled stays untouched."""

from __future__ import annotations

import pytest

from e2e.controlplane.audit import Audit
from e2e.controlplane.operator import Installed, Process
from e2e.controlplane.space import Space, deployment

REST_SECONDS = 30.0
"""Longer than anything that the operator does by the clock; the benchmark takes five minutes."""


def asked(audit: Audit) -> list[str]:
    """All requests but those that keep the lease, and watches, which are renewed by the clock."""
    return [str(r) for r in audit.since() if r.resource != "leases" and r.verb != "watch"]


def written(audit: Audit) -> list[str]:
    return [str(r) for r in audit.since() if r.is_write and r.resource != "leases"]


def settle(space: Space, audit: Audit, seconds: float = 5.0) -> None:
    """Until the operator has asked for nothing for so long."""
    seen = -1
    while seen != (seen := len(asked(audit))):
        space.cluster.idle(seconds)


def test_nothing_is_asked_at_rest(space: Space, installed: Installed) -> None:
    """One that serves, one that cannot be, one that is scaled to zero, and one whose pods are not ready."""
    audit = installed.audit()
    installed.start()
    none = {"replicas": 0}
    space.apply(
        deployment("serves", decode={"replicas": 2}),
        deployment("idle", prefill=none, decode=none, router=none),
    )
    space.until_ready("serves")
    space.until_condition("idle", "Ready", reason="ScaledToZero")
    settle(space, audit)
    audit.mark()
    space.cluster.idle(REST_SECONDS)
    assert asked(audit) == []


def test_a_restart_writes_nothing(space: Space, installed: Installed) -> None:
    operator = installed.start()
    for name in ("a", "b"):
        space.apply(deployment(name))
    for name in ("a", "b"):
        space.until_ready(name)
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
    operator = installed.start()
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
