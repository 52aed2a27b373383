"""Of several operators one acts, whatever becomes of it."""

from __future__ import annotations

import signal

from e2e.controlplane.audit import Request
from e2e.controlplane.operator import NAME, Installed, Process
from e2e.controlplane.space import Space, deployment


def holder(installed: Installed) -> str:
    lease = installed.cluster.seen("Lease", installed.release, NAME)
    return str(lease["spec"].get("holderIdentity") or "") if lease else ""


def until_held(installed: Installed, process: Process, timeout: float = 60.0) -> None:
    installed.cluster.until(
        f"{process.identity} holds the lease",
        lambda: holder(installed) == process.identity,
        timeout,
        lambda: f"{holder(installed)}\n{process.text()[-2000:]}",
    )


def writes(requests: list[Request], process: Process) -> list[str]:
    """Of one process, but for those of its lease."""
    by = [r for r in requests if r.is_write and r.resource != "leases" and f"({process.identity})" in r.agent]
    return [str(request) for request in by]


def test_a_standby_does_nothing_and_goes_on_at_once_when_the_other_ends(space: Space, installed: Installed) -> None:
    audit = installed.audit()
    first = installed.start()
    until_held(installed, first)
    second = installed.start()
    space.apply(deployment("chat"))
    space.until_ready("chat")
    assert writes(audit.since(), first)
    assert not writes(audit.since(), second)
    assert first.end() == 0
    # The lease was given back: nobody waits until it runs out, which would take 15 seconds.
    until_held(installed, second, timeout=10)
    space.until_ready("chat", space.edit("chat", decode={"replicas": 2})["metadata"]["generation"])
    assert writes(audit.since(), second)


def test_a_killed_pods_container_has_its_lease_back_at_once(space: Space, installed: Installed) -> None:
    operator = installed.start()
    until_held(installed, operator)
    operator.kill()
    generation = space.apply(deployment("chat"))["metadata"]["generation"]
    operator.start()
    # Long before the lease that the killed process left behind runs out, but for a machine that is busy.
    space.until_ready("chat", generation, timeout=14)


def test_another_pod_takes_over_from_one_that_was_stopped_and_which_then_ends_without_a_write(
    space: Space, installed: Installed
) -> None:
    """As on a node that hangs and comes back: the one that wakes up must not write a thing."""
    first = installed.start()
    until_held(installed, first)
    space.apply(deployment("chat"))
    space.until_ready("chat")
    second = installed.start()
    first.signal(signal.SIGSTOP)
    audit = installed.audit()
    until_held(installed, second)
    space.until_ready("chat", space.edit("chat", decode={"replicas": 2})["metadata"]["generation"])
    # What it would put right if it still could.
    space.patch("Service", "chat-decode", {"spec": {"selector": {"glm52.dev/role": "x"}}})
    first.signal(signal.SIGCONT)
    assert first.wait_ended() == 1
    assert "the lease" in first.text()
    assert not writes(audit.since(), first)
    assert second.running()


def test_the_lease_taken_by_hand_ends_the_process(space: Space, installed: Installed) -> None:
    operator = installed.start()
    until_held(installed, operator)
    space.cluster.patch("Lease", installed.release, NAME, {"spec": {"holderIdentity": "somebody"}})
    assert operator.wait_ended() == 1
    assert "taken by somebody" in operator.text()
