"""Crashes on a real control plane: counted once by whichever operator, held, latched, released by an edit."""

from __future__ import annotations

import random

from e2e.controlplane.client import Object
from e2e.controlplane.operator import Process
from e2e.controlplane.space import Space, deployment
from e2e.controlplane.standin import Exit, Kubelets, termination
from glm52_engine.config import EXIT_CODES, Hold, Outcome
from glm52_operator import names

POLICY = {"maxRestarts": 3, "backoffBaseSeconds": 600, "backoffMaxSeconds": 600}


def end(outcome: Outcome, message: str, host: str) -> Exit:
    code = EXIT_CODES[outcome]
    marker = f"CRASH_{host}" if outcome in (Outcome.CRASHED, Outcome.WEDGED) else ""
    told = {"outcome": outcome.value, "role": "decode", "host": host, "message": message, "marker": marker, "rank": 2}
    return Exit(code, termination(**told))


def status(space: Space) -> Object:
    found: Object = (space.seen("GLM52Deployment", "chat") or {}).get("status", {})
    return found


def until_crashes(space: Space, count: int) -> list[Object]:
    def probe() -> list[Object] | None:
        crashes = status(space).get("crashes", [])
        return crashes if len(crashes) == count else None

    return space.until(f"{count} crashes are told", probe, last=lambda: status(space))


def hold(pod: Object) -> Hold | None:
    return Hold.decode(pod["metadata"].get("annotations", {}).get(names.HOLD, ""))


def uids(space: Space, *without: str) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in space.pods("chat").items() if name not in without}


def test_a_replica_that_crashes_is_held_then_latched_and_released_by_an_edit(
    space: Space, operator: Process, kubelets: Kubelets
) -> None:
    space.apply(deployment("chat", decode={"replicas": 2}, crashPolicy=POLICY))
    space.until_ready("chat")
    bad, others = "chat-decode-1", uids(space, "chat-decode-1")

    def crash(number: int) -> None:
        kubelets.crash(space.name, bad, end(Outcome.CRASHED, f"crash {number}", bad), restarts=False)
        until_crashes(space, number)

    def held(until_latched: bool) -> Hold:
        def probe() -> Hold | None:
            found = hold(space.pods("chat")[bad])
            return found if found is not None and (found.until is None) is until_latched else None

        return space.until("its pod is held", probe, last=lambda: space.pods("chat")[bad]["metadata"])

    crash(1)
    first = status(space)["crashes"][0]
    assert (first["pod"], first["rank"], first["exitCode"], first["marker"]) == (bad, 2, 70, f"CRASH_{bad}")
    assert first["node"]
    kubelets.restart(space.name, bad)
    space.until_ready("chat")
    # A new process knows what the old one has told.
    operator.kill()
    operator.start()
    crash(2)
    assert "crashed 2 times" in held(until_latched=False).why
    kubelets.restart(space.name, bad)
    crash(3)
    degraded = space.until_condition("chat", "Degraded", status="True", reason="CrashLoop")
    assert bad in degraded["message"]
    assert "crash 3" in degraded["message"]
    held(until_latched=True)
    assert uids(space, bad) == others
    assert all(hold(pod) is None for name, pod in space.pods("chat").items() if name != bad)
    old = space.pods("chat")[bad]["metadata"]["uid"]
    # An edit that rolls nothing out releases it as well.
    generation = space.edit("chat", crashPolicy={"maxRestarts": 5})["metadata"]["generation"]
    space.until_ready("chat", generation)
    assert space.condition("chat", "Degraded") == {}
    assert space.pods("chat")[bad]["metadata"]["uid"] != old
    assert uids(space, bad) == others
    assert {crash["message"].rpartition(" ")[2] for crash in status(space)["crashes"]} == {"1", "2", "3"}


def test_a_smaller_limit_latches_nobody_for_what_came_before_it(
    space: Space, operator: Process, kubelets: Kubelets
) -> None:
    """Also not for a crash that is seen only afterwards; what crashes then is latched, and nobody else."""
    space.apply(deployment("chat", decode={"replicas": 3}, crashPolicy={"backoffBaseSeconds": 0}))
    space.until_ready("chat")
    before, bad = uids(space), "chat-decode-2"
    for number, name in enumerate(("chat-decode-0", "chat-decode-0", "chat-decode-1"), 1):
        kubelets.crash(space.name, name, Exit(137))
        until_crashes(space, number)
    operator.kill()
    kubelets.crash(space.name, "chat-decode-1", Exit(137))
    generation = space.edit("chat", crashPolicy={"maxRestarts": 1})["metadata"]["generation"]
    operator.start()
    until_crashes(space, 4)
    space.until_ready("chat", generation)
    assert space.condition("chat", "Degraded") == {}
    kubelets.crash(space.name, bad, Exit(137), restarts=False)
    message = space.until_condition("chat", "Degraded", status="True", reason="CrashLoop")["message"]
    assert bad in message
    assert [entry["replica"] for entry in status(space)["restarts"] if entry["latched"]] == [bad]
    assert uids(space) == before


def test_ends_that_nobody_asked_for_and_one_that_is_no_crash(
    space: Space, operator: Process, kubelets: Kubelets
) -> None:
    ends = {
        "OOMKilled": Exit(137, reason="OOMKilled"),
        "EndedUnasked": Exit(0),
        "Killed": Exit(134, "core dumped"),
        "Wedged": end(Outcome.WEDGED, "no step for 60 s", "chat-decode-3"),
        "": end(Outcome.CONFIG_REFUSED, "no config.json", "chat-decode-4"),
    }
    space.apply(deployment("chat", decode={"replicas": len(ends)}))
    space.until_ready("chat")
    for number, each in enumerate(ends.values()):
        kubelets.crash(space.name, f"chat-decode-{number}", each, restarts=False)
    found = {crash["pod"]: crash["reason"] for crash in until_crashes(space, len(ends) - 1)}
    space.until_condition("chat", "DecodeReady", reason="ConfigRefused")
    assert found == {f"chat-decode-{number}": reason for number, reason in enumerate(ends) if reason}
    assert {entry["replica"]: entry["count"] for entry in status(space)["restarts"]} == dict.fromkeys(found, 1)


def test_each_crash_is_told_once_however_often_the_operator_dies(
    space: Space, operator: Process, kubelets: Kubelets
) -> None:
    dice = random.Random(7)
    space.apply(deployment("chat", decode={"replicas": 3}, crashPolicy={"maxRestarts": 32, "backoffBaseSeconds": 0}))
    space.until_ready("chat")
    for number in range(1, 6):
        name, early = f"chat-decode-{dice.randrange(3)}", dice.random() < 0.5
        if early:
            operator.kill()
        kubelets.crash(space.name, name, end(Outcome.CRASHED, f"crash {number}", name))
        if not early:
            # Perhaps between the hold, the status and its event.
            operator.kill()
        operator.start()
        until_crashes(space, number)
    told = {crash["message"].rpartition(" ")[2] for crash in status(space)["crashes"]}
    assert told == {str(number) for number in range(1, 6)}
    assert sum(entry["count"] for entry in status(space)["restarts"]) == 5
    space.until_ready("chat")


def test_the_hosts_of_a_replica_begin_anew_together_and_those_of_others_stay(
    space: Space, operator: Process, kubelets: Kubelets
) -> None:
    space.apply(deployment("chat", decode={"replicas": 2, "hostsPerReplica": 2}, crashPolicy=POLICY))
    space.until_ready("chat")
    before, fallen = uids(space), {"chat-decode-2", "chat-decode-3"}
    # A host falls, and the other one for it a moment later: one crash of the replica.
    kubelets.crash(space.name, "chat-decode-3", end(Outcome.CRASHED, "rank 5 failed", "chat-decode-3"), restarts=False)
    until_crashes(space, 1)

    def anew() -> bool:
        now = uids(space)
        return fallen <= now.keys() and all(now[name] != before[name] for name in fallen)

    space.until("both hosts are new", anew, last=lambda: uids(space))
    space.until_ready("chat")
    assert {name: uid for name, uid in uids(space).items() if name not in fallen} == {
        name: uid for name, uid in before.items() if name not in fallen
    }
    (entry,) = status(space)["restarts"]
    assert (entry["replica"], entry["count"]) == ("chat-decode-2", 1)
