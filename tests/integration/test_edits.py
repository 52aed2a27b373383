"""Edits that are more than another number: many at once, of what a replica is, of what cannot be changed in place."""

from __future__ import annotations

import json
import random

from e2e.controlplane.client import Object
from e2e.controlplane.operator import Installed, Process
from e2e.controlplane.space import Space, deployment
from e2e.controlplane.standin import Kubelets, Life
from glm52_operator import names
from glm52_operator.desired.children import build
from glm52_operator.desired.target import Target
from glm52_operator.plan.resolve import resolve


def uids(space: Space, role: str) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in space.pods("chat", role).items()}


def test_the_last_of_a_burst_of_edits_is_the_one_that_counts(space: Space, operator: Process) -> None:
    """Also one that comes while the status of the one before is written, after which nothing would call for a pass."""
    dice, none = random.Random(3), {"replicas": 0}
    last = {f"d{number}": 0 for number in range(4)}
    space.apply(*(deployment(name, prefill=none, decode=none, router=none) for name in last))
    for name in last:
        space.until_condition(name, "Ready", reason="ScaledToZero")
    for _ in range(8):
        for name in dice.choices(sorted(last), k=10):
            # Of these the status alone speaks.
            space.edit(name, crashPolicy={"maxRestarts": dice.randint(1, 32)})
        for name in last:
            space.until_condition(name, "Ready", reason="ScaledToZero")
    for name in last:
        last[name] = dice.randint(6, 3600)
        space.edit(name, drain={"windowSeconds": last[name]})
    for name, seconds in last.items():
        space.until_condition(name, "Ready", reason="ScaledToZero")
        made = space.seen("StatefulSet", f"{name}-decode")
        assert made is not None
        config = json.loads(made["spec"]["template"]["metadata"]["annotations"][names.CONFIG])
        assert config["drain"]["window_seconds"] == seconds


def test_replicas_become_ones_of_two_hosts_and_of_one_again(
    space: Space, operator: Process, kubelets: Kubelets
) -> None:
    kubelets.live(Life(warm_up=0.2, drain=0.2), space.name)
    space.apply(deployment("chat", decode={"replicas": 2}))
    space.until_ready("chat")
    for hosts in (2, 1):
        before = set(uids(space, "decode").values())
        edited = space.edit("chat", decode={"hostsPerReplica": hosts})["metadata"]["generation"]
        decode = space.until_ready("chat", edited)["status"]["decode"]
        assert (decode["replicas"], decode["ready"]) == (2, "2/2")
        space.until("what is too many is gone", lambda hosts=hosts: len(uids(space, "decode")) == 2 * hosts)  # type: ignore[misc]
        assert before.isdisjoint(uids(space, "decode").values())
        leaders = {pod["metadata"]["name"] for pod in space.cluster.listed("Pod", space.name, decode["selector"])}
        assert leaders == {"chat-decode-0", f"chat-decode-{hosts}"}


def test_what_cannot_be_changed_in_place_is_told_and_what_is_advised_heals(space: Space, installed: Installed) -> None:
    """As where an operator before made a StatefulSet in another way."""
    made = space.apply(deployment("chat", image="engine:1", decode={"replicas": 2}))
    workload = next(child for child in children(made) if child["kind"] == "StatefulSet" and _is_decode(child))
    workload["spec"]["podManagementPolicy"] = "OrderedReady"
    space.cluster.apply(workload, manager=names.MANAGER, force="true")
    space.until("its pods are there", lambda: len(space.pods("chat", "decode")) == 2)
    before = uids(space, "decode")
    installed.start()
    said = space.until_condition("chat", "ConfigValid", status="False", reason="ImmutableField")["message"]
    assert "StatefulSet chat-decode" in said
    assert "--cascade=orphan" in said
    # The rest is there nevertheless.
    space.until_condition("chat", "PrefillReady", status="True")
    space.delete("StatefulSet", "chat-decode", "Orphan")
    space.until_ready("chat")
    assert (space.get("StatefulSet", "chat-decode") or {})["spec"]["podManagementPolicy"] == "Parallel"
    assert uids(space, "decode") == before


def children(made: Object) -> list[Object]:
    resolved = resolve(made, None)
    assert isinstance(resolved, Target)
    return build(resolved)


def _is_decode(child: Object) -> bool:
    return bool(child["metadata"]["name"] == "chat-decode")
